"""Reads data files and compares tokenizers in a process of its own: `python -m train.data_checks.process REQUEST`.

A request is a function's name (see below) and arguments as JSON. The process prints the result, or {"error": text, ...}
with exit code 2. It ends with its parent, and is killed if it exceeds its CPU or memory limit: the file may be hostile,
and parsing JSON blocks all other threads of a process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.processes.kernel import Bounds, how_it_ended, run_command
from train.data.records import Record
from train.data.token_set import TokenWriter
from train.data_checks.check import COUNTED_EXAMPLES, Count, DataReport, check_training_file, report_findings
from train.methods import methods
from train.methods.method import Method
from train.plan.errors import UnsupportedModel
from weights.format.foreign_json import size, text_part

if TYPE_CHECKING:
    from train.data.chat import ChatEncoder

# An 8 GiB file of chats takes some minutes of CPU to read, and hours to tokenise.
BOUNDS = Bounds(cpu_s=4 * 3600, memory_bytes=6 << 30)
# A check lowers its priority after this much CPU time. At low priority next to busy ranks, even a dozen examples would
# wait minutes for 2 s of CPU, which include the import of the tokenizer's library.
NICE_AFTER_S, _NICENESS = 5.0, 10


class CheckFailed(Exception):
    """A check did not finish; the message says why."""


async def report_apart(path: Path, name: str, **options: Any) -> dict[str, Any]:
    """Run `report_on` in a process that ends when this call is cancelled. Raises CheckFailed, UnsupportedModel."""
    try:
        report: dict[str, Any] = await _apart("report_on", path, name=name, **options)
        return report
    except OSError as error:
        raise CheckFailed(str(error)) from error


async def check_apart(path: Path, **how: Any) -> DataReport:
    """Run `checked` in a process that ends when this call is cancelled. The report of a file beyond the limits has an
    error. Raises OSError."""
    try:
        answer = await _apart("checked", path, **how)
        return DataReport(**{**answer, "errors": [(line, reason) for line, reason in answer["errors"]]})
    except (CheckFailed, UnsupportedModel) as error:
        report = DataReport()
        report.add_error(1, f"the file could not be checked: {error}")
        return report


async def _apart(function: str, path: Path, **arguments: Any) -> Any:
    """Call a function below in a child process. Raises CheckFailed, OSError, UnsupportedModel."""
    request = json.dumps([function, {"path": path, **arguments}], default=str)
    status, out, err = await run_command(sys.executable, "-P", "-m", "train.data_checks.process", request)
    try:
        answer = json.loads(out)
    except ValueError:
        last_line = err.decode(errors="replace").strip().rpartition("\n")[2][:300]
        limits = f"{BOUNDS.cpu_s} s of CPU and {BOUNDS.memory_bytes >> 30} GiB of memory"
        raise CheckFailed(f"its process has {limits}; it {how_it_ended(status)}: {last_line}") from None
    if "error" not in answer:
        return answer
    if number := answer["errno"]:  # the file is gone, or the disk is full
        raise OSError(number, answer["error"])
    raise (UnsupportedModel if answer["unsupported"] else CheckFailed)(answer["error"])


def main() -> None:
    BOUNDS.hold()
    function, arguments = json.loads(sys.argv[1])
    signal.signal(signal.SIGPROF, lambda *_: os.setpriority(os.PRIO_PROCESS, 0, max(_NICENESS, os.nice(0))))
    signal.setitimer(signal.ITIMER_PROF, NICE_AFTER_S)
    try:
        answer = asdict(checked(**arguments)) if function == "checked" else report_on(**arguments)
    except (OSError, ValueError, UnsupportedModel) as error:
        unsupported = isinstance(error, UnsupportedModel)
        print(json.dumps({"error": str(error), "errno": getattr(error, "errno", None), "unsupported": unsupported}))
        sys.exit(2)
    print(json.dumps(answer, ensure_ascii=False))


def checked(
    path: str | Path,
    chat_path: str | Path | None = None,
    method: str | None = None,
    tokenizer: str | Path | None = None,
    cut_at: int | None = None,
) -> DataReport:
    """Run `check_training_file` with the tokenizer of the model directory `tokenizer`. With a method and `chat_path`,
    write all tokens next to `chat_path` for ranks (train.data.token_set). Raises OSError, UnsupportedModel.

    cut_at: the number of tokens to which examples are cut; the method must be able to train on the remainder."""
    chosen = methods.method_of(method) if method else methods.DEFAULT
    encoder = encoder_of(Path(tokenizer)) if tokenizer else None
    writer = TokenWriter(Path(chat_path)) if encoder and chat_path and method else None
    with writer or nullcontext():
        report = check_training_file(
            path,
            chat_path=chat_path,
            count=_counter(chosen, encoder, cut_at, writer) if encoder else None,
            counted=COUNTED_EXAMPLES if cut_at is None and writer is None else sys.maxsize,
            refuses=chosen.refuses if method else None,
        )
        if writer and report.ok:
            writer.finish(encoder, Path(tokenizer))
    if encoder and encoder.n_without_tools:
        report.warnings.append(
            f"the model's chat template leaves out the tools of {encoder.n_without_tools} examples: the model sees "
            "them neither in training nor in an engine"
        )
    return report


def report_on(
    path: str | Path,
    name: str,
    model: str | Path | None = None,
    max_tokens: int | None = None,
    method: str | None = None,
    against: str | Path | None = None,
) -> dict[str, Any]:
    """Report on a file (train.data_checks.check). Raises OSError, ValueError, InvalidSpec, UnsupportedModel.

    Args:
        name: the file's name in the report.
        model: the directory of a model, whose tokenizer counts tokens.
        max_tokens: the limit for an example; None: the context in the model's config.json.
        method: the name of the method to train with.
        against: the validation file.
    """
    chosen = methods.method_of(method) if method else methods.DEFAULT
    count = None
    if model:
        encoder = encoder_of(Path(model))
        config = text_part(json.loads((Path(model) / "config.json").read_bytes()))
        max_tokens = max_tokens or size(config, "max_position_embeddings", "n_positions") or None
        count = _counter(chosen, encoder)
    against = Path(against) if against else None
    return report_findings(Path(path), name, chosen.refuses if method else None, count, max_tokens, against)


def encoder_of(tokenizer: Path) -> ChatEncoder:
    """Return the encoder of the model in this directory. Raises UnsupportedModel."""
    # Without torch, whose import takes most of the time: transformers needs torch only for models.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import AutoTokenizer

    from train.data.chat import ChatEncoder, vocabulary_of

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)
        return ChatEncoder(loaded, vocabulary_of(tokenizer))
    except (OSError, ValueError) as error:
        raise UnsupportedModel("the model has no tokenizer that can be used") from error


def _counter(
    method: Method, encoder: ChatEncoder, cut_at: int | None = None, writer: TokenWriter | None = None
) -> Count:
    """Return a function that counts the tokens of each sequence of each row of a converted record, and writes the
    tokens. cut_at: as in `checked`."""

    def count(record: Record) -> list[list[int]]:
        rows = method.encode(encoder, record)
        if cut_at is not None:
            for row in rows:
                method.check_cut(row, cut_at)
        if writer is not None:
            writer.add(record, rows)
        return [[len(tokens) for tokens, _ in row] for row in rows]

    return count


# -- two tokenizers ----------------------------------------------------------------------------------------------------


def differ(student: Path, teacher: Path) -> str:
    """Return how two tokenizer.json files differ, or why they cannot be compared; "" if they have the same tokens. May
    take half a second."""
    try:
        written = student.read_bytes(), teacher.read_bytes()
        ours, theirs = map(_vocabulary, written) if written[0] != written[1] else ({}, {})
    except OSError as error:  # so that the error does not contain a path of the box
        return f"their tokenizers could not be read: {error.strerror}"
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return "their tokenizers are different files, and one of them has a form that cannot be compared"
    number = min((n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)), default=None)
    if number is None:
        return ""
    here, there = (repr(texts[number][:60]) if number in texts else "none" for texts in (ours, theirs))
    return f"it reads tokens, and their tokenizers differ: {number} is {here} to the student and {there} to it"


def _vocabulary(written: bytes) -> dict[int, str]:
    """Return {id: token}."""
    tokenizer = json.loads(written)
    vocabulary = tokenizer["model"].get("vocab") or {}
    if isinstance(vocabulary, list):  # a list of unigrams, each with its score
        vocabulary = {token[0]: number for number, token in enumerate(vocabulary)}
    vocabulary = vocabulary | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    return {int(number): str(text) for text, number in vocabulary.items()}


if __name__ == "__main__":
    main()
