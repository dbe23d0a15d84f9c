-- What was deleted while a tier could not be reached, and is still to be taken out of it.
CREATE TABLE tier_removals (
    tier TEXT NOT NULL, kind TEXT NOT NULL, model TEXT NOT NULL, version TEXT NOT NULL, created_s REAL NOT NULL,
    PRIMARY KEY (tier, kind, model, version)
) WITHOUT ROWID;

-- A pinned version is never dropped by retention.
ALTER TABLE versions ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
