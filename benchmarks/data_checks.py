"""Speed of each check of training data, on one core, in MB of file per second of processor time.

    python benchmarks/data_checks.py [--mb 100] [--tokenizer DIR]

The file is made of GSM8K's training set (../shared/data or $APPLIANCE_TEST_DATA), its questions and answers joined at
random to examples of about 1 kB, a tenth of which nearly repeat another. Each check is timed alone, less the reading
and converting that all need; then all of them together, in a process of their own. Processor time, for others
work on the machine too. rensa, a MinHash in Rust, is timed on the same texts; it is installed under build/peers.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _peers
from benchmarks._claims import Claim, at_most, record, skipped, stated
from train.data_checks.options import CHECKS, CheckOptions
from train.data_checks.scan import Scan
from train.methods.methods import convert

REPOSITORY = Path(__file__).resolve().parents[1]
GIGABYTE_S = 600  # "minutes"
_PART_MB = 20
_IN_A_PROCESS = (
    "import json, sys; from train.data_checks.process import carried_out; "
    "print(json.dumps(carried_out(json.loads(sys.argv[1]))))"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100, help="size of the file of all checks together")
    parser.add_argument("--tokenizer", type=Path, help="a model's directory, to count tokens with")
    asked = parser.parse_args()
    data = Path(os.environ.get("APPLIANCE_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    source = data / "finetune" / "gsm8k_train.jsonl.gz"
    if not source.exists():
        print(f"no GSM8K at {source}; set APPLIANCE_TEST_DATA", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        whole, part = Path(folder) / "whole.jsonl", Path(folder) / "part.jsonl"
        valid = Path(folder) / "valid.jsonl"
        _make(source, whole, asked.mb)
        _make(source, part, min(_PART_MB, asked.mb))
        with gzip.open(source.with_name("gsm8k_test.jsonl.gz")) as test:
            valid.write_bytes(test.read())
        record(__file__, [*_each(part, valid), *_all(whole, valid, asked), _rensa(part)])
    return 0


def _make(source: Path, target: Path, mb: int) -> None:
    drawn = random.Random(5)
    with gzip.open(source, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    words = [row["question"] for row in rows], [row["answer"] for row in rows]
    size, last = 0, ("", "")
    with open(target, "w") as out:
        while size < mb * 10**6:
            question, answer = drawn.choice(words[0]), " ".join(drawn.choice(words[1]) for _ in range(2))
            if last[0] and drawn.random() < 0.1:
                question, answer = last[0], last[1].replace(" the ", " that ", 1)
            last = question, answer
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            size += out.write(json.dumps({"messages": messages}) + "\n")


def _seconds(path: Path, options: CheckOptions) -> float:
    """Of processor time, the best of two."""
    best = float("inf")
    for _ in range(2):
        scan = Scan(options, convert, None, None)
        begun = time.process_time()
        scan.read(path)
        scan.compare()
        best = min(best, time.process_time() - begun)
        scan.close()
    return best


def _each(path: Path, valid: Path) -> list[Claim]:
    megabytes = path.stat().st_size / 1e6
    _seconds(path, CheckOptions(against=valid))  # compiles
    base = _seconds(path, CheckOptions(leave_out=CHECKS))
    rows = [_said("reading and converting", megabytes, base)]
    for name in CHECKS:
        if name in ("bad_lines", "empty", "too_long"):
            continue  # part of reading
        others = [other for other in CHECKS if other != name]
        against = valid if name == "contaminated" else None
        took = _seconds(path, CheckOptions(leave_out=others, against=against)) - base
        rows.append(_said(name.replace("_", " "), megabytes, took))
    return rows


def _said(name: str, megabytes: float, seconds: float) -> Claim:
    speed = megabytes / max(seconds, 1e-3)
    print(f"{name:26} {speed:8.1f} MB/s", flush=True)
    return stated(f"data check: {name}", f"{megabytes:.0f} MB", speed, "MB/s")


def _all(path: Path, valid: Path, asked: argparse.Namespace) -> list[Claim]:
    megabytes, rows = path.stat().st_size / 1e6, []
    for name, options in {
        "all checks": CheckOptions(against=valid),
        "all checks, tokens counted": CheckOptions(against=valid, model=asked.tokenizer),
    }.items():
        claim, limit = f"a gigabyte through {name}, one core", GIGABYTE_S
        if options.model is None and "tokens" in name:
            rows.append(skipped(claim, f"{megabytes:.0f} MB", f"<= {limit:g}", "give --tokenizer DIR"))
            continue
        before = _children_s()
        # As the box does, but at the priority of this script: beside other work it would not end.
        request = json.dumps({"files": [str(path)], "check": asdict(options)}, default=str)
        done = subprocess.run([sys.executable, "-c", _IN_A_PROCESS, request], capture_output=True, check=True)
        report = json.loads(done.stdout)
        seconds, peak = _children_s() - before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        per_gb = seconds / megabytes * 1000
        print(f"{name}: {megabytes:.0f} MB in {seconds:.1f} s, {per_gb:.0f} s a gigabyte, at most {peak >> 10} MiB")
        print({check: found["count"] for check, found in report["checks"].items()})
        rows += [
            at_most(claim, f"{megabytes:.0f} MB", per_gb, "s", limit),
            stated(f"memory of {name}", f"{megabytes:.0f} MB", peak / 1024, "MiB"),
        ]
    return rows


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _rensa(path: Path) -> Claim:
    try:
        sys.path.append(str(_peers.path("rensa")))
    except _peers.NotInstalled as error:
        return skipped("rensa's MinHash on the same texts", path.name, "stated", str(error))
    import rensa

    with open(path) as lines:
        texts = ["\n".join(m["content"] for m in json.loads(line)["messages"]) for line in lines]
    begun = time.process_time()
    for text in texts:
        words = text.lower().split()
        sketch = rensa.RMinHash(num_perm=120, seed=1)
        sketch.update([" ".join(words[at : at + 5]) for at in range(max(1, len(words) - 4))])
        sketch.digest()
    return _said("rensa, signatures alone", path.stat().st_size / 1e6, time.process_time() - begun)


if __name__ == "__main__":
    sys.exit(main())
