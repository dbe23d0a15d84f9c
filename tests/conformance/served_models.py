"""Models on a running box under the names that openai-python's own tests of inference call.

They are small ones of random weights, imported with the command as any model is, so that real engines answer.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from tests.e2e.engine_support import VOCABULARY, save_tokenizer

GENERATE = ("gpt-6-astra", "gpt-3.5-turbo-instruct")
EMBED = ("text-embedding-3-small",)


@contextlib.contextmanager
def served_models(data_dir: Path) -> Iterator[None]:
    """All of them can be called; they are deleted afterwards."""
    names = []
    try:
        with tempfile.TemporaryDirectory(prefix="conformance-models-") as folder:
            for name in (*GENERATE, *EMBED):
                print(f"importing {name}", flush=True)
                checkpoint = _save(Path(folder) / name, Qwen2Model if name in EMBED else Qwen2ForCausalLM)
                _appliance(data_dir, "model", "import", str(checkpoint), "--name", name)
                names.append(name)
        yield
    finally:
        for name in names:
            _appliance(data_dir, "model", "rm", name)


def _save(path: Path, architecture: type) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    architecture(config).to(torch.bfloat16).save_pretrained(path)
    save_tokenizer(path)
    return path


def _appliance(data_dir: Path, *arguments: str) -> None:
    command = str(Path(sys.executable).with_name("appliance"))
    environment = {**os.environ, "APPLIANCE_DATA_DIR": str(data_dir)}
    done = subprocess.run([command, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"appliance {' '.join(arguments)} failed: {done.stdout}{done.stderr}")
