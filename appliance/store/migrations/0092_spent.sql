-- What a key has spent in each day (of UTC), kept as it changes: with each report of the gateways, every few seconds, a
-- month's hours of the key were summed anew for its quotas, of each model and version that it had asked.
CREATE TABLE spent (
    key_id TEXT NOT NULL, day INTEGER NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (key_id, day)
) WITHOUT ROWID;
INSERT INTO spent SELECT key_id, hour_s / 86400, sum(prompt_tokens + completion_tokens) FROM usage GROUP BY 1, 2;
CREATE TRIGGER usage_spent_insert AFTER INSERT ON usage BEGIN
    INSERT INTO spent VALUES (NEW.key_id, NEW.hour_s / 86400, NEW.prompt_tokens + NEW.completion_tokens)
        ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens;
END;
CREATE TRIGGER usage_spent_delete AFTER DELETE ON usage BEGIN
    UPDATE spent SET tokens = tokens - OLD.prompt_tokens - OLD.completion_tokens
        WHERE key_id = OLD.key_id AND day = OLD.hour_s / 86400;
    DELETE FROM spent WHERE key_id = OLD.key_id AND day = OLD.hour_s / 86400 AND tokens = 0;
END;
CREATE TRIGGER usage_spent_update AFTER UPDATE OF key_id, hour_s, prompt_tokens, completion_tokens ON usage BEGIN
    UPDATE spent SET tokens = tokens - OLD.prompt_tokens - OLD.completion_tokens
        WHERE key_id = OLD.key_id AND day = OLD.hour_s / 86400;
    INSERT INTO spent VALUES (NEW.key_id, NEW.hour_s / 86400, NEW.prompt_tokens + NEW.completion_tokens)
        ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens;
END;
