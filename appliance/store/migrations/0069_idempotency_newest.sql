-- Requests of a day may be a million: the newest of a key's, and those that are too old, are found without the others.
CREATE INDEX idempotency_newest ON idempotency (key_id, route, created_s);
CREATE INDEX idempotency_time ON idempotency (created_s);
CREATE INDEX idempotency_keyless ON idempotency (created_s) WHERE idempotency_key IS NULL;
