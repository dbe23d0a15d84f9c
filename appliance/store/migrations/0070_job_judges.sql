-- Who judges the answers of a job that learns from its own: {"grader": ...} or {"teacher": a model's name}. Not in the
-- job's row, which is read in every round of the scheduler: a grader may have megabytes.
CREATE TABLE job_judges (job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE, judge TEXT NOT NULL);
INSERT INTO job_judges (job_id, judge) SELECT job_id, json_object('grader', json(grader)) FROM job_graders;
DROP TABLE job_graders;
