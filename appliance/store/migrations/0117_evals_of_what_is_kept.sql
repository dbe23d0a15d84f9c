-- Of an evaluation over kept completions or responses: {"type", "metadata"} of its data source; null where its items are
-- given with each run.
ALTER TABLE evals ADD COLUMN kept TEXT;
