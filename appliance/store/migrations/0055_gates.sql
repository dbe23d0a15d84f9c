-- Gates: whether a version that a job made may answer, decided by evaluations of it and of the version that does.
CREATE TABLE gates (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, created_s REAL NOT NULL, key_id TEXT,
    owner TEXT NOT NULL DEFAULT '', job_id TEXT NOT NULL, model TEXT NOT NULL, terms TEXT NOT NULL,
    version TEXT NOT NULL DEFAULT '', before TEXT NOT NULL DEFAULT '', state TEXT NOT NULL, verdict TEXT,
    reason TEXT NOT NULL DEFAULT '', activated INTEGER NOT NULL DEFAULT 0, runs TEXT NOT NULL DEFAULT '{}',
    told TEXT NOT NULL DEFAULT '[]', decided_s REAL, ended_s REAL
);
CREATE INDEX gates_of_job ON gates (job_id);
CREATE INDEX gates_of_model ON gates (model, seq);
CREATE INDEX gates_unfinished ON gates (seq) WHERE state != 'ended';
