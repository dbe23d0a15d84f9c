-- What a job's method measures of a step beside its loss, and of a validation: numbers by name in JSON.
ALTER TABLE job_metrics ADD COLUMN measured TEXT;
ALTER TABLE job_metrics ADD COLUMN valid_measured TEXT;
