-- Logins of the page, each of one key. sha256: of both halves of its token. until_s: when it ends unless its person
-- comes back before.
CREATE TABLE page_sessions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, sha256 TEXT NOT NULL UNIQUE,
    key_id TEXT NOT NULL REFERENCES keys (id) ON DELETE CASCADE, agent TEXT NOT NULL DEFAULT '',
    created_s REAL NOT NULL, seen_s REAL NOT NULL, until_s REAL NOT NULL
);
CREATE INDEX page_sessions_of ON page_sessions (key_id, seen_s);
CREATE INDEX page_sessions_until ON page_sessions (until_s);
