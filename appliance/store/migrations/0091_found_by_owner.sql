-- Found without going through all there are. A key by its name, and the keys of an owner: looked for many times in each
-- request, among the keys of everybody that ever were.
CREATE INDEX keys_named ON keys (name, seq);
CREATE INDEX keys_owned ON keys (owner, id);
CREATE INDEX keys_of_commands ON keys (revoked_s, created_s) WHERE session;
-- What an owner has of each, in the order of lists.
CREATE INDEX models_owned ON models (owner, seq);
CREATE INDEX evals_owned ON evals (owner, seq);
CREATE INDEX permissions_of ON permissions (checkpoint, seq);
CREATE INDEX checkpoints_of_version ON checkpoints (model, version, name);
-- The few of many: long operations under way, canaries that run, versions that are adapters or know no conversations.
CREATE INDEX eval_runs_unfinished ON eval_runs (seq, eval_id, owner, id) WHERE status IN ('queued', 'in_progress');
CREATE INDEX operations_going ON operations (seq) WHERE state = 'running';
CREATE INDEX canaries_running ON canaries (model, version) WHERE state = 'running';
CREATE INDEX versions_adapters ON versions (model, version) WHERE json_extract(meta, '$.adapter.base') IS NOT NULL;
CREATE INDEX versions_on ON versions (json_extract(meta, '$.adapter.base'), seq)
    WHERE json_extract(meta, '$.adapter.base') IS NOT NULL;
CREATE INDEX versions_silent ON versions (model, version) WHERE json_extract(meta, '$.chat_template') = 0;
-- What each round of the scheduler reads, by indexes alone: it stands behind texts.
CREATE INDEX models_active ON models (active_version, id, seq) WHERE active_version IS NOT NULL;
CREATE INDEX model_settings_digests ON model_settings (model, number, digest);
