-- When an eval was changed last; of those that never were, when they were made.
ALTER TABLE evals ADD COLUMN updated_s REAL NOT NULL DEFAULT 0;
UPDATE evals SET updated_s = created_s;
CREATE INDEX evals_updated ON evals (updated_s, seq);
CREATE INDEX evals_owned_updated ON evals (owner, updated_s, seq);
