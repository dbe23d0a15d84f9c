"""Tries a foreign tokenizer in a process that can be killed.

A tokenizer.json is a program: its normalizer replaces texts by texts, one after the other. Five steps that make a
hundred letters of one take 160 GB for the letter, in an engine that has no limit of its own; its expressions may never
end. The trial has limits of CPU seconds and memory, and reads short texts, every sign of the basic plane, and whatever
the tokenizer itself looks for.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from appliance.models.errors import TokenizerRefused
from runtime.processes.oom import DiesAs, dies_as

CPU_S, WALL_S, MEMORY_BYTES = 60, 600.0, 4 << 30
"""The vocabulary alone may take a second and a gigabyte."""
MOST_GROWTH, _MOST_SOUGHT, _REPEATED = 256, 1024, 8
"""Tokens for one sign: the longest of its forms in Unicode has 18, of four bytes each."""
TEXTS = (
    *("Hello, how can I help?", "word " * 4000, "a" * 2000, "1" * 2000, " " * 2000, "\n" * 500),
    *("{[(!?.,;:'\"-_/)]}" * 50, "a" * 100 + "!", "1" * 100 + "!", " " * 100 + "!"),  # what nearly fits takes longest
)
_DECODED = 4096
_SURROGATES = range(0xD800, 0xE000)


def try_tokenizer(path: Path) -> None:
    """Read some texts by the tokenizer.json at `path` in a child process. One that cannot be loaded is none of its
    business: those who load it say so. Raises TokenizerRefused for one that exceeds the limits."""
    command = [sys.executable, "-P", "-m", "appliance.models.tokenizer_trial", str(path)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    limits = f"{CPU_S} s of CPU or {MEMORY_BYTES >> 30} GiB of memory"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=WALL_S
        )
        refused = json.loads(done.stdout.splitlines()[-1])["refused"]
    except subprocess.TimeoutExpired as error:
        raise TokenizerRefused(path.name, f"reading short texts took more than {WALL_S:.0f} s") from error
    except (IndexError, ValueError) as error:
        raise TokenizerRefused(
            path.name, f"reading short texts took more than {limits}, or ended its process"
        ) from error
    if refused:
        raise TokenizerRefused(path.name, refused)


def _tried(path: str) -> str:
    """Why the tokenizer is refused; "" if it is not."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001 - the library raises it bare
        print(f"not tried: {error}", file=sys.stderr)
        return ""
    tokenizer.no_truncation()
    tokenizer.no_padding()  # as who loads it does
    try:
        for text in (*TEXTS, *_basic_plane(), *_sought(tokenizer)):
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            if len(tokens) > MOST_GROWTH * max(1, len(text)):
                return f"makes {len(tokens)} tokens of {len(text)} characters"
        for tokens, size in _vocabulary(tokenizer):
            if len(made := tokenizer.decode(tokens)) > MOST_GROWTH * size:
                return f"makes {len(made)} characters of tokens of {size}"
    except BaseException as error:  # noqa: BLE001 - what Rust panics with is no Exception
        return f"cannot read a short text: {type(error).__name__}: {str(error)[:200]}"
    return ""


def _vocabulary(tokenizer: Any) -> Iterator[tuple[list[int], int]]:
    """All tokens, some thousand at a time, and the characters of their names; a decoder may add one to each."""
    for some in _batched(tokenizer.get_vocab().items(), _DECODED):
        yield [token for _, token in some], sum(1 + len(name) for name, _ in some)


def _batched(found: Iterable[tuple[str, int]], most: int) -> Iterator[list[tuple[str, int]]]:
    left = iter(found)
    while some := list(islice(left, most)):
        yield some


def _basic_plane() -> Iterator[str]:
    """All its signs but surrogates, a few thousand in each text."""
    for start in range(0, 0x10000, 0x1000):
        yield "".join(chr(sign) for sign in range(start, start + 0x1000) if sign not in _SURROGATES)


def _sought(tokenizer: Any) -> Iterator[str]:
    """What the tokenizer's own steps look for: of expressions their text, which a plain one fits."""
    found: dict[str, None] = {}
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder):
        if part is not None:
            left = [json.loads(part.__getstate__())]
            while left and len(found) < _MOST_SOUGHT:
                here = left.pop()
                if isinstance(here, dict):
                    found |= {text: None for key in ("String", "Regex") if isinstance(text := here.get(key), str)}
                    left += here.values()
                elif isinstance(here, list):
                    left += here
    for text in found:
        yield text[:1000] * _REPEATED


def main() -> None:
    dies_as(DiesAs.TRIAL)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"refused": _tried(sys.argv[1])}))


if __name__ == "__main__":
    main()
