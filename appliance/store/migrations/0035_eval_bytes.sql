-- What an owner's runs hold, told without reading the runs: a row may have megabytes before its counters.
CREATE INDEX eval_runs_held ON eval_runs (key_id, status, bytes);
