-- Of an upload its parts and of a model the bytes of its versions, kept as they change: each part that came counted up to
-- ten thousand others, and each new job added up all versions of its owner's models.
ALTER TABLE uploads ADD COLUMN parts INTEGER NOT NULL DEFAULT 0;
ALTER TABLE uploads ADD COLUMN parts_bytes INTEGER NOT NULL DEFAULT 0;
UPDATE uploads SET (parts, parts_bytes) =
    (SELECT count(*), coalesce(sum(bytes), 0) FROM upload_parts WHERE upload_id = uploads.id);
CREATE TRIGGER upload_parts_insert AFTER INSERT ON upload_parts BEGIN
    UPDATE uploads SET parts = parts + 1, parts_bytes = parts_bytes + NEW.bytes WHERE id = NEW.upload_id;
END;
CREATE TRIGGER upload_parts_delete AFTER DELETE ON upload_parts BEGIN
    UPDATE uploads SET parts = parts - 1, parts_bytes = parts_bytes - OLD.bytes WHERE id = OLD.upload_id;
END;
CREATE TRIGGER upload_parts_update AFTER UPDATE OF bytes ON upload_parts BEGIN
    UPDATE uploads SET parts_bytes = parts_bytes - OLD.bytes + NEW.bytes WHERE id = NEW.upload_id;
END;
ALTER TABLE models ADD COLUMN versions_bytes INTEGER NOT NULL DEFAULT 0;
UPDATE models SET versions_bytes = (SELECT coalesce(sum(bytes), 0) FROM versions WHERE model = models.id);
CREATE TRIGGER versions_insert AFTER INSERT ON versions BEGIN
    UPDATE models SET versions_bytes = versions_bytes + NEW.bytes WHERE id = NEW.model;
END;
CREATE TRIGGER versions_delete AFTER DELETE ON versions BEGIN
    UPDATE models SET versions_bytes = versions_bytes - OLD.bytes WHERE id = OLD.model;
END;
CREATE TRIGGER versions_update AFTER UPDATE OF bytes ON versions BEGIN
    UPDATE models SET versions_bytes = versions_bytes - OLD.bytes + NEW.bytes WHERE id = NEW.model;
END;
