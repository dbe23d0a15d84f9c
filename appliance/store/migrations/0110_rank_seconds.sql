-- What each rank of a job computed by itself in a step, a list in JSON; NULL of steps before.
ALTER TABLE job_metrics ADD COLUMN rank_seconds TEXT;
