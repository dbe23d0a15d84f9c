-- The audit log is bounded by key.
CREATE INDEX audit_of_key ON audit (key_id, seq);
