-- Everything has an owner, the one of the key that it was made with. What no key made belongs to the box (''); what was
-- made with a key that is not known any more, to nobody else: the key's own id.

ALTER TABLE files ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE files SET owner = coalesce((SELECT owner FROM keys WHERE keys.id = files.key_id), key_id, '');
-- The box made result files for the owner of their job.
UPDATE files SET owner = coalesce((SELECT jobs.owner FROM jobs, json_each(jobs.result_files) AS result
    WHERE result.value = files.id), '') WHERE key_id IS NULL;
CREATE INDEX files_owner ON files (owner, seq);

ALTER TABLE uploads ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE uploads SET owner = coalesce((SELECT owner FROM keys WHERE keys.id = uploads.key_id), key_id, '');

ALTER TABLE batches ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE batches SET owner = coalesce((SELECT owner FROM keys WHERE keys.id = batches.key_id), key_id, '');
CREATE INDEX batches_owner ON batches (owner, seq);

ALTER TABLE responses ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE responses SET owner = coalesce((SELECT owner FROM keys WHERE keys.id = responses.key_id), key_id);

UPDATE jobs SET owner = key_id WHERE owner = '' AND key_id IS NOT NULL;
CREATE INDEX jobs_owner ON jobs (owner, seq);

-- A model that a job made is its owner's alone; one that was brought in is for all. `owner` of a share '*': everybody.
ALTER TABLE models ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE models SET owner = coalesce((SELECT owner FROM jobs WHERE jobs.id = models.job_id), '');
CREATE TABLE model_shares (
    model TEXT NOT NULL REFERENCES models (id) ON DELETE CASCADE, owner TEXT NOT NULL, created_s REAL NOT NULL,
    PRIMARY KEY (model, owner)
) WITHOUT ROWID;
INSERT INTO model_shares SELECT id, '*', created_s FROM models WHERE kind = 'base';
-- Whose key named a model could use it, and still can.
INSERT OR IGNORE INTO model_shares SELECT models.id, keys.owner, models.created_s
    FROM keys, json_each(keys.models) AS named JOIN models ON models.id = named.value
    WHERE keys.revoked_s IS NULL AND keys.models IS NOT NULL;

-- What jobs of a key may claim: the highest priority, and how many unfinished ones at a time may be not preemptible,
-- have a deadline, or be held.
ALTER TABLE keys ADD COLUMN max_priority INTEGER NOT NULL DEFAULT 0;
ALTER TABLE keys ADD COLUMN max_non_preemptible INTEGER NOT NULL DEFAULT 0;
ALTER TABLE keys ADD COLUMN max_deadlines INTEGER NOT NULL DEFAULT 0;
ALTER TABLE keys ADD COLUMN max_held INTEGER NOT NULL DEFAULT 16;
