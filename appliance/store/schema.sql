-- What the dataclasses of rows.py do not say. Run whenever the database is opened.

-- Facts about the box by name, in JSON.
CREATE TABLE IF NOT EXISTS box (
    name TEXT PRIMARY KEY, value TEXT NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS keys_secret ON keys (sha256);
CREATE UNIQUE INDEX IF NOT EXISTS keys_live_name ON keys (name) WHERE revoked_s IS NULL;
CREATE INDEX IF NOT EXISTS keys_subject ON keys (subject, seq) WHERE subject != '';
CREATE INDEX IF NOT EXISTS keys_owned ON keys (owner, id);
CREATE INDEX IF NOT EXISTS files_owner ON files (owner, seq);
CREATE INDEX IF NOT EXISTS files_of_key ON files (key_id, bytes);
CREATE INDEX IF NOT EXISTS files_expiring ON files (expires_s) WHERE expires_s IS NOT NULL;
CREATE INDEX IF NOT EXISTS models_active ON models (active_version, id, seq) WHERE active_version IS NOT NULL;
CREATE INDEX IF NOT EXISTS versions_adapters ON versions (model, version)
    WHERE json_extract(meta, '$.adapter.base') IS NOT NULL;
CREATE INDEX IF NOT EXISTS versions_on ON versions (json_extract(meta, '$.adapter.base'), seq)
    WHERE json_extract(meta, '$.adapter.base') IS NOT NULL;
CREATE INDEX IF NOT EXISTS versions_silent ON versions (model, version) WHERE json_extract(meta, '$.chat_template') = 0;
CREATE INDEX IF NOT EXISTS versions_of_job ON versions (job_id, seq);
CREATE INDEX IF NOT EXISTS jobs_phase ON jobs (phase, seq);
CREATE INDEX IF NOT EXISTS jobs_owner ON jobs (owner, seq);
CREATE INDEX IF NOT EXISTS jobs_of_key ON jobs (key_id) WHERE phase IN ('validating', 'queued', 'running', 'suspended');
CREATE INDEX IF NOT EXISTS jobs_left ON jobs (seq) WHERE snapshot IS NOT NULL;
CREATE INDEX IF NOT EXISTS jobs_named ON jobs (owner, phase, output_model, id);
CREATE INDEX IF NOT EXISTS jobs_making ON jobs (output_model)
    WHERE phase IN ('validating', 'queued', 'running', 'suspended');
CREATE INDEX IF NOT EXISTS jobs_gated ON jobs (seq) WHERE gate IS NOT NULL AND gate ->> '$.activated' IS NULL;
CREATE INDEX IF NOT EXISTS job_events_job ON job_events (job_id, seq);
CREATE UNIQUE INDEX IF NOT EXISTS versions_id ON versions (id) WHERE id != '';
CREATE UNIQUE INDEX IF NOT EXISTS versions_checkpoint ON versions (checkpoint) WHERE checkpoint IS NOT NULL;
CREATE INDEX IF NOT EXISTS handovers_ended ON handovers (ended_s);
CREATE UNIQUE INDEX IF NOT EXISTS idempotency_keyed ON idempotency (key_id, route, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX IF NOT EXISTS idempotency_body ON idempotency (key_id, route, body_sha256, seq);
CREATE INDEX IF NOT EXISTS idempotency_time ON idempotency (created_s);
CREATE INDEX IF NOT EXISTS audit_time ON audit (created_s);
CREATE INDEX IF NOT EXISTS tasks_of_key ON tasks (key_id);
CREATE INDEX IF NOT EXISTS batches_status ON batches (status, seq);
CREATE INDEX IF NOT EXISTS batches_owner ON batches (owner, seq);
CREATE INDEX IF NOT EXISTS batches_unfinished ON batches (key_id)
    WHERE status IN ('validating', 'queued', 'in_progress', 'finalizing', 'cancelling', 'pending');
CREATE INDEX IF NOT EXISTS uploads_unfinished ON uploads (key_id, bytes)
    WHERE status IN ('validating', 'queued', 'in_progress', 'finalizing', 'cancelling', 'pending');

-- By the hour. refused: requests that gateways refused.
CREATE TABLE IF NOT EXISTS usage (
    hour_s INTEGER NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL, version TEXT NOT NULL,
    requests INTEGER NOT NULL, errors INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, refused INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (hour_s, key_id, model, version)
);
CREATE INDEX IF NOT EXISTS usage_of_keys ON usage (key_id, hour_s, prompt_tokens, completion_tokens);

-- Devices held by jobs. key_id, owner, model: of the job, whose row is deleted earlier.
CREATE TABLE IF NOT EXISTS device_time (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL, devices INTEGER NOT NULL, from_s REAL NOT NULL,
    to_s REAL, key_id TEXT, owner TEXT, model TEXT
);
CREATE INDEX IF NOT EXISTS device_time_open ON device_time (job_id) WHERE to_s IS NULL;
CREATE INDEX IF NOT EXISTS device_time_job ON device_time (job_id);
CREATE INDEX IF NOT EXISTS device_time_ended ON device_time (to_s);
CREATE INDEX IF NOT EXISTS responses_made ON responses (created_s, bytes);
CREATE INDEX IF NOT EXISTS responses_unfinished ON responses (key_id, bytes)
    WHERE status IN ('validating', 'queued', 'in_progress', 'finalizing', 'cancelling', 'pending');
CREATE INDEX IF NOT EXISTS responses_held ON responses (owner, seq, status, bytes, key_id);
CREATE INDEX IF NOT EXISTS completions_of_owner ON responses (owner, seq, model, metadata)
    WHERE kind = 'chat.completion';
CREATE INDEX IF NOT EXISTS completions_of_all ON responses (seq, model, metadata) WHERE kind = 'chat.completion';

-- owner '*': every owner.
CREATE TABLE IF NOT EXISTS model_shares (
    model TEXT NOT NULL REFERENCES models (id) ON DELETE CASCADE, owner TEXT NOT NULL, created_s REAL NOT NULL,
    PRIMARY KEY (model, owner)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS evals_owned ON evals (owner, seq);
CREATE INDEX IF NOT EXISTS evals_of_key ON evals (key_id, bytes);
CREATE INDEX IF NOT EXISTS eval_runs_ended ON eval_runs (ended_s);
CREATE INDEX IF NOT EXISTS eval_runs_of_key ON eval_runs (key_id, bytes);
CREATE INDEX IF NOT EXISTS eval_runs_in_order ON eval_runs (eval_id, seq, status);
CREATE INDEX IF NOT EXISTS eval_runs_open ON eval_runs (seq, eval_id, owner, id)
    WHERE status IN ('validating', 'queued', 'in_progress', 'finalizing', 'cancelling', 'pending');
CREATE UNIQUE INDEX IF NOT EXISTS eval_items_of ON eval_items (run_id, place);
CREATE UNIQUE INDEX IF NOT EXISTS page_sessions_secret ON page_sessions (sha256);
CREATE INDEX IF NOT EXISTS page_sessions_of ON page_sessions (key_id);
