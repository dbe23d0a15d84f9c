-- Which unfinished jobs make a model, without reading all of them: a new job, an import and a starter ask.
CREATE INDEX jobs_making ON jobs (output_model) WHERE phase IN ('validating', 'queued', 'running', 'suspended');
