-- Gates: the evaluation that decides whether a job's version answers, and its verdict.
ALTER TABLE jobs ADD COLUMN gate TEXT;
CREATE INDEX jobs_gated ON jobs (seq) WHERE gate IS NOT NULL AND gate ->> '$.activated' IS NULL;
