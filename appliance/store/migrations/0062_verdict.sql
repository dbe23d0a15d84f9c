-- What a job's curves say of what it learned: {"code", "text"}.
ALTER TABLE jobs ADD COLUMN verdict TEXT;
