-- What `auto` has learned of each model's traffic, so that a restart does not begin anew. arguments: of the learner that
-- it belongs to; a learner with others does not take it over.
CREATE TABLE standby (
    model TEXT PRIMARY KEY REFERENCES deployments (model) ON DELETE CASCADE,
    arguments TEXT NOT NULL,
    state TEXT NOT NULL,
    saved_s REAL NOT NULL
);
