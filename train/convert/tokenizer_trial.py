"""Reads short texts by a foreign tokenizer, in this process: `python -m train.convert.tokenizer_trial PATH`.

A tokenizer.json is a program: its normalizer replaces texts by texts, one after the other. Five steps that make a
hundred letters of one take 160 GB for the letter, in an engine that has no limit of its own; its expressions may never
end. So do a tokenizer.model's replacements, and the expressions that transformers puts before other vocabularies. This
process has limits of CPU seconds and memory, and reads short texts, every sign of the basic plane, and whatever the
tokenizer itself looks for. Who started it learns from its last line, or from its end, what came of it
(`appliance.models.folder_trial`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from runtime.processes.bounds import Bounds

CPU_S, MEMORY_BYTES = 60, 4 << 30
"""The vocabulary alone may take a second and a gigabyte."""
MOST_GROWTH, _MOST_SOUGHT, _REPEATED = 256, 1024, 8
"""Tokens for one sign: the longest of its forms in Unicode has 18, of four bytes each."""
TEXTS = (
    *("Hello, how can I help?", "word " * 4000, "a" * 2000, "1" * 2000, " " * 2000, "\n" * 500),
    *("{[(!?.,;:'\"-_/)]}" * 50, "a" * 100 + "!", "1" * 100 + "!", " " * 100 + "!"),  # what nearly fits takes longest
)
_DECODED = 4096
_SURROGATES = range(0xD800, 0xE000)


def tried_file(path: str) -> str:
    """Why the tokenizer.json at `path` is refused; "" if it is not. One that cannot be loaded is none of a trial's
    business: those who load it say so."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001 - the library raises it bare
        print(f"not tried: {error}", file=sys.stderr)
        return ""
    return _tried(tokenizer, fast=True)


def tried_folder(path: str) -> str:
    """As `tried_file`, of the tokenizer that transformers makes of all files in the directory `path`, such as
    tokenizer.model, or vocab.json with merges.txt. One that cannot be loaded is refused unless there is a
    tokenizer.json: nobody could say what it does where it can."""
    # Here torch is not there: transformers needs it for models alone, and it costs most of the time of the import.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - each of its tokenizers has errors of its own
        if Path(path, "tokenizer.json").is_file():
            print(f"not tried: {error}", file=sys.stderr)
            return ""
        said = str(error).replace(f"{path}/", "")  # a folder of the import that nobody knows
        return f"cannot be loaded: {type(error).__name__}: {said[:300]}"
    fast = getattr(loaded, "backend_tokenizer", None)
    return _tried(loaded if fast is None else fast, fast=fast is not None)


def _tried(tokenizer: Any, *, fast: bool) -> str:
    """tokenizer: fast, a `tokenizers.Tokenizer`, or else one of transformers' that has none within."""
    if fast:
        tokenizer.no_truncation()
        tokenizer.no_padding()  # as who loads it does
    try:
        for text in (*TEXTS, *_basic_plane(), *(_sought(tokenizer) if fast else ())):
            encoded = tokenizer.encode(text, add_special_tokens=False)
            tokens = encoded.ids if fast else encoded
            if len(tokens) > MOST_GROWTH * max(1, len(text)):
                return f"makes {len(tokens)} tokens of {len(text)} characters"
        for tokens, size in _vocabulary(tokenizer):
            if len(made := tokenizer.decode(tokens)) > MOST_GROWTH * size:
                return f"makes {len(made)} characters of tokens of {size}"
    except BaseException as error:  # noqa: BLE001 - each tokenizer has errors of its own; Rust's panic is no Exception
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
    """All its characters except surrogates, a few thousand in each text."""
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


def main(path: str) -> None:
    Bounds(CPU_S, MEMORY_BYTES).hold()
    print(json.dumps({"refused": tried_folder(path) if Path(path).is_dir() else tried_file(path)}))


if __name__ == "__main__":
    main(sys.argv[1])
