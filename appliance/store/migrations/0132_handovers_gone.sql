-- What was counted of hand-overs that retention has deleted since, by outcome: counted by their rows alone, the totals fell,
-- which Prometheus takes for a box that began again and for as many new failures as were left. Whole milliseconds: their sum
-- is the same in whatever order rows go.
CREATE TABLE handovers_gone (
    state TEXT PRIMARY KEY, number INTEGER NOT NULL, milliseconds INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TRIGGER handovers_delete AFTER DELETE ON handovers WHEN OLD.ended_s IS NOT NULL BEGIN
    INSERT INTO handovers_gone VALUES (OLD.state, 1, CAST(round(1000 * (OLD.ended_s - OLD.started_s)) AS INTEGER))
        ON CONFLICT DO UPDATE
        SET number = number + 1, milliseconds = milliseconds + excluded.milliseconds;
END;
