"""`appliance model export`: takes a model's files home."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

from appliance.cli import output
from appliance.cli.command import Session, command
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.options import opt
from appliance.cli.resources import MODEL, segment
from weights.format.errors import IntegrityError
from weights.format.manifest import Manifest
from weights.format.names import MANIFEST_FILE

CHUNK_BYTES = 1 << 20
ADAPTER_FILE = "adapter_config.json"


@command(
    "model export",
    MODEL,
    opt("--to DIR", "A new directory.", type=Path, required=True),
    opt(
        "--format FORMAT",
        "safetensors: the files as they are, of an adapter the adapter. merged: an adapter added to its base.",
        choices=("safetensors", "merged"),
        default="safetensors",
    ),
)
def export(session: Session, args: Namespace) -> None:
    """Download a model in the layout of Hugging Face, each file compared with its checksum.

    transformers, peft and vLLM load the directory as it is. `NAME@VERSION` and a checkpoint's name mean that version.
    A connection that breaks is resumed.

    Examples:
      appliance model export ft:smollm2-135m:local:sums:a1b2c3d4 --to ./sums
      appliance model export ft:smollm2-135m:local:sums:a1b2c3d4 --to ./sums --format merged
    """
    target = args.to.expanduser()
    if target.exists():
        raise BadUsage(f"{target} exists; name a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        made = Path(folder, "model")
        _download(session, args.id, made)
        if args.format == "merged" and (made / ADAPTER_FILE).exists():
            base = json.loads((made / ADAPTER_FILE).read_text())["base_model_name_or_path"]
            _download(session, base, Path(folder, "base"))
            output.say(f"adding the adapter to {base} ...")
            _merge(Path(folder, "base"), made, Path(folder, "merged"))
            made = Path(folder, "merged")
        made.rename(target)
    nbytes = sum(path.stat().st_size for path in target.iterdir())
    files = sorted(path.name for path in target.iterdir())
    session.show({"to": str(target), "files": files, "bytes": nbytes}, lambda _: f"{target}: {output.size(nbytes)}")


class _Body(io.RawIOBase):
    """The parts of a download as a stream for tarfile. Counts its bytes."""

    def __init__(self, parts: Iterator[bytes]):
        self._parts, self._rest, self.count = parts, memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._parts, b""))
        taken = min(len(buffer), len(self._rest))
        buffer[:taken], self._rest = self._rest[:taken], self._rest[taken:]
        self.count += taken
        return taken


def _download(session: Session, model: str, folder: Path) -> None:
    """Write the files of a model into the new `folder`. Raises CommandFailed for one that differs from its checksum."""
    folder.mkdir()
    body = _Body(session.client.parts(f"/v1/models/{segment(model)}/archive"))
    manifest: Manifest | None = None
    with (
        output.progress(f"downloading {model}") as told,
        tarfile.open(fileobj=io.BufferedReader(body), mode="r|") as tar,
    ):
        for entry in tar:
            content = tar.extractfile(entry)
            if (
                content is None
                or entry.name != Path(entry.name).name
                or (manifest is None) != (entry.name == MANIFEST_FILE)
            ):
                raise CommandFailed(f"the archive has {entry.name!r}, which is no file of a model")
            if manifest is None:
                manifest = _manifest(content.read(), model)
                continue
            digest = blake3()
            with open(folder / entry.name, "xb") as out:
                while data := content.read(CHUNK_BYTES):
                    digest.update(data)
                    out.write(data)
                    told(f"downloading {model}", body.count, manifest.nbytes)
            expected = manifest.files[entry.name].checksum
            if expected not in (None, f"blake3:{digest.hexdigest()}"):
                raise CommandFailed(f"{entry.name} was damaged on the way: its checksum differs; run the command again")
    if manifest is None or {path.name for path in folder.iterdir()} != set(manifest.files):
        raise CommandFailed("the archive ended early; run the command again")


def _manifest(raw: bytes, model: str) -> Manifest:
    try:
        return Manifest.from_bytes(raw, path=model)
    except IntegrityError as error:
        raise CommandFailed(f"the archive's manifest is damaged: {error}") from error


def _merge(base: Path, adapter: Path, target: Path) -> None:
    """Write `base` with the LoRA adapter added to its weights, computed in float32, and the adapter's own tokenizer."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    dtype = AutoModelForCausalLM.from_pretrained(base, dtype="auto").dtype
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().to(dtype).save_pretrained(target)
    for folder in (base, adapter):
        for path in folder.iterdir():
            weights = path.suffix == ".safetensors" or path.name.endswith(".index.json")
            if not weights and path.name not in ("config.json", ADAPTER_FILE, "README.md"):
                shutil.copyfile(path, target / path.name)
