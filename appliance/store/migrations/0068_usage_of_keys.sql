-- What a key has spent, of its quota and in its own reports: for one key's rows those of all keys were read.
CREATE INDEX usage_of_keys ON usage (key_id, hour_s, prompt_tokens, completion_tokens);
