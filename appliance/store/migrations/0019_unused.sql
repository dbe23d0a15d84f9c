-- What fails is known to the scheduler alone, so that a restart tries everything again.
ALTER TABLE deployments DROP COLUMN failures;
ALTER TABLE deployments DROP COLUMN failed_reason;
ALTER TABLE deployments DROP COLUMN not_before_s;
ALTER TABLE jobs DROP COLUMN failures;
ALTER TABLE jobs DROP COLUMN not_before_s;
ALTER TABLE canaries DROP COLUMN failed_reason;
