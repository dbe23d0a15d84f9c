"""Runs a check or a preparation in a process of its own: `python -m train.data_checks.process '{"file": …}'`.

It prints the report, or the lineage, as JSON on stdout; what is wrong with the request as {"error": text} and exit code
2. It runs at low priority, ends with its parent, and is killed beyond its limits of CPU and memory: the file may be
hostile, and parsing it blocks all other threads of a process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal, get_args

from runtime.processes.bounds import Bounds
from train.data.formats import BadRecord, Record

BOUNDS = Bounds(cpu_s=3600, memory_bytes=6 << 30)
_NICENESS = 10


CheckName = Literal["bad_lines", "empty", "duplicates", "near_duplicates", "too_long", "contaminated", "personal_data"]
CHECKS: tuple[CheckName, ...] = get_args(CheckName)
"""In the order of a report."""


class BadOption(ValueError):
    """An option that makes no sense; the text is shown."""


class CheckFailed(Exception):
    """A check or a preparation did not finish; the text says why, for the caller."""


def command_of(request: dict[str, Any]) -> list[str]:
    """The command that runs a request.

    Args:
        request: "file": path; "name"?: what the report calls it; "check": {"model"?: directory with a tokenizer,
            "max_tokens"?: in place of the context that its config.json says, "method"?: a name in train.methods,
            "against"?: validation file}; "niceness"?. To prepare a new file also "prepare": {"drop", "mask", "split"},
            "targets": paths, "lineage"?: path (train.data_checks.prepare).
    """
    return [sys.executable, "-P", "-m", "train.data_checks.process", json.dumps(request)]


def answer_of(status: int, out: bytes, err: bytes) -> dict[str, Any]:
    """The answer of a process of `command_of`. Raises BadOption, CheckFailed."""
    try:
        answer: dict[str, Any] = json.loads(out)
    except ValueError:
        last_line = err.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise CheckFailed(f"it could not be done with {BOUNDS.how_it_ended(status, last_line)}") from None
    if "error" not in answer:
        return answer
    raise (BadOption if answer["bad_option"] else CheckFailed)(answer["error"])


def main() -> None:
    BOUNDS.hold()
    request = json.loads(sys.argv[1])
    os.nice(request.get("niceness", _NICENESS))
    try:
        answer = carried_out(request)
    except (BadOption, CheckFailed, OSError, ValueError) as error:
        print(json.dumps({"error": str(error), "bad_option": isinstance(error, BadOption)}))
        sys.exit(2)
    print(json.dumps(answer, ensure_ascii=False))


def carried_out(request: dict[str, Any]) -> dict[str, Any]:
    """Runs the request in this process. Raises BadOption, CheckFailed, OSError, ValueError."""
    # Compiled libraries, which take half a second: the controller imports this file for `command_of`.
    from train.data_checks.check import Check
    from train.data_checks.prepare import Unusable, prepare
    from train.methods import methods
    from train.methods.check_process import counter, encoder_of
    from train.plan.errors import InvalidSpec

    options, path = request["check"], Path(request["file"])
    try:
        method = methods.method_of(options["method"]) if options.get("method") else None
    except InvalidSpec as error:
        raise BadOption(str(error)) from error

    def convert(record: Record, shape: str) -> Record:
        made = method.convert(record, shape) if method else methods.convert(record, shape)
        if made is None:
            raise BadRecord((method.refuses(shape) if method else None) or f"has the shape {shape!r}")
        return made

    count, max_tokens = None, options.get("max_tokens")
    if model := options.get("model"):
        if (encoder := encoder_of(Path(model))) is None:
            raise BadOption(f"{model} has no tokenizer with a chat template that can be used to count tokens")
        count, max_tokens = counter(method or methods.DEFAULT, encoder, None), max_tokens or _context_of(Path(model))
    against = Path(options["against"]) if options.get("against") else None
    check = Check(CHECKS, convert, count, max_tokens, against)
    check.read(path)
    if "prepare" not in request:
        return check.report(request.get("name", str(path)))
    try:
        lineage = prepare(check, path, list(map(Path, request["targets"])), **request["prepare"])
    except Unusable as error:
        raise CheckFailed(str(error)) from error
    if "lineage" in request:
        with os.fdopen(os.open(request["lineage"], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            json.dump(lineage, out)
    return lineage


def _context_of(model: Path) -> int | None:
    """Tokens of the model's context, None if its configuration does not say. Raises OSError, ValueError."""
    config = json.loads((model / "config.json").read_bytes())
    text = config.get("text_config") or config
    return text.get("max_position_embeddings") or text.get("n_positions")


if __name__ == "__main__":
    main()
