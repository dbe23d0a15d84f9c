-- The share of a step's time in which its first rank communicated; NULL of steps that nobody profiled.
ALTER TABLE job_metrics ADD COLUMN communication REAL;
CREATE INDEX job_metrics_profiled ON job_metrics(job_id, step) WHERE communication IS NOT NULL;
