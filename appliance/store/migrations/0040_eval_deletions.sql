-- Ids of evals and of runs that were deleted: nobody sees them, and their items go a few at a time.
CREATE TABLE eval_deletions (id TEXT PRIMARY KEY) WITHOUT ROWID;
-- Items by status. A list of runs counted each run's items anew.
ALTER TABLE eval_runs ADD COLUMN counts TEXT NOT NULL DEFAULT '{}';
UPDATE eval_runs SET counts = coalesce((
    SELECT json_group_object(status, number) FROM (
        SELECT status, count(*) AS number FROM eval_items
        WHERE run_id = eval_runs.id AND status <> 'queued' GROUP BY status
    )
), '{}');
-- In the order of lists, which choose by status: without the rows, which may have megabytes before it.
DROP INDEX eval_runs_of;
CREATE INDEX eval_runs_in_order ON eval_runs (eval_id, seq, status);
CREATE INDEX eval_items_in_order ON eval_items (run_id, seq, status);
-- Of an owner, the newest first, which are kept.
CREATE INDEX eval_runs_kept ON eval_runs (owner, seq, status);
UPDATE eval_runs SET bytes = bytes + length(data_source);
