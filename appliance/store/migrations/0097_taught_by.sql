-- Of a job that distils, the versions of its teacher that it has learnt from, the first one first: a name may be another
-- version's by the end of the job.
ALTER TABLE job_judges ADD COLUMN taught_by TEXT NOT NULL DEFAULT '[]';
