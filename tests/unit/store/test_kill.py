"""kill -9 in the middle of writing: what was acknowledged is there, what was not is there whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from appliance.store.database import Database
from appliance.store.objects import job_records, jobs

WRITER = """
import sys
from pathlib import Path
from appliance.controller.jobs.events import add_message
from appliance.store.objects import jobs
from appliance.store.database import Database
from appliance.store.rows import JobRow

db = Database(Path(sys.argv[1]))
number = int(sys.argv[2])

while True:
    with db.transaction():
        jobs.insert(db, JobRow(id=f"ftjob-{number}", model="m", method="supervised", training_file="f", seed=1,
                               output_model="o", created_s=1.0))
        for part in range(3):
            add_message(db, f"ftjob-{number}", f"part {part}")
    print(number, flush=True)
    number += 1
"""


def test_no_acknowledged_row_is_lost_and_no_transaction_is_torn(tmp_path: Path):
    path = tmp_path / "appliance.db"
    first, acknowledged = 0, set()
    for kill_after in (1, 17, 60):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(first)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                acknowledged.add(int(line))
                if int(line) - first + 1 >= kill_after:
                    break
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        # Lines that were still in the pipe were acknowledged too.
        acknowledged |= {int(line) for line in process.stdout.read().split()}
        process.stdout.close()
        assert process.stderr is not None and process.stderr.read() == ""
        process.stderr.close()
        with Database(path) as db:
            assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            stored = {int(row.id.removeprefix("ftjob-")) for row in jobs.list_unfinished(db)}
            assert acknowledged <= stored
            assert len(stored - acknowledged) <= len((1, 17, 60)), "at most the one in flight at each kill"
            for number in stored:
                assert len(job_records.page_events(db, f"ftjob-{number}", after=None, limit=9).data) == 3
            first = max(stored) + 1
    assert len(acknowledged) >= 78
