-- The names that an owner's jobs make, by an index alone: they stand behind hyperparameters in a job's row.
CREATE INDEX jobs_named ON jobs (owner, phase, output_model, id);
