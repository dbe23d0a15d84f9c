"""Reads training data in a process of its own: `python -m train.data_checks.process REQUEST`.

A request is JSON: {"job": arguments of `checked`} for the check that decides whether a job can train on a file, else
what `command_of` takes. The last line that is printed is the result, or {"error": text} with exit code 2. The process
ends with its parent, and is killed beyond its limits of CPU and memory: the file may be hostile, and parsing JSON
blocks all other threads of a process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from runtime.processes.bounds import Bounds
from runtime.processes.ended import run_command
from train.data.check import COUNTED_EXAMPLES, Count, DataReport, check_training_file
from train.data.formats import Record
from train.methods import methods
from train.methods.method import Method
from train.plan.errors import InvalidSpec, UnsupportedModel

if TYPE_CHECKING:
    from train.data.chat import ChatEncoder

# An 8 GiB file of chats takes some minutes of CPU.
BOUNDS = Bounds(cpu_s=3600, memory_bytes=6 << 30)
# A job's check lowers its priority from this much processor time on: beside busy ranks, a dozen examples at low
# priority waited minutes for the 2 s that they and the import of the tokenizer's library take.
NICE_AFTER_S, _NICENESS = 5.0, 10

CheckName = Literal["bad_lines", "empty", "duplicates", "near_duplicates", "too_long", "contaminated", "personal_data"]
CHECKS: tuple[CheckName, ...] = get_args(CheckName)
"""In the order of a report."""


class BadOption(ValueError):
    """An option that makes no sense; the text is shown."""


class CheckFailed(Exception):
    """A check did not finish; the text says why, for the caller."""


def command_of(request: dict[str, Any]) -> list[str]:
    """The command that runs a request.

    Args:
        request: "file": path; "name"?: what the report calls it; "check": {"model"?: directory with a tokenizer,
            "max_tokens"?: in place of the context that its config.json says, "method"?: a name in train.methods,
            "against"?: validation file}; "niceness"?.
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


async def check_apart(path: Path, **how: Any) -> DataReport:
    """`checked`, in a process that ends when this is cancelled. A file that takes more than the limits is a bad one.
    Raises OSError."""
    job = {"path": path, **how}
    request = {"job": {name: str(value) if isinstance(value, Path) else value for name, value in job.items()}}
    status, out, _ = await run_command(*command_of(request))
    try:
        found = json.loads(out)
        return DataReport(**{**found, "errors": [(line, reason) for line, reason in found["errors"]]})
    except (ValueError, TypeError, KeyError):
        if not path.exists():
            raise FileNotFoundError(f"{path} was deleted while it was checked") from None
        report = DataReport()
        report.add_error(1, f"the file could not be checked with {BOUNDS.how_it_ended(status)}")
        return report


def main() -> None:
    BOUNDS.hold()
    request = json.loads(sys.argv[1])
    try:
        if "job" in request:
            signal.signal(signal.SIGPROF, lambda *_: os.setpriority(os.PRIO_PROCESS, 0, max(_NICENESS, os.nice(0))))
            signal.setitimer(signal.ITIMER_PROF, NICE_AFTER_S)
            answer = asdict(checked(**request["job"]))
        else:
            os.nice(request.get("niceness", _NICENESS))
            answer = carried_out(request)
    except (BadOption, CheckFailed, OSError, ValueError) as error:
        print(json.dumps({"error": str(error), "bad_option": isinstance(error, BadOption)}))
        sys.exit(2)
    print(json.dumps(answer, ensure_ascii=False))


def checked(
    path: str | Path,
    chat_path: str | Path | None = None,
    method: str | None = None,
    tokenizer: str | Path | None = None,
    cut_at: int | None = None,
) -> DataReport:
    """`check_training_file` with the method's conversion, or that of all methods, and counting tokens as the ranks will
    if there is a tokenizer (the directory of a model). With `cut_at` those of every example; ones of which the method
    has nothing left within so many tokens are errors too. Raises OSError."""
    how = methods.method_of(method) if method else methods.DEFAULT
    encoder = encoder_of(Path(tokenizer)) if tokenizer else None
    report = check_training_file(
        path,
        chat_path=chat_path,
        convert=how.convert if method else methods.convert,
        count=_counter(how, encoder, cut_at) if encoder else None,
        counted=COUNTED_EXAMPLES if cut_at is None else sys.maxsize,
        refuses=how.refuses if method else None,
    )
    if encoder and encoder.n_without_tools:
        report.warnings.append(
            f"the model's chat template leaves the tools of {encoder.n_without_tools} examples out: neither training "
            "nor an engine shows them to the model"
        )
    return report


def carried_out(request: dict[str, Any]) -> dict[str, Any]:
    """Runs a request of `command_of` in this process. Raises BadOption, CheckFailed, OSError, ValueError."""
    # Compiled libraries, which take half a second: the controller imports this file for `command_of`.
    from train.data_checks.check import Check

    options, path = request["check"], Path(request["file"])
    try:
        method = methods.method_of(options["method"]) if options.get("method") else None
    except InvalidSpec as error:
        raise BadOption(str(error)) from error

    count, max_tokens = None, options.get("max_tokens")
    if model := options.get("model"):
        if (encoder := encoder_of(Path(model))) is None:
            raise BadOption(f"{model} has no tokenizer with a chat template that can be used to count tokens")
        count, max_tokens = _counter(method or methods.DEFAULT, encoder, None), max_tokens or _context_of(Path(model))
    against = Path(options["against"]) if options.get("against") else None
    convert, refuses = (method.convert, method.refuses) if method else (methods.convert, None)
    check = Check(CHECKS, convert, refuses, count, max_tokens, against)
    check.read(path)
    return check.report(request.get("name", str(path)))


def encoder_of(tokenizer: Path) -> ChatEncoder | None:
    """The encoder of the model in this directory; None if its tokenizer or chat template cannot be used: the ranks will
    say so in their own words."""
    # Here torch is not there: transformers needs it for models alone, and it costs most of the time of the import.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import AutoTokenizer

    from train.data.chat import ChatEncoder, vocabulary_of
    from weights.checkpoint.errors import CheckpointRefused
    from weights.checkpoint.folder import check_settings

    try:
        check_settings(tokenizer)
        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)
        return ChatEncoder(loaded, vocabulary_of(tokenizer))
    except (OSError, ValueError, UnsupportedModel, CheckpointRefused):
        return None


def _counter(method: Method, encoder: ChatEncoder, cut_at: int | None) -> Count:
    """Counts the tokens of each sequence of each row of a converted record; with a length, after the method's cut."""

    def count(record: Record) -> list[list[int]]:
        rows = method.encode(encoder, record)
        if cut_at is not None:
            for row in rows:
                method.cut(row, cut_at)
        return [[len(tokens) for tokens, _ in row] for row in rows]

    return count


def _context_of(model: Path) -> int | None:
    """Tokens of the model's context, None if its configuration does not say. Raises OSError, ValueError."""
    config = json.loads((model / "config.json").read_bytes())
    text = config.get("text_config") or config
    return text.get("max_position_embeddings") or text.get("n_positions")


if __name__ == "__main__":
    main()
