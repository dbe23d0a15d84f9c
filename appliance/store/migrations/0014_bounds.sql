-- Bounds of one key, beside the box's own for every owner: JSON {bound: number}.
ALTER TABLE keys ADD COLUMN bounds TEXT;
-- A key of one command on the box itself: no change in the audit log, gone soon after.
ALTER TABLE keys ADD COLUMN session INTEGER NOT NULL DEFAULT 0;

-- Space inside the database: given back to it when the disk is full, so that keys can still be revoked.
CREATE TABLE reserve (seq INTEGER PRIMARY KEY, bytes BLOB NOT NULL);

-- What an owner holds is counted before more is let in.
CREATE INDEX files_of_key ON files (key_id, bytes);
CREATE INDEX uploads_of_key ON uploads (key_id, bytes) WHERE status = 'pending';
CREATE INDEX batches_of_key ON batches (key_id) WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX jobs_of_key ON jobs (key_id) WHERE phase IN ('validating', 'queued', 'running', 'suspended');
