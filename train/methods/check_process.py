"""Runs `train.data.check` in its own process: `python -m train.methods.check_process REQUEST`, the arguments of
`checked` as JSON. With a tokenizer it counts tokens as the ranks will, through the model's chat template; with a
length, those of every example, and cuts each as they will.

JSON parsing blocks all other threads of a process: for most of a second with one 16 MiB example. This process prints
its progress, and at the end the report as JSON, runs at low priority once it has taken seconds, ends with its parent,
and is killed beyond its CPU and memory limits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.processes.bounds import Bounds
from train.data.check import COUNTED_EXAMPLES, Count, DataReport, Heard, check_training_file
from train.data.formats import Record
from train.methods.method import Method
from train.methods.methods import DEFAULT, convert, method_of

if TYPE_CHECKING:
    from train.data.chat import ChatEncoder

# An 8 GiB file of chats takes some minutes of CPU.
BOUNDS = Bounds(cpu_s=3600, memory_bytes=4 << 30)
# From this much processor time on: beside busy ranks, a dozen examples at low priority waited minutes for the
# 2 s that they and the import of the tokenizer's library take.
NICE_AFTER_S, _NICENESS = 5.0, 10
TELL_EVERY_S = 2.0
ANY = "-"


def check_apart(
    path: Path,
    chat_path: Path | None = None,
    method: str = ANY,
    tokenizer: Path | None = None,
    cut_at: int | None = None,
    heard: Heard | None = None,
) -> DataReport:
    """As `check_training_file` with the method's conversion or that of all methods, and counting if there is a
    tokenizer (the directory of a model); with `cut_at`, examples of which the method has nothing left within so many
    tokens are errors too. `heard` is called now and then, in this thread. A file that takes more than the limits is a
    bad one. Raises OSError."""
    request = [str(path), chat_path and str(chat_path), method, tokenizer and str(tokenizer), cut_at]
    command = [sys.executable, "-P", "-m", "train.methods.check_process", json.dumps(request)]
    output = ""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as done:
        for output in done.stdout or ():
            if heard is not None and output.startswith("["):
                heard(*json.loads(output))
    try:
        found = json.loads(output)
        return DataReport(**{**found, "errors": [(line, reason) for line, reason in found["errors"]]})
    except (ValueError, TypeError, KeyError):
        if not path.exists():
            raise FileNotFoundError(f"{path} was deleted while it was checked") from None
        report = DataReport()
        report.add_error(1, f"the file could not be checked with {BOUNDS.how_it_ended(done.returncode)}")
        return report


def main() -> None:
    BOUNDS.hold()
    path, chat_path, method, tokenizer, cut_at = json.loads(sys.argv[1])
    chat, model = (Path(given) if given else None for given in (chat_path, tokenizer))
    print(json.dumps(asdict(checked(Path(path), chat, method, model, cut_at, _Heard()))))


def checked(
    path: Path,
    chat_path: Path | None = None,
    method: str = ANY,
    tokenizer: Path | None = None,
    cut_at: int | None = None,
    heard: Heard | None = None,
) -> DataReport:
    """As `check_apart`, in this process. Raises OSError."""
    how = DEFAULT if method == ANY else method_of(method)
    encoder = encoder_of(tokenizer) if tokenizer else None
    report = check_training_file(
        path,
        chat_path=chat_path,
        convert=convert if method == ANY else how.convert,
        count=counter(how, encoder, cut_at) if encoder else None,
        counted=COUNTED_EXAMPLES if cut_at is None else sys.maxsize,
        heard=heard,
        refuses=None if method == ANY else how.refuses,
    )
    if encoder and encoder.n_without_tools:
        report.warnings.append(
            f"the model's chat template leaves the tools of {encoder.n_without_tools} examples out: neither training "
            "nor an engine shows them to the model"
        )
    return report


class _Heard:
    """Prints how far the check is, at most every TELL_EVERY_S; lowers this process's priority when it takes long."""

    next_s, nice = 0.0, False

    def __call__(self, examples: int, share: float) -> None:
        if not self.nice and time.process_time() >= NICE_AFTER_S:
            self.nice = True
            os.nice(_NICENESS)
        if time.monotonic() >= self.next_s:
            self.next_s = time.monotonic() + TELL_EVERY_S
            print(json.dumps([examples, share]), flush=True)


def encoder_of(tokenizer: Path) -> ChatEncoder | None:
    """The encoder of the model in this directory; None if its tokenizer or chat template cannot be used: the ranks will
    say so in their own words."""
    # Here torch is not there: transformers needs it for models alone, and it costs most of the time of the import.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import AutoTokenizer

    from train.data.chat import ChatEncoder, vocabulary_of
    from train.plan.errors import UnsupportedModel
    from weights.checkpoint.errors import CheckpointRefused
    from weights.checkpoint.folder import check_settings

    try:
        check_settings(tokenizer)
        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)
        return ChatEncoder(loaded, vocabulary_of(tokenizer))
    except (OSError, ValueError, UnsupportedModel, CheckpointRefused):
        return None


def counter(method: Method, encoder: ChatEncoder, cut_at: int | None) -> Count:
    """Counts the tokens of each sequence of each row of a converted record; with a length, after the method's cut."""

    def count(record: Record) -> list[list[int]]:
        rows = method.encode(encoder, record)
        if cut_at is not None:
            for row in rows:
                method.cut(row, cut_at)
        return [[len(tokens) for tokens, _ in row] for row in rows]

    return count


if __name__ == "__main__":
    main()
