"""Prints the findings of all checks as JSON, in a process of its own.

python -m appliance.doctor.main --config FILE [--runs]
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
from appliance.doctor.checks import exit_code, findings


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.doctor.main", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="the resolved configuration, JSON")
    parser.add_argument("--runs", action="store_true", help="the box of this configuration is up")
    options = parser.parse_args(argv)
    found = findings(load_resolved(options.config), runs=options.runs)
    print(json.dumps({"exit_code": exit_code(found), "at_s": time.time(), "data": [asdict(one) for one in found]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
