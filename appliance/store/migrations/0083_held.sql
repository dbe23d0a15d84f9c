-- What an owner holds of the kinds that are many, kept as it changes: counted anew, ten thousand files took the controller
-- 5 ms for each request that adds one, and for each chunk of an upload. whose: the rows' owner, under another name, for
-- forgetting a person renames the owner of the rows themselves.
CREATE TABLE held (
    key_id TEXT NOT NULL, kind TEXT NOT NULL, whose TEXT NOT NULL, number INTEGER NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (key_id, kind, whose)
) WITHOUT ROWID;
INSERT INTO held SELECT key_id, 'files', owner, count(*), sum(bytes) FROM files WHERE key_id IS NOT NULL
    GROUP BY key_id, owner;
CREATE TRIGGER files_held_insert AFTER INSERT ON files WHEN NEW.key_id IS NOT NULL BEGIN
    INSERT INTO held VALUES (NEW.key_id, 'files', NEW.owner, 1, NEW.bytes)
        ON CONFLICT DO UPDATE SET number = number + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER files_held_delete AFTER DELETE ON files WHEN OLD.key_id IS NOT NULL BEGIN
    UPDATE held SET number = number - 1, bytes = bytes - OLD.bytes
        WHERE key_id = OLD.key_id AND kind = 'files' AND whose = OLD.owner;
    DELETE FROM held WHERE key_id = OLD.key_id AND kind = 'files' AND whose = OLD.owner AND number = 0;
END;
CREATE TRIGGER files_held_update AFTER UPDATE OF key_id, owner, bytes ON files BEGIN
    UPDATE held SET number = number - 1, bytes = bytes - OLD.bytes
        WHERE key_id = OLD.key_id AND kind = 'files' AND whose = OLD.owner;
    DELETE FROM held WHERE key_id = OLD.key_id AND kind = 'files' AND whose = OLD.owner AND number = 0;
    INSERT INTO held SELECT NEW.key_id, 'files', NEW.owner, 1, NEW.bytes WHERE NEW.key_id IS NOT NULL
        ON CONFLICT DO UPDATE SET number = number + 1, bytes = bytes + excluded.bytes;
END;
INSERT INTO held SELECT key_id, 'responses', owner, count(*), sum(bytes) FROM responses WHERE key_id IS NOT NULL
    GROUP BY key_id, owner;
CREATE TRIGGER responses_held_insert AFTER INSERT ON responses WHEN NEW.key_id IS NOT NULL BEGIN
    INSERT INTO held VALUES (NEW.key_id, 'responses', NEW.owner, 1, NEW.bytes)
        ON CONFLICT DO UPDATE SET number = number + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER responses_held_delete AFTER DELETE ON responses WHEN OLD.key_id IS NOT NULL BEGIN
    UPDATE held SET number = number - 1, bytes = bytes - OLD.bytes
        WHERE key_id = OLD.key_id AND kind = 'responses' AND whose = OLD.owner;
    DELETE FROM held WHERE key_id = OLD.key_id AND kind = 'responses' AND whose = OLD.owner AND number = 0;
END;
CREATE TRIGGER responses_held_update AFTER UPDATE OF key_id, owner, bytes ON responses BEGIN
    UPDATE held SET number = number - 1, bytes = bytes - OLD.bytes
        WHERE key_id = OLD.key_id AND kind = 'responses' AND whose = OLD.owner;
    DELETE FROM held WHERE key_id = OLD.key_id AND kind = 'responses' AND whose = OLD.owner AND number = 0;
    INSERT INTO held SELECT NEW.key_id, 'responses', NEW.owner, 1, NEW.bytes WHERE NEW.key_id IS NOT NULL
        ON CONFLICT DO UPDATE SET number = number + 1, bytes = bytes + excluded.bytes;
END;
INSERT INTO held SELECT key_id, 'eval_runs', owner, count(*), sum(bytes) FROM eval_runs WHERE key_id IS NOT NULL
    GROUP BY key_id, owner;
CREATE TRIGGER eval_runs_held_insert AFTER INSERT ON eval_runs WHEN NEW.key_id IS NOT NULL BEGIN
    INSERT INTO held VALUES (NEW.key_id, 'eval_runs', NEW.owner, 1, NEW.bytes)
        ON CONFLICT DO UPDATE SET number = number + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER eval_runs_held_delete AFTER DELETE ON eval_runs WHEN OLD.key_id IS NOT NULL BEGIN
    UPDATE held SET number = number - 1, bytes = bytes - OLD.bytes
        WHERE key_id = OLD.key_id AND kind = 'eval_runs' AND whose = OLD.owner;
    DELETE FROM held WHERE key_id = OLD.key_id AND kind = 'eval_runs' AND whose = OLD.owner AND number = 0;
END;
CREATE TRIGGER eval_runs_held_update AFTER UPDATE OF key_id, owner, bytes ON eval_runs BEGIN
    UPDATE held SET number = number - 1, bytes = bytes - OLD.bytes
        WHERE key_id = OLD.key_id AND kind = 'eval_runs' AND whose = OLD.owner;
    DELETE FROM held WHERE key_id = OLD.key_id AND kind = 'eval_runs' AND whose = OLD.owner AND number = 0;
    INSERT INTO held SELECT NEW.key_id, 'eval_runs', NEW.owner, 1, NEW.bytes WHERE NEW.key_id IS NOT NULL
        ON CONFLICT DO UPDATE SET number = number + 1, bytes = bytes + excluded.bytes;
END;
