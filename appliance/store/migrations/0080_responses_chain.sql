-- A conversation is followed by this index alone: what a turn goes on from stands behind its texts in its row.
CREATE INDEX responses_chain ON responses (id, owner, previous_id, bytes);
