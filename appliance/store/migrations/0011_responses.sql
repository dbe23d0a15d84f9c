-- Answers of /v1/responses that are kept for their keys, to be retrieved and gone on from.

CREATE TABLE responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key_id TEXT NOT NULL, previous_id TEXT,
    status TEXT NOT NULL CHECK (status IN ('queued', 'in_progress', 'completed', 'incomplete', 'failed', 'cancelled')),
    background INTEGER NOT NULL, created_s REAL NOT NULL, used_s REAL NOT NULL, bytes INTEGER NOT NULL, request TEXT,
    input TEXT NOT NULL, response TEXT NOT NULL
);
CREATE INDEX responses_used ON responses (used_s, bytes);
CREATE INDEX responses_of_key ON responses (key_id, used_s, bytes);
CREATE INDEX responses_unfinished ON responses (seq) WHERE status IN ('queued', 'in_progress');
