-- How large an evaluation's own definition is, so that it counts in its owner's bytes.
ALTER TABLE evals ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
UPDATE evals SET bytes = length(item_schema) + length(criteria);
