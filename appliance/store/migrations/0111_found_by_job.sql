-- Found by an index, for a job's start and its success ask for them on the controller's loop: what another job has
-- heard of the same starting model, among all that have ended; the versions that a job has made, among those of all jobs
-- under its name.
CREATE INDEX jobs_heard ON jobs (general ->> '$.of', json_array_length(general, '$.before.known'))
  WHERE general IS NOT NULL;
CREATE INDEX versions_of_job ON versions (model, meta ->> '$.job_id');
