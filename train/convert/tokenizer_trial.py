"""Reads short texts by a foreign tokenizer, in this process: `python -m train.convert.tokenizer_trial PATH`.

A tokenizer.json is a program: its normalizer replaces texts by texts, one after the other, and its expressions may
never end; so do other vocabularies' expressions. Engines have no limit of their own; this process has one of CPU
seconds and memory. Who started it learns from its last line, or from its end, what came of it
(`appliance.models.trial`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from runtime.processes.bounds import Bounds

CPU_S, MEMORY_BYTES = 60, 4 << 30
"""The vocabulary alone may take a second and a gigabyte."""
TEXTS = (
    *("Hello, how can I help?", "word " * 4000, "a" * 2000, "1" * 2000, " " * 2000, "\n" * 500),
    *("{[(!?.,;:'\"-_/)]}" * 50, "a" * 100 + "!", "1" * 100 + "!", " " * 100 + "!"),  # what nearly fits takes longest
)


def loaded_file(path: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()  # as who loads it does
    return tokenizer


def loaded_folder(path: str) -> Any:
    """The tokenizer that transformers makes of all files in the directory `path`, such as tokenizer.model, or
    vocab.json with merges.txt."""
    # Here torch is not there: transformers needs it for models alone, and it costs most of the time of the import.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def tried(path: str) -> str:
    """Why the tokenizer at `path` is refused; "" if it is not. One that cannot be loaded is refused unless there is a
    tokenizer.json, whose readers say so: nobody could say what it does where it can."""
    folder = Path(path).is_dir()
    try:
        tokenizer = loaded_folder(path) if folder else loaded_file(path)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - each tokenizer has errors of its own, and the library raises it bare
        if not folder or Path(path, "tokenizer.json").is_file():
            print(f"not tried: {error}", file=sys.stderr)
            return ""
        said = str(error).replace(f"{path}/", "")  # a folder of the import that nobody knows
        return f"cannot be loaded: {type(error).__name__}: {said[:300]}"
    try:
        for text in TEXTS:
            tokenizer.encode(text, add_special_tokens=False)
        tokenizer.decode(list(tokenizer.get_vocab().values()))
    except BaseException as error:  # noqa: BLE001 - as above; Rust's panic is no Exception
        return f"cannot read a short text: {type(error).__name__}: {str(error)[:200]}"
    return ""


def main(path: str) -> None:
    Bounds(CPU_S, MEMORY_BYTES).hold()
    print(json.dumps({"refused": tried(path)}))


if __name__ == "__main__":
    main(sys.argv[1])
