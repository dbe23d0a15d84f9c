-- What a reinforcement job's answers are judged by. Not in the job's row, which is read in every round of the scheduler:
-- a grader may have megabytes.
CREATE TABLE job_graders (job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE, grader TEXT NOT NULL);
