"""Runs one command on backups in a process of its own.

    python -m appliance.backup.main make|list|verify|restore --config-json JSON [options]
    python -m appliance.backup.main keygen --config-json JSON --to FILE

Lines of JSON on stdout: {"done", "of"} in bytes while it works, then {"answer"}. After exit code 1 the last line on
stderr says why; chunks without a backup may have been written, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance.backup import manifest as manifests
from appliance.backup.encryption import make_key, opened
from appliance.backup.errors import BackupError
from appliance.backup.manifest import Manifest
from appliance.backup.restore import live_keys, restore, verify
from appliance.backup.take import take
from appliance.config import BackupSettings, load_resolved
from appliance.paths import BoxPaths
from runtime.logs import configure_logging
from weights.format.errors import WeightsError
from weights.tiers.locations import objects_at
from weights.tiers.objects import Objects

REPORT_EVERY_S = 0.2
NICE = 10


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.backup.main", description=__doc__)
    parser.add_argument("command", choices=["make", "list", "verify", "restore", "keygen"])
    parser.add_argument("--config-json", required=True, help="the resolved configuration, JSON")
    parser.add_argument("--name", help="of a backup; without it the newest")
    parser.add_argument("--keep", type=int)
    parser.add_argument("--secrets", action="store_true")
    parser.add_argument("--to", type=Path, help="of keygen: the new file")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit removes what is half made
    os.umask(0o077)
    os.nice(NICE)
    configure_logging("backup")
    config = load_resolved(options.config_json)
    paths = BoxPaths.of(Path(config.box.data_dir))
    try:
        if options.command == "keygen":
            make_key(options.to)
            print(json.dumps({"answer": {"file": str(options.to)}}), flush=True)
            return 0
        objects = _place(config.backup, make=options.command == "make")
        if options.command == "make":
            keep = config.backup.keep if options.keep is None else options.keep
            answer = _shown(take(paths, objects, keep=keep, secrets=options.secrets, report=_Report()))
        elif options.command == "list":
            found, damaged = manifests.readable(objects)
            answer = {"data": [_shown(manifest) for manifest in found], "damaged": damaged}
        elif options.command == "verify":
            answer = _shown(verify(objects, options.name, report=_Report()))
        else:
            answer = _shown(restore(objects, options.name, paths.data_dir, report=_Report()))
            answer["live_keys"] = live_keys(paths.database)
    except (BackupError, WeightsError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps({"answer": {**answer, "where": objects.where}}), flush=True)
    return 0


def _place(place: BackupSettings, *, make: bool) -> Objects:
    if place.url is None:
        raise BackupError("no place for backups: name one, or set url in [backup] (docs/operations.md)")
    if not place.url.startswith("s3://") and not Path(place.url).is_dir():
        what = "make it first (a mount that is lost must not be filled)"
        raise BackupError(f"{place.url} is not a directory; {what if make else 'is it written right, and mounted?'}")
    key_file = None if place.key_file is None else Path(place.key_file).expanduser()
    return opened(objects_at(place), key_file, make=make)


class _Report:
    def __init__(self) -> None:
        self._next_s = 0.0

    def __call__(self, done: int, of: int) -> None:
        if time.monotonic() >= self._next_s:
            print(json.dumps({"done": done, "of": of}), flush=True)
            self._next_s = time.monotonic() + REPORT_EVERY_S


def _shown(found: Manifest) -> dict[str, Any]:
    fields = asdict(found)
    return {**fields, "files": len(found.files), "bytes": found.bytes}


if __name__ == "__main__":
    sys.exit(main())
