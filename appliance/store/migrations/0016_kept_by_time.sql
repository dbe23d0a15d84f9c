-- What was kept long enough is found by its time: the order of rows is not that of time where the clock was set back.
CREATE INDEX audit_time ON audit (created_s);
CREATE INDEX handovers_ended ON handovers (ended_s);
CREATE INDEX operations_ended ON operations (ended_s) WHERE state != 'running';
CREATE INDEX device_time_ended ON device_time (to_s);
CREATE INDEX batches_ended_time ON batches (created_s)
    WHERE status NOT IN ('validating', 'in_progress', 'finalizing', 'cancelling');
