"""A backup of a data directory over a plain copy of the same bytes that is synced too, in one run.

    python benchmarks/backup.py [--size-mb 1024] [--rounds 3]

Models of random bytes, to a directory of the same disk. "first": all is new; "next": 64 MiB are; "same": nothing is.
Rounds alternate with the copy; medians are reported.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.backup.restore import restore, verify
from appliance.backup.take import take
from appliance.paths import BoxPaths
from appliance.store.database import Database
from benchmarks._claims import at_most, record, stated
from weights.tiers.objects import DirectoryObjects

FILES, NEW_BYTES = 8, 64 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    took: dict[str, list[float]] = {}
    for n in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="backup-", dir=Path.cwd()) as folder:
            one_round(Path(folder), options.size_mb << 20, took, copy_first=n % 2 == 0)
    median = {name: statistics.median(seconds) for name, seconds in took.items()}
    for name, seconds in median.items():
        print(f"{name:8} {seconds:6.2f} s   {seconds / median['copy']:5.2f} of the copy")
    size = f"{options.size_mb} MiB"
    record(
        __file__,
        [
            at_most("first backup over a synced copy", size, median["first"] / median["copy"], "x", 1.5),
            at_most("backup with 64 MiB new over a synced copy", size, median["next"] / median["copy"], "x", 0.25),
            at_most("backup with nothing new over a synced copy", size, median["same"] / median["copy"], "x", 0.1),
            stated("verify over a synced copy", size, median["verify"] / median["copy"], "x"),
            at_most("restore over a synced copy", size, median["restore"] / median["copy"], "x", 1.5),
        ],
    )
    return 0


def one_round(folder: Path, size: int, took: dict[str, list[float]], *, copy_first: bool) -> None:
    (folder / "shm").mkdir()
    paths = BoxPaths.of(folder / "box", folder / "shm")
    paths.create()
    Database(paths.database).close()
    models = paths.models / "m"
    models.mkdir()
    for n in range(FILES):
        (models / f"{n}.safetensors").write_bytes(os.urandom(size // FILES))
    place = DirectoryObjects(folder / "place", create=True)

    def timed(name: str, work: Callable[[], Any]) -> None:
        began_s = time.perf_counter()
        work()
        took.setdefault(name, []).append(time.perf_counter() - began_s)

    if copy_first:
        timed("copy", lambda: synced_copy(models, folder / "copy"))
    timed("first", lambda: take(paths, place, clock=lambda: 1e9))
    if not copy_first:
        timed("copy", lambda: synced_copy(models, folder / "copy"))
    (models / "new.safetensors").write_bytes(os.urandom(NEW_BYTES))
    timed("next", lambda: take(paths, place, clock=lambda: 1e9 + 1))
    timed("same", lambda: take(paths, place, clock=lambda: 1e9 + 2))
    timed("verify", lambda: verify(place, None))
    timed("restore", lambda: restore(place, None, folder / "back"))


def synced_copy(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        with open(path, "rb") as read, open(target / path.name, "wb") as written:
            shutil.copyfileobj(read, written, 16 << 20)
            written.flush()
            os.fsync(written.fileno())


if __name__ == "__main__":
    sys.exit(main())
