-- Sweeps over hyperparameters: trials, each with a job for every round that it took part in.
CREATE TABLE sweeps (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, created_s REAL NOT NULL,
    key_id TEXT, owner TEXT NOT NULL DEFAULT '', spec TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
    round INTEGER NOT NULL DEFAULT 0, trials TEXT NOT NULL DEFAULT '[]', files TEXT NOT NULL DEFAULT '{}',
    spent_s REAL NOT NULL DEFAULT 0, best INTEGER, ended_s REAL
);
CREATE INDEX sweeps_going ON sweeps (seq) WHERE state = 'running';
