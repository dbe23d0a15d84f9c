-- Evaluations: what is tested (evals), each time that it is (eval_runs), and each item of such a run.
CREATE TABLE evals (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, created_s REAL NOT NULL,
    key_id TEXT, owner TEXT NOT NULL DEFAULT '', item_schema TEXT NOT NULL, include_sample INTEGER NOT NULL DEFAULT 0,
    criteria TEXT NOT NULL, metadata TEXT
);
CREATE TABLE eval_runs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    eval_id TEXT NOT NULL REFERENCES evals (id) ON DELETE CASCADE, name TEXT NOT NULL, created_s REAL NOT NULL,
    key_id TEXT, owner TEXT NOT NULL DEFAULT '', status TEXT NOT NULL, model TEXT NOT NULL DEFAULT '',
    data_source TEXT NOT NULL, metadata TEXT, total INTEGER NOT NULL DEFAULT 0, results TEXT NOT NULL DEFAULT '{}',
    usage TEXT NOT NULL DEFAULT '{}', error TEXT, ended_s REAL, bytes INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX eval_runs_of ON eval_runs (eval_id, seq);
CREATE INDEX eval_runs_ended ON eval_runs (ended_s);
CREATE TABLE eval_items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    run_id TEXT NOT NULL REFERENCES eval_runs (id) ON DELETE CASCADE, place INTEGER NOT NULL, created_s REAL NOT NULL,
    status TEXT NOT NULL DEFAULT 'queued', item TEXT NOT NULL, sample TEXT, results TEXT
);
CREATE INDEX eval_items_of ON eval_items (run_id, status, seq);
