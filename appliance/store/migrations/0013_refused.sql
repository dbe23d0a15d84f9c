-- Requests that the gateways refused: over a limit, for want of a right, or for what they asked.

ALTER TABLE usage ADD COLUMN refused INTEGER NOT NULL DEFAULT 0;
