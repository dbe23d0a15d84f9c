-- Times are seconds since 1970 as REAL (*_s), sizes are bytes. `seq` gives every list its order of creation.
-- AUTOINCREMENT: a number is never given twice, so a cursor stays true after the last row was deleted.

CREATE TABLE box (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE keys (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, sha256 TEXT NOT NULL UNIQUE,
    prefix TEXT NOT NULL, scopes TEXT NOT NULL, created_s REAL NOT NULL, revoked_s REAL
);
CREATE UNIQUE INDEX keys_live_name ON keys (name) WHERE revoked_s IS NULL;

CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, status TEXT NOT NULL, status_details TEXT, report TEXT,
    key_id TEXT, created_s REAL NOT NULL, expires_s REAL
);
CREATE INDEX files_purpose ON files (purpose, seq);

CREATE TABLE models (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL CHECK (kind IN ('base', 'fine-tuned')),
    base TEXT, arch TEXT NOT NULL, task TEXT NOT NULL CHECK (task IN ('generate', 'embed')), params INTEGER NOT NULL,
    bytes INTEGER NOT NULL, max_model_len INTEGER, active_version TEXT, job_id TEXT, owned_by TEXT NOT NULL,
    source TEXT NOT NULL, info TEXT NOT NULL, created_s REAL NOT NULL
);

CREATE TABLE versions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL REFERENCES models (id) ON DELETE CASCADE,
    version TEXT NOT NULL, source TEXT NOT NULL, bytes INTEGER NOT NULL, disk_path TEXT, shm_path TEXT,
    fingerprint TEXT, meta TEXT NOT NULL, created_s REAL NOT NULL, UNIQUE (model, version)
);

CREATE TABLE deployments (
    model TEXT PRIMARY KEY REFERENCES models (id) ON DELETE CASCADE, min_replicas INTEGER NOT NULL,
    max_replicas INTEGER NOT NULL, tensor_parallel INTEGER NOT NULL, pinned INTEGER NOT NULL, idle_sleep_s REAL,
    failures INTEGER NOT NULL, failed_reason TEXT NOT NULL, not_before_s REAL NOT NULL, options TEXT NOT NULL,
    created_s REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key_id TEXT, model TEXT NOT NULL,
    method TEXT NOT NULL, training_file TEXT NOT NULL, validation_file TEXT, suffix TEXT, seed INTEGER NOT NULL,
    metadata TEXT, integrations TEXT, hyperparameters TEXT NOT NULL, resolved TEXT, output_model TEXT NOT NULL,
    phase TEXT NOT NULL CHECK
        (phase IN ('validating', 'queued', 'running', 'suspended', 'succeeded', 'failed', 'cancelled')),
    wanted TEXT NOT NULL CHECK (wanted IN ('run', 'pause', 'cancel')),
    reason TEXT NOT NULL, error TEXT, priority INTEGER NOT NULL, min_devices INTEGER, max_devices INTEGER,
    allowed_sizes TEXT, failures INTEGER NOT NULL, not_before_s REAL NOT NULL, devices TEXT NOT NULL, snapshot TEXT, step INTEGER NOT NULL, total_steps INTEGER, loss REAL, valid_loss REAL,
    tokens_per_s REAL, eta_s REAL, trained_tokens INTEGER, result_files TEXT NOT NULL,
    created_s REAL NOT NULL, started_s REAL, finished_s REAL
);
CREATE INDEX jobs_phase ON jobs (phase, seq);

CREATE TABLE job_events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, level TEXT NOT NULL, type TEXT NOT NULL,
    message TEXT NOT NULL, data TEXT, created_s REAL NOT NULL
);
CREATE INDEX job_events_job ON job_events (job_id, seq);

CREATE TABLE job_metrics (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, step INTEGER NOT NULL, epoch REAL, loss REAL,
    valid_loss REAL, grad_norm REAL, learning_rate REAL, tokens_per_s REAL, devices INTEGER,
    created_s REAL NOT NULL, PRIMARY KEY (job_id, step)
) WITHOUT ROWID;

CREATE TABLE checkpoints (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, name TEXT NOT NULL UNIQUE, model TEXT NOT NULL,
    version TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL, created_s REAL NOT NULL
);
CREATE INDEX checkpoints_job ON checkpoints (job_id, seq);

CREATE TABLE permissions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, checkpoint TEXT NOT NULL,
    project_id TEXT NOT NULL, created_s REAL NOT NULL, UNIQUE (checkpoint, project_id)
);

CREATE TABLE handovers (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, reason TEXT NOT NULL, state TEXT NOT NULL,
    detail TEXT NOT NULL, started_s REAL NOT NULL, ended_s REAL
);
CREATE INDEX handovers_state ON handovers (state);

CREATE TABLE handover_steps (
    handover_id TEXT NOT NULL REFERENCES handovers (id) ON DELETE CASCADE, position INTEGER NOT NULL,
    verb TEXT NOT NULL, target TEXT NOT NULL, arguments TEXT NOT NULL, state TEXT NOT NULL, detail TEXT NOT NULL,
    started_s REAL, ended_s REAL, PRIMARY KEY (handover_id, position)
) WITHOUT ROWID;

CREATE TABLE idempotency (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, key_id TEXT NOT NULL, route TEXT NOT NULL, idempotency_key TEXT,
    body_sha256 TEXT NOT NULL, resource_id TEXT NOT NULL, created_s REAL NOT NULL
);
CREATE UNIQUE INDEX idempotency_keyed ON idempotency (key_id, route, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX idempotency_body ON idempotency (key_id, route, body_sha256, seq);

CREATE TABLE audit (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key_id TEXT, action TEXT NOT NULL,
    target TEXT NOT NULL, outcome TEXT NOT NULL, detail TEXT NOT NULL, request_id TEXT NOT NULL,
    created_s REAL NOT NULL
);

CREATE TABLE operations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, target TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'succeeded', 'failed')), progress TEXT NOT NULL, error TEXT,
    result TEXT, created_s REAL NOT NULL, ended_s REAL
);
