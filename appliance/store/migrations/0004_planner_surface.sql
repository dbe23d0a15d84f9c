-- What people say to the planner: owners, more about jobs and deployments, tidal windows.

ALTER TABLE keys ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE keys SET owner = name;

ALTER TABLE jobs ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE jobs SET owner = coalesce((SELECT owner FROM keys WHERE keys.id = jobs.key_id), '');
ALTER TABLE jobs ADD COLUMN deadline_s REAL;
ALTER TABLE jobs ADD COLUMN preemptible INTEGER NOT NULL DEFAULT 1;
ALTER TABLE jobs ADD COLUMN held INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN asked_sizes TEXT;

-- NULL: as many as the box's settings allow, which is what the number in every row meant before one could be given.
ALTER TABLE deployments DROP COLUMN max_replicas;
ALTER TABLE deployments ADD COLUMN max_replicas INTEGER;
ALTER TABLE deployments ADD COLUMN ttft_p95_s REAL;
ALTER TABLE deployments ADD COLUMN tpot_p95_ms REAL;

CREATE TABLE windows (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, cron TEXT NOT NULL, tz TEXT NOT NULL, until TEXT,
    for_s REAL, policy TEXT NOT NULL, train_devices INTEGER, serving_floor INTEGER, created_s REAL NOT NULL
);
