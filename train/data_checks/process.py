"""Runs a check or a preparation in a process of its own: `python -m train.data_checks.process '{"files": [...], …}'`.

It prints the report, or the lineage, as JSON on stdout; what is wrong with the request as {"error": text} and exit code
2. It runs at low priority, ends with its parent, and is killed beyond its limits of CPU and memory: a file is somebody
else's, and parsing it blocks all other threads of a process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from runtime.processes.bounds import Bounds
from train.data.formats import BadRecord, Record
from train.data_checks.options import ANY, BadOption, CheckOptions, PrepareOptions

# Some 3 MB/s with everything asked for.
BOUNDS = Bounds(cpu_s=4 * 3600, memory_bytes=6 << 30)
_NICENESS = 10
_CONFIG_BYTES = 1 << 20
_LISTED_LINES = 1000


class CheckFailed(Exception):
    """A check or a preparation did not finish; the text says why, for the caller."""


def command_of(request: dict[str, Any]) -> list[str]:
    """What runs a request: {"files": paths, "names"?: their names in reports, "check": fields of CheckOptions} and, to
    prepare a new file, "prepare": fields of PrepareOptions, "target", "validation" and "lineage": paths. "niceness"?:
    in place of the low priority of work that nobody waits for."""
    return [sys.executable, "-P", "-m", "train.data_checks.process", json.dumps(request, default=str)]


def answer_of(status: int, out: bytes, err: bytes) -> dict[str, Any]:
    """What a process of `command_of` has answered. Raises BadOption, CheckFailed."""
    try:
        answer: dict[str, Any] = json.loads(out)
    except ValueError:
        last_line = err.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise CheckFailed(f"it could not be done with {BOUNDS.how_it_ended(status, last_line)}") from None
    if "error" not in answer:
        return answer
    raise (BadOption if answer.get("bad_option") else CheckFailed)(answer["error"])


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
    # Importing compiled code takes half a second: only after the request is known to be valid.
    options = _options(request["check"])
    from train.data_checks import prepare, report
    from train.data_checks.scan import Scan
    from train.methods import methods
    from train.methods.check_process import counter, encoder_of
    from train.plan.errors import InvalidSpec
    from weights.checkpoint.errors import CheckpointRefused
    from weights.checkpoint.folder import check_settings

    try:
        method = None if options.method == ANY else methods.method_of(options.method)
    except InvalidSpec as error:
        raise BadOption(str(error)) from error

    def convert(record: Record, shape: str) -> Record:
        made = methods.convert(record, shape) if method is None else method.convert(record, shape)
        if made is None:
            raise BadRecord((method.refuses(shape) if method else None) or f"has the shape {shape!r}")
        return made

    if options.model:
        try:
            check_settings(Path(options.model))
        except CheckpointRefused as error:
            raise BadOption(f"{options.model}: {error}") from error
    encoder = encoder_of(options.model) if options.model else None
    count = counter(method or methods.DEFAULT, encoder, None) if encoder else None
    if options.model and count is None:
        raise BadOption(f"{options.model} has no tokenizer with a chat template, so its tokens cannot be counted")
    scan = Scan(options, convert, count, _most_tokens(options))
    try:
        for path, name in zip(request["files"], request.get("names", request["files"]), strict=True):
            scan.read(Path(path), name)
        scan.compare()
        made = report.report(scan, options)
        if "prepare" not in request:
            return made
        wanted = request["prepare"]
        chosen = PrepareOptions(**{**wanted, "mix": [(Path(path), share) for path, share in wanted.get("mix", ())]})
        try:
            lineage = prepare.prepare(scan, chosen, Path(request["target"]), _path(request, "validation"))
            lineage["check"] = {name: value for name, value in request["check"].items() if value is not None}
            if options.against is not None:
                lineage["against_sha256"] = scan.against_sha256
        except prepare.Unusable as error:
            raise CheckFailed(str(error)) from error
    finally:
        scan.close()
    if (place := _path(request, "lineage")) is not None:
        with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            json.dump(lineage, out)
    first = {name: lines[:_LISTED_LINES] for name, lines in lineage["dropped_lines"].items()}
    return {**lineage, "dropped_lines": first, "report": made}


def _options(given: dict[str, Any]) -> CheckOptions:
    paths = {name: Path(given[name]) for name in ("model", "against", "words") if given.get(name) is not None}
    return CheckOptions(**{**given, **paths})


def _path(request: dict[str, Any], name: str) -> Path | None:
    return Path(request[name]) if request.get(name) is not None else None


def _most_tokens(options: CheckOptions) -> int | None:
    """The requested number, otherwise the model's context by its configuration. Raises BadOption."""
    if options.max_tokens is not None or options.model is None:
        return options.max_tokens
    try:
        with open(options.model / "config.json", "rb") as file:
            config = json.loads(file.read(_CONFIG_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BadOption(f"{options.model}/config.json cannot be read: {error}") from error
    for part in (config, config.get("text_config")):
        found = part.get("max_position_embeddings", part.get("n_positions")) if isinstance(part, dict) else None
        if isinstance(found, int) and found > 0:
            return found
    return None


if __name__ == "__main__":
    main()
