"""Gives tensors of a safetensors file other names, in place where the new header is no longer than the old one."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from weights.format.header import LENGTH_BYTES
from weights.format.layout import Layout
from weights.format.names import INDEX_SUFFIX

_ALIGN_BYTES = 64


def rename_tensors(directory: Path, names: Mapping[str, str]) -> None:
    """Renames tensors of the checkpoint in `directory`, in its files and in its index. The data stays as it is."""
    for file in Layout.read(directory).files:
        if any(placed.spec.name in names for placed in file.tensors):
            _rewrite(directory / file.name, file.header, names)
    for index in directory.glob(f"*{INDEX_SUFFIX}"):
        body = json.loads(index.read_bytes())
        body["weight_map"] = {names.get(name, name): file for name, file in body["weight_map"].items()}
        index.write_text(json.dumps(body, indent=1))


def _rewrite(path: Path, header: bytes, names: Mapping[str, str]) -> None:
    body = {names.get(name, name): entry for name, entry in json.loads(header[LENGTH_BYTES:]).items()}
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    if LENGTH_BYTES + len(text) <= len(header):
        with path.open("r+b") as file:
            file.seek(LENGTH_BYTES)
            file.write(text.ljust(len(header) - LENGTH_BYTES, b" "))
        return
    padded = -(-(LENGTH_BYTES + len(text)) // _ALIGN_BYTES) * _ALIGN_BYTES - LENGTH_BYTES
    longer = path.with_name(path.name + ".renamed")
    with path.open("rb") as old, os.fdopen(os.open(longer, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
        new.write(struct.pack("<Q", padded) + text.ljust(padded, b" "))
        new.flush()
        at, end = len(header), os.fstat(old.fileno()).st_size
        while at < end:
            at += os.sendfile(new.fileno(), old.fileno(), at, end - at)
    os.replace(longer, path)
