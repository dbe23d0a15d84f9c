-- What owners hold, told without reading what it is: counters stand behind megabytes, or in 50,000 rows of texts.
CREATE INDEX evals_held ON evals (key_id, id, bytes);
CREATE INDEX responses_waiting ON responses (key_id, bytes) WHERE status IN ('queued', 'in_progress');
CREATE INDEX responses_held ON responses (owner, used_s, status, bytes);
