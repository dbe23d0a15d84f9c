"""Runs the tool of a kind's maker that samples devices' own counters, for `appliance profile … --nsight FILE`.

python -m runtime.devices.hardware_trace KIND SECONDS FILE INDEX...
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from runtime.devices.kinds import kind_of

ENDS_WITHIN_S = 120.0


class NotSampled(RuntimeError):
    """The message says why."""


def sample(kind: str, seconds: int, file: Path, indices: Sequence[int]) -> None:
    """Sample these devices for so long into `file`. Raises NotSampled."""
    command = kind_of(kind).hardware_trace(indices, seconds, file)
    if not command:
        raise NotSampled(f"there is no such tool for a {kind_of(kind).title}")
    if shutil.which(command[0]) is None:
        raise NotSampled(
            f"{command[0]} is not installed on this machine; the box's own profile, without this option, needs nothing"
        )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + ENDS_WITHIN_S)
    except subprocess.TimeoutExpired as error:
        raise NotSampled(f"{command[0]} did not end within {error.timeout:.0f} s") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise NotSampled(f"{command[0]} ended with {done.returncode}: {said}")


def main(arguments: Sequence[str]) -> int:
    kind, seconds, file, *indices = arguments
    try:
        sample(kind, int(seconds), Path(file), [int(index) for index in indices])
    except NotSampled as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
