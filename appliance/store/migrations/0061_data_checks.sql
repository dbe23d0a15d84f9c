-- What the check of training data found (waiting, done or failed), its report, and what a prepared file was made of.
ALTER TABLE files ADD COLUMN check_status TEXT;
ALTER TABLE files ADD COLUMN data_check TEXT;
ALTER TABLE files ADD COLUMN lineage TEXT;
CREATE INDEX files_unchecked ON files (created_s) WHERE check_status = 'waiting';
