-- Chat completions that are kept (`store`) stand beside the answers of /v1/responses: one owner's bounds, days and
-- deletion are those of both. Their model and metadata, by which they are listed, are read from an index alone: a row has
-- them behind its texts.
ALTER TABLE responses ADD COLUMN kind TEXT NOT NULL DEFAULT 'response' CHECK (kind IN ('response', 'chat.completion'));
ALTER TABLE responses ADD COLUMN model TEXT;
ALTER TABLE responses ADD COLUMN metadata TEXT;
CREATE INDEX completions_of_owner ON responses (owner, seq, model, metadata) WHERE kind = 'chat.completion';
CREATE INDEX completions_of_all ON responses (seq, model, metadata) WHERE kind = 'chat.completion';
