-- Which version a gate has judged, by an index alone: it stands behind the gate's terms in its row.
CREATE INDEX gates_of_version ON gates (model, seq, version);
DROP INDEX gates_of_model;
