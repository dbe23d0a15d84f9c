-- How much a run has chosen, and what it was, in a few bytes: the names of the files, of which there may be ten thousand,
-- are read only where they are needed, and go when the run ends.
ALTER TABLE pipeline_runs ADD COLUMN data_files INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pipeline_runs ADD COLUMN data_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pipeline_runs ADD COLUMN data_sha256 TEXT NOT NULL DEFAULT '';
UPDATE pipeline_runs SET
    data_files = (SELECT count(*) FROM json_each(data)),
    data_bytes = (SELECT coalesce(sum(value ->> 0), 0) FROM json_each(data));
UPDATE pipeline_runs SET data = '{}' WHERE state <> 'running';
