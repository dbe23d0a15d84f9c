"""Packs pieces of a version into objects, each with one codec and one element width.

An object is up to 32 MiB of pieces, encoded by `weights.tiers.codec` and named by the checksum of its stored bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from blake3 import blake3

from weights.format.checksums import Running
from weights.tiers import codec
from weights.tiers.codec import Codec
from weights.tiers.record import Part

OBJECT_BYTES = 32 << 20


class Packer:
    """Fills objects with pieces of one codec and element width, and stores each object when it is full."""

    def __init__(self, level: int, store: Callable[[str, bytes], None], pieces: dict[str, tuple[Part, ...]]) -> None:
        self.sizes: dict[str, int] = {}
        self._level, self._store, self._pieces = level, store, pieces
        self._kind: tuple[Codec, int] | None = None
        self._filled = bytearray()
        self._open: list[tuple[str, int, int]] = []

    def add(self, piece: str, width: int, chunks: Iterator[bytes] | list[bytes], chosen: Codec = "zstd") -> None:
        if self._kind != (chosen, width):
            self.flush()
            self._kind = chosen, width
        self._pieces[piece] = ()
        for chunk in chunks:
            view = memoryview(chunk)
            while view:
                room = OBJECT_BYTES - len(self._filled)
                self._open.append((piece, len(self._filled), min(room, len(view))))
                self._filled += view[:room]
                view = view[room:]
                if len(self._filled) == OBJECT_BYTES:
                    self.flush()

    def add_lossy(self, piece: str, data: bytes, chosen: Codec) -> str:
        """Stores a quantised tensor in separate objects; returns the checksum of its decoded bytes."""
        self.flush()
        self._pieces[piece], running = (), Running()
        for start in range(0, len(data), OBJECT_BYTES):
            self._kind, self._filled = (chosen, 4), bytearray(data[start : start + OBJECT_BYTES])
            self._open = [(piece, 0, len(self._filled))]
            running.update(codec.decode(self.flush(), name=piece))
        return running.text()

    def flush(self) -> bytes:
        if not self._filled:
            return b""
        assert self._kind is not None
        chosen, width = self._kind
        blob = codec.encode(self._filled, codec=chosen, width=width, level=self._level)
        key = blake3(blob).hexdigest()
        self._store(key, blob)
        self.sizes[key] = len(blob)
        for piece, offset, nbytes in self._open:
            parts = self._pieces[piece]
            if parts and parts[-1].object == key and parts[-1].offset + parts[-1].nbytes == offset:
                parts = (*parts[:-1], parts[-1]._replace(nbytes=parts[-1].nbytes + nbytes))
            else:
                parts = (*parts, Part(key, offset, nbytes))
            self._pieces[piece] = parts
        self._filled, self._open = bytearray(), []
        return blob
