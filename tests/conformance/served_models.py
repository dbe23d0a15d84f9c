"""Puts models on a running box under the names in openai-python's own tests of inference. They are small, with random
weights, and imported by the command like any model, so that real engines answer.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.engine_support import edit_config, save_model

GENERATE = ("gpt-6-astra", "gpt-3.5-turbo-instruct")
EMBED = ("text-embedding-3-small",)


@contextlib.contextmanager
def served_models(data_dir: Path) -> Iterator[None]:
    """Import and serve all models; delete them afterwards."""
    names = []
    try:
        with tempfile.TemporaryDirectory(prefix="conformance-models-") as folder:
            for name in (*GENERATE, *EMBED):
                print(f"importing {name}", flush=True)
                checkpoint = save_model(Path(folder) / name, "qwen2", seed=0)
                if name in EMBED:
                    edit_config(checkpoint, architectures=["Qwen2Model"])
                _appliance(data_dir, "model", "import", str(checkpoint), "--name", name)
                names.append(name)
        yield
    finally:
        for name in names:
            _appliance(data_dir, "model", "rm", name)


def _appliance(data_dir: Path, *arguments: str) -> None:
    command = str(Path(sys.executable).with_name("appliance"))
    environment = {**os.environ, "APPLIANCE_DATA_DIR": str(data_dir)}
    done = subprocess.run([command, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"appliance {' '.join(arguments)} failed: {done.stdout}{done.stderr}")
