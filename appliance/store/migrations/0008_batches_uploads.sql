-- Batches, whose answered lines lie in batches/<id>.*.jsonl until they become files; uploads in parts, whose bytes lie
-- in uploads/<id>/<part id>.

CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key_id TEXT, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, model TEXT, metadata TEXT, output_keep_s REAL,
    status TEXT NOT NULL CHECK (status IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired',
        'cancelling', 'cancelled')),
    errors TEXT, total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL, usage TEXT,
    output_file_id TEXT, error_file_id TEXT, created_s REAL NOT NULL, expires_s REAL NOT NULL, in_progress_s REAL,
    finalizing_s REAL, completed_s REAL, failed_s REAL, expired_s REAL, cancelling_s REAL, cancelled_s REAL
);
CREATE INDEX batches_status ON batches (status, seq);

CREATE TABLE uploads (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    mime_type TEXT NOT NULL, bytes INTEGER NOT NULL, file_keep_s REAL, key_id TEXT,
    status TEXT NOT NULL CHECK (status IN ('pending', 'completed', 'cancelled', 'expired')),
    file_id TEXT, created_s REAL NOT NULL, expires_s REAL NOT NULL
);

CREATE TABLE upload_parts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    upload_id TEXT NOT NULL REFERENCES uploads (id) ON DELETE CASCADE, bytes INTEGER NOT NULL, created_s REAL NOT NULL
);
CREATE INDEX upload_parts_upload ON upload_parts (upload_id, seq);
