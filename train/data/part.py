"""Writes a part of a data file to a new one, in a process of its own: `python -m train.data.part SOURCE TARGET SHARE
LEAST SEED`. It prints {"bytes"} of what it has written, or {"error"} in words.

A file is somebody else's: it may have one line of gigabytes, or a thousand million lines. This process has limits of
CPU and memory, reads a line with a limit, too, and ends with its parent.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from runtime.processes.bounds import Bounds
from train.data.formats import BadRecord
from train.data.lines import examples

BOUNDS = Bounds(cpu_s=3600, memory_bytes=4 << 30)
_NICENESS = 10


class NoPart(Exception):
    """No part was made; the text says why, for whoever asked for it."""


def write_apart(source: Path, target: Path, share: float, least: int) -> int:
    """Bytes of the new file `target`: a share of the examples (0 to 1), `least` of them at least, one a line and in
    their order; a larger share has those of a smaller one. Raises NoPart; blocks until it is done."""
    command = [sys.executable, "-P", "-m", "train.data.part", source, target, str(share), str(least)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise NoPart(f"a part of the data could not be made with {BOUNDS.how_it_ended(done.returncode)}") from None
    if "error" in answer:
        raise NoPart(answer["error"])
    return int(answer["bytes"])


def chosen(count: int, share: float, least: int) -> np.ndarray:
    """(count,) bool: which of `count` examples are in the part."""
    wanted = min(count, max(least, math.ceil(share * count)))
    drawn = np.random.Generator(np.random.PCG64(0)).random(count)
    return drawn <= np.partition(drawn, wanted - 1)[wanted - 1]


def write(source: Path, target: Path, share: float, least: int) -> int:
    """In this process. Raises NoPart, OSError; `target` must not be there."""
    with open(source, "rb") as file:
        count = sum(1 for _ in examples(file))
        if count == 0:
            raise NoPart("the data has no examples")
        taken, size = chosen(count, share, least), 0
        file.seek(0)
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            for example, wanted in zip(examples(file), taken, strict=True):
                if not wanted:
                    continue
                if isinstance(example.raw, BadRecord):
                    raise NoPart(f"line {example.line} {example.raw}")
                # An element of an array may stand on several lines; a line end within a text of JSON is written `\\n`.
                size += out.write(example.raw.strip().replace(b"\n", b" ") + b"\n")
            out.flush()
            os.fsync(out.fileno())
    return size


def main() -> None:
    BOUNDS.hold()
    os.nice(_NICENESS)
    source, target, share, least = sys.argv[1:]
    try:
        print(json.dumps({"bytes": write(Path(source), Path(target), float(share), int(least))}))
    except NoPart as error:
        print(json.dumps({"error": str(error)}))
    except OSError as error:  # without the path, which is the box's
        print(json.dumps({"error": f"the data could not be read or written: {error.strerror}"}))


if __name__ == "__main__":
    main()
