"""Prints the findings of all checks as JSON, in a process of its own, or keeps them in the data directory.

python -m appliance.doctor.main --config-json JSON [--runs] [--keep]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from appliance.config import load_resolved
from appliance.doctor import facts
from appliance.doctor.checks import exit_code, findings
from appliance.paths import BoxPaths
from runtime.replace_file import replace_file


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.doctor.main", description=__doc__)
    parser.add_argument("--config-json", required=True, help="the resolved configuration, JSON")
    parser.add_argument("--runs", action="store_true", help="the box of this configuration is up")
    parser.add_argument("--keep", action="store_true", help="for a running box: into its data directory")
    options = parser.parse_args(argv)
    config = load_resolved(options.config_json)
    now_s = time.time()
    found = findings(facts.read(config, runs=options.runs))
    text = json.dumps({"exit_code": exit_code(found), "at_s": now_s, "data": [asdict(finding) for finding in found]})
    if options.keep:
        replace_file(BoxPaths.of(Path(config.box.data_dir)).last_checkup, text.encode())
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
