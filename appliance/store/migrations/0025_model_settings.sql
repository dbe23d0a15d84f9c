-- How a model's engines are set up: every version of its settings, the highest number in force.
CREATE TABLE model_settings (
    model TEXT NOT NULL REFERENCES models (id) ON DELETE CASCADE, number INTEGER NOT NULL, settings TEXT NOT NULL,
    digest TEXT NOT NULL, by_whom TEXT NOT NULL DEFAULT '', created_s REAL NOT NULL, PRIMARY KEY (model, number)
);
