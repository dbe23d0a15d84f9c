"""Jobs that have ended: rows for the page to show."""

from __future__ import annotations

from appliance.store.database import Database
from appliance.store.objects import jobs
from appliance.store.rows import JobRow


def insert_jobs(db: Database, count: int, first: int = 0) -> None:
    """Ended ones, `ft:starter:local:nNNN:job`, the last made the newest."""
    for number in range(first, first + count):
        jobs.insert(
            db,
            JobRow(
                id=f"ftjob-{number:03}",
                model="starter",
                method="supervised",
                training_file="file-1",
                seed=1,
                output_model=f"ft:starter:local:n{number:03}:job",
                created_s=1e9 + number,
                phase="cancelled",
                finished_s=1e9 + number,
                resolved={"publish": "end", "n_epochs": 1, "batch_size": 1, "options": {}},
            ),
        )
