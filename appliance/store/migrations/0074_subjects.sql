-- Keys of people who come by an OpenID provider: SHA-256 of who they are there. Nobody has the key itself.
ALTER TABLE keys ADD COLUMN subject TEXT NOT NULL DEFAULT '';
CREATE INDEX keys_subject ON keys (subject, seq) WHERE subject != '';
