-- Gates that have ended and still have their terms, up to 512 KiB each: an owner keeps those of the newest. A column of
-- its own, so that the index alone tells.
ALTER TABLE gates ADD COLUMN has_terms INTEGER GENERATED ALWAYS AS (terms != '{}') VIRTUAL;
CREATE INDEX gates_with_terms ON gates (owner, state, has_terms, seq);
