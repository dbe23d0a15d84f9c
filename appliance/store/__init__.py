"""The box's only truth: one SQLite database. `database` opens it, one file per table reads and writes it."""
