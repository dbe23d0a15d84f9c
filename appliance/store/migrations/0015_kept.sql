-- The audit log is bounded by key; ended jobs are by owner, but for those whose device-hours are still told.
CREATE INDEX audit_of_key ON audit (key_id, seq);
CREATE INDEX device_time_job ON device_time (job_id);
