-- Numbers about a model's idleness in one place; `options` held nothing until now.
ALTER TABLE deployments RENAME COLUMN options TO idle;
UPDATE deployments SET idle = json_object('idle_sleep_s', idle_sleep_s) WHERE idle_sleep_s IS NOT NULL;
ALTER TABLE deployments DROP COLUMN idle_sleep_s;
