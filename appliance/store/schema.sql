-- The schema of a new database; appliance/store/database.py has its version.
-- *_s: seconds since 1970. `seq` orders every list; AUTOINCREMENT, so that a cursor stays valid after deletions.
-- key_id, owner: the key a row was made with, and its owner; '' is the box.

-- Facts about the box by name, in JSON.
CREATE TABLE box (
    name TEXT PRIMARY KEY, value TEXT NOT NULL
) WITHOUT ROWID;

-- bounds: limits of this key besides the box's, JSON {limit: number}. subject: SHA-256 of the person at the login
-- provider. expires_s: NULL is never.
CREATE TABLE keys (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, sha256 TEXT NOT NULL UNIQUE,
    prefix TEXT NOT NULL, scopes TEXT NOT NULL, created_s REAL NOT NULL, revoked_s REAL, owner TEXT NOT NULL DEFAULT '',
    models TEXT, requests_per_minute INTEGER, tokens_per_minute INTEGER, tokens_per_day INTEGER,
    tokens_per_month INTEGER, max_priority INTEGER NOT NULL DEFAULT 0, bounds TEXT,
    subject TEXT NOT NULL DEFAULT '', expires_s REAL
);
CREATE UNIQUE INDEX keys_live_name ON keys (name) WHERE revoked_s IS NULL;
CREATE INDEX keys_subject ON keys (subject, seq) WHERE subject != '';
CREATE INDEX keys_named ON keys (name, seq);
CREATE INDEX keys_owned ON keys (owner, id);
CREATE INDEX keys_expiring ON keys (expires_s) WHERE expires_s IS NOT NULL AND revoked_s IS NULL;
CREATE INDEX keys_expired ON keys (expires_s) WHERE expires_s IS NOT NULL AND revoked_s IS NOT NULL;

-- report, data_check: of the check of training data; check_status: waiting, done or failed.
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, status TEXT NOT NULL, status_details TEXT, report TEXT, key_id TEXT,
    created_s REAL NOT NULL, expires_s REAL, owner TEXT NOT NULL DEFAULT '', check_status TEXT, data_check TEXT
);
CREATE INDEX files_purpose ON files (purpose, seq);
CREATE INDEX files_owner ON files (owner, seq);
CREATE INDEX files_of_key ON files (key_id, bytes);
CREATE INDEX files_expiring ON files (expires_s) WHERE expires_s IS NOT NULL;

-- owner: '' is the box, for all.
CREATE TABLE models (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL CHECK (kind IN ('base', 'fine-tuned')), base TEXT, arch TEXT NOT NULL,
    task TEXT NOT NULL CHECK (task IN ('generate', 'embed')), params INTEGER NOT NULL, bytes INTEGER NOT NULL,
    max_model_len INTEGER, active_version TEXT, job_id TEXT, owned_by TEXT NOT NULL, source TEXT NOT NULL,
    info TEXT NOT NULL, created_s REAL NOT NULL, owner TEXT NOT NULL DEFAULT ''
);
CREATE INDEX models_owned ON models (owner, seq);
CREATE INDEX models_active ON models (active_version, id, seq) WHERE active_version IS NOT NULL;

-- pinned: never dropped by retention. held_back: its job did not activate it, so a rollback skips it.
CREATE TABLE versions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL REFERENCES models (id) ON DELETE CASCADE,
    version TEXT NOT NULL, source TEXT NOT NULL, bytes INTEGER NOT NULL, disk_path TEXT, shm_path TEXT,
    fingerprint TEXT, meta TEXT NOT NULL, created_s REAL NOT NULL, pinned INTEGER NOT NULL DEFAULT 0,
    held_back INTEGER NOT NULL DEFAULT 0, UNIQUE (model, version)
);
CREATE INDEX versions_adapters ON versions (model, version) WHERE json_extract(meta, '$.adapter.base') IS NOT NULL;
CREATE INDEX versions_on ON versions (json_extract(meta, '$.adapter.base'), seq)
    WHERE json_extract(meta, '$.adapter.base') IS NOT NULL;
CREATE INDEX versions_silent ON versions (model, version) WHERE json_extract(meta, '$.chat_template') = 0;
CREATE INDEX versions_of_job ON versions (model, meta ->> '$.job_id');

-- max_replicas: NULL is the box's setting. served: version, devices and settings' digest that opened last.
CREATE TABLE deployments (
    model TEXT PRIMARY KEY REFERENCES models (id) ON DELETE CASCADE, min_replicas INTEGER NOT NULL,
    tensor_parallel INTEGER NOT NULL, pinned INTEGER NOT NULL, idle TEXT NOT NULL, created_s REAL NOT NULL,
    max_replicas INTEGER, ttft_p95_s REAL, tpot_p95_ms REAL, served TEXT NOT NULL DEFAULT '{}'
) WITHOUT ROWID;

-- stable_name: output_model is a name its owner chose, with versions of several jobs. verdict: of its
-- curves, {"code", "text"}. gate: the evaluation that decides on activation, and its verdict.
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key_id TEXT, model TEXT NOT NULL,
    method TEXT NOT NULL, training_file TEXT NOT NULL, validation_file TEXT, suffix TEXT, seed INTEGER NOT NULL,
    metadata TEXT, integrations TEXT, hyperparameters TEXT NOT NULL, resolved TEXT, output_model TEXT NOT NULL,
    phase TEXT NOT NULL
        CHECK (phase IN ('validating', 'queued', 'running', 'suspended', 'succeeded', 'failed', 'cancelled')),
    wanted TEXT NOT NULL CHECK (wanted IN ('run', 'pause', 'cancel')), reason TEXT NOT NULL, error TEXT,
    priority INTEGER NOT NULL, min_devices INTEGER, max_devices INTEGER, allowed_sizes TEXT, devices TEXT NOT NULL,
    snapshot TEXT, step INTEGER NOT NULL, total_steps INTEGER, loss REAL, valid_loss REAL, tokens_per_s REAL,
    eta_s REAL, trained_tokens INTEGER, result_files TEXT NOT NULL, created_s REAL NOT NULL, started_s REAL,
    finished_s REAL, owner TEXT NOT NULL DEFAULT '', deadline_s REAL, preemptible INTEGER NOT NULL DEFAULT 1,
    held INTEGER NOT NULL DEFAULT 0, asked_sizes TEXT, stable_name INTEGER NOT NULL DEFAULT 0,
    activate INTEGER NOT NULL DEFAULT 1, verdict TEXT, gate TEXT, joules REAL, metered_s REAL NOT NULL DEFAULT 0
);
CREATE INDEX jobs_phase ON jobs (phase, seq);
CREATE INDEX jobs_owner ON jobs (owner, seq);
CREATE INDEX jobs_of_key ON jobs (key_id) WHERE phase IN ('validating', 'queued', 'running', 'suspended');
CREATE INDEX jobs_left ON jobs (seq) WHERE snapshot IS NOT NULL;
CREATE INDEX jobs_named ON jobs (owner, phase, output_model, id);
CREATE INDEX jobs_making ON jobs (output_model) WHERE phase IN ('validating', 'queued', 'running', 'suspended');
CREATE TRIGGER jobs_cost_stays BEFORE DELETE ON jobs BEGIN
    UPDATE device_time SET key_id = OLD.key_id, owner = OLD.owner, model = OLD.model WHERE job_id = OLD.id;
END;
CREATE INDEX jobs_gated ON jobs (seq) WHERE gate IS NOT NULL AND gate ->> '$.activated' IS NULL;

CREATE TABLE job_events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, level TEXT NOT NULL, type TEXT NOT NULL,
    message TEXT NOT NULL, data TEXT, created_s REAL NOT NULL
);
CREATE INDEX job_events_job ON job_events (job_id, seq);

-- rank_seconds: JSON list, computing time of each rank. communication: share of the step, of profiled steps. measured,
-- valid_measured: the method's own numbers by name.
CREATE TABLE job_metrics (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, step INTEGER NOT NULL, epoch REAL, loss REAL,
    valid_loss REAL, grad_norm REAL, learning_rate REAL, tokens_per_s REAL, devices INTEGER, created_s REAL NOT NULL,
    rank_seconds TEXT, communication REAL, measured TEXT, valid_measured TEXT, PRIMARY KEY (job_id, step)
) WITHOUT ROWID;
CREATE INDEX job_metrics_profiled ON job_metrics(job_id, step) WHERE communication IS NOT NULL;

CREATE TABLE checkpoints (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, name TEXT NOT NULL UNIQUE, model TEXT NOT NULL,
    version TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL, created_s REAL NOT NULL
);
CREATE INDEX checkpoints_job ON checkpoints (job_id, seq);
CREATE INDEX checkpoints_of_version ON checkpoints (model, version, name);

CREATE TABLE handovers (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, reason TEXT NOT NULL, state TEXT NOT NULL,
    detail TEXT NOT NULL, started_s REAL NOT NULL, ended_s REAL
);
CREATE INDEX handovers_state ON handovers (state);
CREATE INDEX handovers_ended ON handovers (ended_s);
CREATE TRIGGER handovers_delete AFTER DELETE ON handovers WHEN OLD.ended_s IS NOT NULL BEGIN
    INSERT INTO handovers_gone VALUES (OLD.state, 1, CAST(round(1000 * (OLD.ended_s - OLD.started_s)) AS INTEGER))
        ON CONFLICT DO UPDATE
        SET number = number + 1, milliseconds = milliseconds + excluded.milliseconds;
END;

CREATE TABLE handover_steps (
    handover_id TEXT NOT NULL REFERENCES handovers (id) ON DELETE CASCADE, position INTEGER NOT NULL,
    verb TEXT NOT NULL, target TEXT NOT NULL, arguments TEXT NOT NULL, state TEXT NOT NULL, detail TEXT NOT NULL,
    started_s REAL, ended_s REAL, PRIMARY KEY (handover_id, position)
) WITHOUT ROWID;

CREATE TABLE idempotency (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, key_id TEXT NOT NULL, route TEXT NOT NULL, idempotency_key TEXT,
    body_sha256 TEXT NOT NULL, resource_id TEXT NOT NULL, created_s REAL NOT NULL
);
CREATE UNIQUE INDEX idempotency_keyed ON idempotency (key_id, route, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX idempotency_body ON idempotency (key_id, route, body_sha256, seq);
CREATE INDEX idempotency_time ON idempotency (created_s);
CREATE INDEX idempotency_keyless ON idempotency (created_s) WHERE idempotency_key IS NULL;

CREATE TABLE audit (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key_id TEXT, action TEXT NOT NULL,
    target TEXT NOT NULL, outcome TEXT NOT NULL, detail TEXT NOT NULL, request_id TEXT NOT NULL, created_s REAL NOT NULL
);
CREATE INDEX audit_of_key ON audit (key_id, seq);
CREATE INDEX audit_time ON audit (created_s);

CREATE TABLE operations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, target TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'succeeded', 'failed')), progress TEXT NOT NULL, error TEXT,
    result TEXT, created_s REAL NOT NULL, ended_s REAL
);
CREATE INDEX operations_ended ON operations (ended_s) WHERE state != 'running';
CREATE INDEX operations_going ON operations (seq) WHERE state = 'running';

-- Work that outlives its request and a restart, until its object has ended. id: of the object. arguments: JSON, what the
-- object's row does not say.
CREATE TABLE tasks (
    kind TEXT NOT NULL, id TEXT NOT NULL, key_id TEXT, created_s REAL NOT NULL, arguments TEXT NOT NULL,
    PRIMARY KEY (kind, id)
) WITHOUT ROWID;
CREATE INDEX tasks_of_key ON tasks (key_id);

-- Deletions to repeat once the tier can be reached again.
CREATE TABLE tier_removals (
    tier TEXT NOT NULL, kind TEXT NOT NULL, model TEXT NOT NULL, version TEXT NOT NULL, created_s REAL NOT NULL,
    PRIMARY KEY (tier, kind, model, version)
) WITHOUT ROWID;

CREATE TABLE windows (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, cron TEXT NOT NULL, tz TEXT NOT NULL, until TEXT,
    for_s REAL, policy TEXT NOT NULL, train_devices INTEGER, serving_floor INTEGER, created_s REAL NOT NULL
);

-- Answered lines are in batches/<id>.*.jsonl until the batch ends.
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key_id TEXT, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, model TEXT, metadata TEXT, output_keep_s REAL,
    status TEXT NOT NULL CHECK (status IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired',
        'cancelling', 'cancelled')), errors TEXT, total INTEGER NOT NULL, completed INTEGER NOT NULL,
    failed INTEGER NOT NULL, usage TEXT, output_file_id TEXT, error_file_id TEXT, created_s REAL NOT NULL,
    expires_s REAL NOT NULL, in_progress_s REAL, finalizing_s REAL, completed_s REAL, failed_s REAL, expired_s REAL,
    cancelling_s REAL, cancelled_s REAL, owner TEXT NOT NULL DEFAULT ''
);
CREATE INDEX batches_status ON batches (status, seq);
CREATE INDEX batches_owner ON batches (owner, seq);
CREATE INDEX batches_of_key ON batches (key_id)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_ended_time ON batches (created_s)
    WHERE status NOT IN ('validating', 'in_progress', 'finalizing', 'cancelling');

-- Parts are the files uploads/<id>/<part id>.
CREATE TABLE uploads (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    mime_type TEXT NOT NULL, bytes INTEGER NOT NULL, file_keep_s REAL, key_id TEXT,
    status TEXT NOT NULL CHECK (status IN ('pending', 'completed', 'cancelled', 'expired')), file_id TEXT,
    created_s REAL NOT NULL, expires_s REAL NOT NULL, owner TEXT NOT NULL DEFAULT '',
    part_bytes INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX uploads_of_key ON uploads (key_id, bytes) WHERE status = 'pending';
CREATE INDEX uploads_ended ON uploads (created_s) WHERE status != 'pending';

-- The newest of each model, running or ended.
CREATE TABLE canaries (
    model TEXT PRIMARY KEY REFERENCES models (id) ON DELETE CASCADE, version TEXT NOT NULL, before TEXT NOT NULL,
    share REAL NOT NULL, auto INTEGER NOT NULL, watch_s REAL NOT NULL, min_requests INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'promoted', 'rolled_back')), reason TEXT NOT NULL DEFAULT '',
    created_s REAL NOT NULL, ended_s REAL, compared TEXT
);
CREATE INDEX canaries_running ON canaries (model, version) WHERE state = 'running';

-- By the hour. refused: requests that gateways refused.
CREATE TABLE usage (
    hour_s INTEGER NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL, version TEXT NOT NULL,
    requests INTEGER NOT NULL, errors INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, refused INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (hour_s, key_id, model, version)
);
CREATE INDEX usage_of_keys ON usage (key_id, hour_s, prompt_tokens, completion_tokens);

-- Devices held by jobs. key_id, owner, model: filled when the job's row is deleted.
CREATE TABLE device_time (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL, devices INTEGER NOT NULL, from_s REAL NOT NULL,
    to_s REAL, key_id TEXT, owner TEXT, model TEXT
);
CREATE INDEX device_time_open ON device_time (job_id) WHERE to_s IS NULL;
CREATE INDEX device_time_job ON device_time (job_id);
CREATE INDEX device_time_ended ON device_time (to_s);

-- Answers of /v1/responses and stored chat completions. bytes: of request, input and response.
CREATE TABLE responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key_id TEXT NOT NULL, previous_id TEXT,
    status TEXT NOT NULL CHECK (status IN ('queued', 'in_progress', 'completed', 'incomplete', 'failed', 'cancelled')),
    background INTEGER NOT NULL, created_s REAL NOT NULL, bytes INTEGER NOT NULL, request TEXT,
    input TEXT NOT NULL, response TEXT NOT NULL, owner TEXT NOT NULL DEFAULT '',
    kind TEXT NOT NULL DEFAULT 'response' CHECK (kind IN ('response', 'chat.completion')), model TEXT, metadata TEXT
);
CREATE INDEX responses_made ON responses (created_s, bytes);
CREATE INDEX responses_of_key ON responses (key_id);
CREATE INDEX responses_waiting ON responses (key_id, bytes) WHERE status IN ('queued', 'in_progress');
CREATE INDEX responses_held ON responses (owner, seq, status, bytes, key_id);
CREATE INDEX completions_of_owner ON responses (owner, seq, model, metadata) WHERE kind = 'chat.completion';
CREATE INDEX completions_of_all ON responses (seq, model, metadata) WHERE kind = 'chat.completion';

-- owner '*': every owner.
CREATE TABLE model_shares (
    model TEXT NOT NULL REFERENCES models (id) ON DELETE CASCADE, owner TEXT NOT NULL, created_s REAL NOT NULL,
    PRIMARY KEY (model, owner)
) WITHOUT ROWID;

-- All versions of a model's engine settings; the highest number is in force. note: why the box itself set them.
CREATE TABLE model_settings (
    model TEXT NOT NULL REFERENCES models (id) ON DELETE CASCADE, number INTEGER NOT NULL, settings TEXT NOT NULL,
    digest TEXT NOT NULL, by_whom TEXT NOT NULL DEFAULT '', created_s REAL NOT NULL, note TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (model, number)
);
CREATE INDEX model_settings_digests ON model_settings (model, number, digest);

-- bytes: of its definition.
CREATE TABLE evals (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, created_s REAL NOT NULL,
    key_id TEXT, owner TEXT NOT NULL DEFAULT '', item_schema TEXT NOT NULL, include_sample INTEGER NOT NULL DEFAULT 0,
    criteria TEXT NOT NULL, metadata TEXT, bytes INTEGER NOT NULL DEFAULT 0,
    updated_s REAL NOT NULL DEFAULT 0
);
CREATE INDEX evals_held ON evals (key_id, id, bytes);
CREATE INDEX evals_owned ON evals (owner, seq);
CREATE INDEX evals_updated ON evals (updated_s, seq);
CREATE INDEX evals_owned_updated ON evals (owner, updated_s, seq);

-- bytes: of all its items.
CREATE TABLE eval_runs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    eval_id TEXT NOT NULL REFERENCES evals (id) ON DELETE CASCADE, name TEXT NOT NULL, created_s REAL NOT NULL,
    key_id TEXT, owner TEXT NOT NULL DEFAULT '', status TEXT NOT NULL, model TEXT NOT NULL DEFAULT '',
    data_source TEXT NOT NULL, metadata TEXT, total INTEGER NOT NULL DEFAULT 0, results TEXT NOT NULL DEFAULT '{}',
    usage TEXT NOT NULL DEFAULT '{}', error TEXT, ended_s REAL, bytes INTEGER NOT NULL DEFAULT 0,
    counts TEXT NOT NULL DEFAULT '{}'
);
CREATE INDEX eval_runs_ended ON eval_runs (ended_s);
CREATE INDEX eval_runs_held ON eval_runs (key_id, status, bytes);
CREATE INDEX eval_runs_in_order ON eval_runs (eval_id, seq, status);
CREATE INDEX eval_runs_kept ON eval_runs (owner, seq, status);
CREATE INDEX eval_runs_unfinished ON eval_runs (seq, eval_id, owner, id) WHERE status IN ('queued', 'in_progress');

CREATE TABLE eval_items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    run_id TEXT NOT NULL REFERENCES eval_runs (id) ON DELETE CASCADE, place INTEGER NOT NULL, created_s REAL NOT NULL,
    status TEXT NOT NULL, item TEXT NOT NULL, sample TEXT NOT NULL, results TEXT NOT NULL
);
CREATE UNIQUE INDEX eval_items_of ON eval_items (run_id, place);

-- judge: {"grader"} or {"teacher"}, up to megabytes, so not in the job's row. taught_by: versions of the teacher, in
-- order.
CREATE TABLE job_judges (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE, judge TEXT NOT NULL,
    taught_by TEXT NOT NULL DEFAULT '[]'
);

-- Logins of the page. sha256: of the token.
CREATE TABLE page_sessions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, sha256 TEXT NOT NULL UNIQUE,
    key_id TEXT NOT NULL REFERENCES keys (id) ON DELETE CASCADE, agent TEXT NOT NULL DEFAULT '',
    created_s REAL NOT NULL, seen_s REAL NOT NULL, until_s REAL NOT NULL
);
CREATE INDEX page_sessions_of ON page_sessions (key_id, seen_s);
CREATE INDEX page_sessions_until ON page_sessions (until_s);

-- Totals of deleted hand-overs by outcome, so that counters never fall.
CREATE TABLE handovers_gone (
    state TEXT PRIMARY KEY, number INTEGER NOT NULL, milliseconds INTEGER NOT NULL
) WITHOUT ROWID;
