-- What the check of a run's data has found, and the files that were made of it.
ALTER TABLE pipeline_runs ADD COLUMN made TEXT NOT NULL DEFAULT '{}';
