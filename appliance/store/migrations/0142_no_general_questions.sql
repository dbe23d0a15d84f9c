DROP INDEX jobs_heard;
ALTER TABLE jobs DROP COLUMN general;
