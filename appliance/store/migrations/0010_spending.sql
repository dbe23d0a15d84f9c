-- What keys may spend, and what was spent: tokens by the hour, and devices by the time that jobs held them.

ALTER TABLE keys ADD COLUMN models TEXT;
ALTER TABLE keys ADD COLUMN requests_per_minute INTEGER;
ALTER TABLE keys ADD COLUMN tokens_per_minute INTEGER;
ALTER TABLE keys ADD COLUMN tokens_per_day INTEGER;
ALTER TABLE keys ADD COLUMN tokens_per_month INTEGER;

CREATE TABLE usage (
    hour_s INTEGER NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL, version TEXT NOT NULL,
    requests INTEGER NOT NULL, errors INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, PRIMARY KEY (hour_s, key_id, model, version)
);

CREATE TABLE device_time (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL, devices INTEGER NOT NULL, from_s REAL NOT NULL,
    to_s REAL
);
CREATE INDEX device_time_open ON device_time (job_id) WHERE to_s IS NULL;
