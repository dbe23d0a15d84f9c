"""kill -9 in the middle of writing: what was acknowledged is there, what was not is there whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from appliance.store.database import Database

WRITER = """
import sys
from itertools import count
from pathlib import Path
from appliance.store.database import Database
from appliance.store.records import box

db = Database(Path(sys.argv[1]))
for number in count():
    with db.transaction():
        for part in range(3):
            box.put(db, f"{number}/{part}", number)
    print(number, flush=True)
"""


def test_kill_while_writing_keeps_acknowledged_transactions_whole(tmp_path: Path):
    path = tmp_path / "appliance.db"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 50:
            pass
        process.kill()
        acknowledged = 51 + len(process.stdout.read().split())
    with Database(path) as db:
        assert db.value("PRAGMA integrity_check") == "ok"
        stored = db.column("SELECT count(*) FROM box GROUP BY value")
        assert set(stored) == {3} and acknowledged <= len(stored) <= acknowledged + 1
