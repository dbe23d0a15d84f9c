-- Whether output_model is a name that its owner chose, whose versions come from several jobs; and whether the job's
-- last version answers at once.
ALTER TABLE jobs ADD COLUMN stable_name INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN activate INTEGER NOT NULL DEFAULT 1;
-- A version that its job did not let answer, and nothing else since: a rollback without an argument passes it over.
ALTER TABLE versions ADD COLUMN held_back INTEGER NOT NULL DEFAULT 0;
