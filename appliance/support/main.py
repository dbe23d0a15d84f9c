"""Writes a support bundle, in a process of its own.

python -m appliance.support.main --config-json JSON --output FILE --hours H [--runs] < answers

answers: JSON of what the box itself said: `parts` (name -> text), `missing` (name -> why), `names` (of people, keys).
Prints what is in the bundle, as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from appliance.config import load_resolved
from appliance.paths import BoxPaths
from appliance.support import sources
from appliance.support.redaction import Redaction
from appliance.support.sources import Missing, Part

READ_ME = """What somebody needs to see what is wrong with a box.

Look at it before you send it: secrets, addresses, mails, homes and names of people were replaced by patterns, and
patterns miss things. manifest.json says what is here, from where, what was left out and how much was replaced. Names
of models, jobs and files stand here as they are. Prompts, answers, data, weights and the database do not.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.support.main", description=__doc__)
    parser.add_argument("--config-json", required=True, help="the resolved configuration, JSON")
    parser.add_argument("--output", type=Path, required=True, help="a file that does not exist yet")
    parser.add_argument("--hours", type=float, required=True, help="take logs that were written within this many hours")
    parser.add_argument("--runs", action="store_true", help="the box of this configuration is up")
    options = parser.parse_args(argv)
    config = load_resolved(options.config_json)
    answers, now_s = json.load(sys.stdin), time.time()
    paths = BoxPaths.of(Path(config.box.data_dir))
    found = [
        *(Part(f"box/{name}", text, "the box") for name, text in answers["parts"].items()),
        *(Missing(f"box/{name}", why) for name, why in answers["missing"].items()),
        sources.state(paths),
        *sources.machine(config, runs=options.runs),
        *sources.logs(paths.logs, since_s=now_s - options.hours * 3600),
    ]
    redaction = Redaction(sources.secrets_of(paths), answers["names"])
    print(json.dumps(write(options.output, found, redaction, now_s=now_s)))
    return 0


def write(output: Path, found: Iterable[Part | Missing], redaction: Redaction, *, now_s: float) -> dict[str, Any]:
    """A new file, for its owner alone. Returns its manifest. Raises FileExistsError."""
    listed, missing = [], []
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for part in found:
            if isinstance(part, Missing):
                missing.append({"name": redaction.apply(part.name), "why": redaction.apply(part.why)})
                continue
            name, data = redaction.apply(part.name), redaction.apply(part.text).encode()
            _add(archive, name, data, now_s)
            digest = hashlib.sha256(data).hexdigest()
            listed.append({"name": name, "bytes": len(data), "sha256": digest, "source": redaction.apply(part.source)})
        manifest = {
            "created_s": now_s,
            "files": listed,
            "missing": missing,
            "replaced": dict(sorted(redaction.counts.items())),
        }
        _add(archive, "manifest.json", json.dumps(manifest, indent=1).encode(), now_s)
        _add(archive, "README.txt", READ_ME.encode(), now_s)
    return manifest


def _add(archive: tarfile.TarFile, name: str, data: bytes, now_s: float) -> None:
    entry = tarfile.TarInfo(f"appliance-support/{name}")
    entry.size, entry.mtime, entry.mode = len(data), int(now_s), 0o600
    archive.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    sys.exit(main())
