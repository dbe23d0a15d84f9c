-- What a job's devices cost is told after the job has gone, for whom and of which model its row said.

ALTER TABLE device_time ADD COLUMN key_id TEXT;
ALTER TABLE device_time ADD COLUMN owner TEXT;
ALTER TABLE device_time ADD COLUMN model TEXT;
CREATE TRIGGER jobs_cost_stays BEFORE DELETE ON jobs BEGIN
    UPDATE device_time SET key_id = OLD.key_id, owner = OLD.owner, model = OLD.model WHERE job_id = OLD.id;
END;
