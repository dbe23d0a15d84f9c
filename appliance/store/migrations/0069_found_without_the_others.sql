-- Requests of a day may be a million: the newest of a key's, and those that are too old, are found without the others.
CREATE INDEX idempotency_newest ON idempotency (key_id, route, created_s);
CREATE INDEX idempotency_time ON idempotency (created_s);
CREATE INDEX idempotency_keyless ON idempotency (created_s) WHERE idempotency_key IS NULL;
-- So are files that expire, and uploads that have ended: there may be as many.
CREATE INDEX files_expiring ON files (expires_s) WHERE expires_s IS NOT NULL;
CREATE INDEX uploads_ended ON uploads (created_s) WHERE status != 'pending';
-- And snapshots of ended jobs that are still to be given back.
CREATE INDEX jobs_left ON jobs (seq) WHERE snapshot IS NOT NULL;
