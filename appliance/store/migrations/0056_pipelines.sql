-- Pipelines by name: from data to a version that answers. taken: the data of runs that have ended well.
CREATE TABLE pipelines (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, created_s REAL NOT NULL,
    key_id TEXT, owner TEXT NOT NULL DEFAULT '', spec TEXT NOT NULL, scheduled INTEGER NOT NULL DEFAULT 0,
    next_s REAL, note TEXT NOT NULL DEFAULT '', taken TEXT NOT NULL DEFAULT '{}', UNIQUE (owner, name)
);
CREATE TABLE pipeline_runs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    pipeline_id TEXT NOT NULL REFERENCES pipelines (id) ON DELETE CASCADE, created_s REAL NOT NULL, key_id TEXT,
    owner TEXT NOT NULL DEFAULT '', spec TEXT NOT NULL, trigger TEXT NOT NULL, state TEXT NOT NULL,
    outcome TEXT NOT NULL DEFAULT '', reason TEXT NOT NULL DEFAULT '', steps TEXT NOT NULL DEFAULT '[]',
    data TEXT NOT NULL DEFAULT '{}', file_id TEXT, job_id TEXT, ended_s REAL
);
CREATE INDEX pipeline_runs_of ON pipeline_runs (pipeline_id, seq);
CREATE INDEX pipeline_runs_going ON pipeline_runs (seq) WHERE state = 'running';
