"""Gives tensors of safetensors files other names."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from weights.format.layout import FileLayout, Layout
from weights.format.names import INDEX_SUFFIX


def rename_tensors(directory: Path, names: Mapping[str, str]) -> None:
    """Renames tensors of the checkpoint in `directory`, in its files and in its index. The data stays as it is."""
    for file in Layout.read(directory).files:
        if any(placed.spec.name in names for placed in file.tensors):
            _rewrite(directory / file.name, file, names)
    for index in directory.glob(f"*{INDEX_SUFFIX}"):
        body = json.loads(index.read_bytes())
        body["weight_map"] = {names.get(name, name): file for name, file in body["weight_map"].items()}
        index.write_text(json.dumps(body, indent=1))


def _rewrite(path: Path, layout: FileLayout, names: Mapping[str, str]) -> None:
    renamed = path.with_name(path.name + ".renamed")
    specs = [replace(placed.spec, name=names.get(placed.spec.name, placed.spec.name)) for placed in layout.tensors]
    with path.open("rb") as old, os.fdopen(os.open(renamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
        new.write(FileLayout.of(layout.name, specs).header)
        old.seek(len(layout.header))
        shutil.copyfileobj(old, new, 32 << 20)
    os.replace(renamed, path)
