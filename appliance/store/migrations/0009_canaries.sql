-- A version that takes a share of its model's requests; the newest of each model, running or ended.

CREATE TABLE canaries (
    model TEXT PRIMARY KEY REFERENCES models (id) ON DELETE CASCADE, version TEXT NOT NULL, before TEXT NOT NULL,
    share REAL NOT NULL, auto INTEGER NOT NULL, watch_s REAL NOT NULL, min_requests INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'promoted', 'rolled_back')), reason TEXT NOT NULL DEFAULT '',
    failed_reason TEXT NOT NULL DEFAULT '', created_s REAL NOT NULL, ended_s REAL, compared TEXT
);
