"""Compares the tokens of two tokenizers, in a process of its own: `python -m train.data.same_tokens STUDENT TEACHER`,
two files tokenizer.json. It prints {"differs"}: in what, in words, "" if every token means the same to both.

To read two of a quarter of a million tokens takes a second, in which the interpreter does nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from runtime.processes.bounds import Bounds

BOUNDS = Bounds(cpu_s=120, memory_bytes=4 << 30)
_SHOWN = 60


def differ_apart(student: Path, teacher: Path) -> str:
    """In what they differ, as above; also why that cannot be said. Blocks until it is done."""
    command = [sys.executable, "-P", "-m", "train.data.same_tokens", student, teacher]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        return str(json.loads(done.stdout)["differs"])
    except ValueError:
        return f"their tokenizers could not be compared with {BOUNDS.how_it_ended(done.returncode)}"


def _differ(student: bytes, teacher: bytes) -> str:
    if student == teacher:
        return ""
    try:
        ours, theirs = _tokens(student), _tokens(teacher)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return "their tokenizers are not the same file, and one of them is not of a form that can be compared"
    for number in sorted(ours.keys() | theirs.keys()):
        if ours.get(number) != theirs.get(number):
            here, there = (repr(t[:_SHOWN]) if (t := one.get(number)) is not None else "none" for one in (ours, theirs))
            return f"it reads tokens, and their tokenizers differ: {number} is {here} to the student and {there} to it"
    return ""


def _tokens(written: bytes) -> dict[int, str]:
    """Tokens by number."""
    made = json.loads(written)
    vocabulary = made["model"].get("vocab") or {}
    if isinstance(vocabulary, list):  # of unigrams, each with its score
        found = {number: str(one[0]) for number, one in enumerate(vocabulary)}
    else:
        found = {int(number): text for text, number in vocabulary.items()}
    return found | {int(one["id"]): str(one["content"]) for one in made.get("added_tokens") or ()}


if __name__ == "__main__":
    BOUNDS.hold()
    try:
        differs = _differ(*(Path(path).read_bytes() for path in sys.argv[1:]))
    except OSError as error:  # without the path, which is the box's
        differs = f"their tokenizers could not be read: {error.strerror}"
    print(json.dumps({"differs": differs}))
