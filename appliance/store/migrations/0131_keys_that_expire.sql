-- When a key ends by itself; null: never.
ALTER TABLE keys ADD COLUMN expires_s REAL;
CREATE INDEX keys_expiring ON keys (expires_s) WHERE expires_s IS NOT NULL AND revoked_s IS NULL;
CREATE INDEX keys_expired ON keys (expires_s) WHERE expires_s IS NOT NULL AND revoked_s IS NOT NULL;
