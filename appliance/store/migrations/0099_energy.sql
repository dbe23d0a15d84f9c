-- Energy that devices have counted while a job or a model's engines held them, or nobody, by the hour.
-- metered_s: device-seconds in which it was counted.
CREATE TABLE energy (
    kind TEXT NOT NULL, name TEXT NOT NULL, hour_s INTEGER NOT NULL, joules REAL NOT NULL, metered_s REAL NOT NULL,
    PRIMARY KEY (kind, name, hour_s)
) WITHOUT ROWID;
CREATE INDEX energy_by_hour ON energy (hour_s);
