-- With which version, devices and settings (by their digest) an engine of the model opened last: what the box goes back to
-- when no engine starts with other settings. note: why the box itself put these settings in force.
ALTER TABLE deployments ADD COLUMN served TEXT NOT NULL DEFAULT '{}';
ALTER TABLE model_settings ADD COLUMN note TEXT NOT NULL DEFAULT '';
