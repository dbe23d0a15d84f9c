-- Runs in which a model answered items of a file, by their evaluation: to find the newest, all of them were read.
CREATE INDEX eval_runs_sampled ON eval_runs (eval_id, seq)
    WHERE data_source ->> '$.type' IN ('completions', 'responses') AND data_source ->> '$.source.type' = 'file_id';
