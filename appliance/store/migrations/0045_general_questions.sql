-- The general questions are scored by how likely the right words are; what older jobs heard stands in their events.
UPDATE jobs SET general = NULL WHERE general IS NOT NULL;
