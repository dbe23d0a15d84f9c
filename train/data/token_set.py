"""Stores the training set as tokens on disk: the check of a job's data writes them, every rank maps them, and resumes
reuse them.

A record of the file gives one row or several (train.data.chat), each an example of the set: one sequence of tokens, or
as many as the training method needs, which stay together. A set is a directory `<run_dir>/tokens/<key>/` with
tokens (int32) and learnt (bool), both raw, offsets.npy (int64, sequences + 1) and facts.json. The key covers the file
and the tokenizer. Sequences are whole: they are cut to max_length, and documents into pieces, as they are opened.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import orjson

from train.data.chat import ChatEncoder, Tokens
from train.data.packing import Row, build_row, plan_packs
from train.data.records import BadRecord, Record
from train.plan.errors import InvalidTrainingData
from weights.format.names import TOKENIZER_FILES

_RENDERED_BY = (*TOKENIZER_FILES, "tokenizer_config.json", "special_tokens_map.json")
_POLL_S = 0.2  # between two looks for a set that another rank writes
FORMAT = 8


class Rows(Protocol):
    """What a training method makes of a record (train.methods.method)."""

    sequences: int

    @property
    def rolls_out(self) -> bool: ...
    def encode(self, encoder: ChatEncoder, record: Record) -> Sequence[Sequence[Tokens]]: ...


def set_of(path: Path, base_path: Path) -> str:
    """The key of the set of a file's tokens by the tokenizer in `base_path`. A job's file never changes: it is made of
    the same upload whenever it is made, and is copied to other nodes with its tokens."""
    digest = hashlib.sha256(f"{FORMAT}:{path.name}:{path.stat().st_size}".encode())
    for name in _RENDERED_BY:
        if (file := base_path / name).exists():
            digest.update(name.encode() + file.read_bytes())
    return digest.hexdigest()[:24]


class TokenWriter:
    """Writes a set, record by record, in a `with`: what is not finished within it is removed, after a crash by the next
    writer of the file."""

    def __init__(self, path: Path, cache_dir: Path):
        self._path, self._folder = path, cache_dir / f"{path.name}.partial"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._files = [open(self._folder / name, "wb") for name in ("tokens", "learnt")]
        self._lengths = [0]
        self._n_records, self._documents, self._digest = 0, False, hashlib.sha256()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, record: Record, rows: Sequence[Sequence[Tokens]]) -> None:
        self._n_records += 1
        self._documents = "text" in record
        for ids, learnt in (sequence for row in rows for sequence in row):
            self._lengths.append(len(ids))
            for file, part in zip(self._files, (ids.astype(np.int32), learnt.astype(bool)), strict=True):
                file.write(part.tobytes())
                self._digest.update(part.tobytes())

    def finish(self, encoder: ChatEncoder, base_path: Path) -> None:
        """Put the set of the file, which is complete now, where `open_token_set` looks for it."""
        directory = self._folder.parent / set_of(self._path, base_path)
        for file in self._files:
            file.close()
        offsets = np.cumsum(np.array(self._lengths, np.int64))
        self._digest.update(offsets.tobytes())
        np.save(self._folder / "offsets.npy", offsets)
        tokenizer = encoder.tokenizer
        facts = {
            "pad_id": (tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id) or 0,
            "n_records": self._n_records,
            "documents": self._documents,
            "digest": self._digest.hexdigest(),
        }
        (self._folder / "facts.json").write_bytes(orjson.dumps(facts))
        shutil.rmtree(directory, ignore_errors=True)
        os.rename(self._folder, directory)


class TokenSet:
    """Examples as tokens, grouped into packs. Read-only, shared through the page cache by all ranks of a node.

    Sequences longer than `max_length` tokens are cut; examples with nothing to learn left are dropped, and prompts that
    would be cut. packs: indices of the examples of each. reference: (examples, sequences) float32, what the starting
    model says of them, once it is known (train.trainer.train). digest: of all tokens and of which are learnt.
    Raises InvalidTrainingData where nothing is left.
    """

    def __init__(self, directory: Path, method: Rows, *, max_length: int, packing: bool, name: str):
        self.directory = directory
        facts = orjson.loads((directory / "facts.json").read_bytes())
        self._pad_id, self.n_records, self.digest = facts["pad_id"], facts["n_records"], str(facts["digest"])
        offsets = np.load(directory / "offsets.npy")
        if not offsets[-1]:
            raise InvalidTrainingData(name, [(1, "the file has no examples")], 1)
        self._tokens = np.memmap(directory / "tokens", np.int32, "r")
        self._learnt = np.memmap(directory / "learnt", bool, "r")
        self.sequences, self.capacity = method.sequences, method.sequences * max_length
        self._packing = packing
        self.reference: np.ndarray | None = None
        whole = np.stack([offsets[:-1], offsets[1:]], axis=1)
        self._edges = _pieces(whole, max_length) if facts["documents"] else whole.reshape(-1, self.sequences, 2).copy()
        long = (np.diff(self._edges).reshape(-1, self.sequences) > max_length).any(axis=1)
        self._edges[:, :, 1] = np.minimum(self._edges[:, :, 1], self._edges[:, :, 0] + max_length)
        labels = self._labels_of_sequences()
        kept = ~long if method.rolls_out else labels.all(axis=1)
        self.n_truncated, self.n_dropped = int(long.sum()), int((~kept).sum())
        self._edges, labels = self._edges[kept], labels[kept].sum(axis=1)
        lengths = self._lengths = np.diff(self._edges).sum(axis=(1, 2))
        self.packs = plan_packs(lengths, self.capacity, packing=packing)
        if not self.packs:
            why = f"no example has anything to learn within max_length {max_length}"
            raise InvalidTrainingData(name, [(1, why)], 1)
        self._labels = np.array([labels[pack].sum() for pack in self.packs], np.int64)

    @property
    def n_examples(self) -> int:
        return len(self._edges)

    @property
    def n_tokens(self) -> int:
        return int(self._lengths.sum())

    def labels_in(self, packs: np.ndarray) -> int:
        """Number of learnt tokens in these packs: the denominator of a step's loss, known to every rank."""
        return int(self._labels[packs].sum())

    def examples_in(self, packs: np.ndarray) -> int:
        """Number of examples in these packs."""
        return sum(len(self.packs[pack]) for pack in packs)

    def tokens_in(self, packs: np.ndarray) -> int:
        """Number of tokens in these packs, padding not counted."""
        return sum(int(self._lengths[self.packs[pack]].sum()) for pack in packs)

    def tokens_of(self, index: int) -> np.ndarray:
        """The tokens of an example of one sequence, (n,) int32."""
        ((ids, _),) = self._example(index)
        return np.asarray(ids)

    def row(self, packs: np.ndarray) -> Row:
        """One micro-batch of these packs."""
        examples = [[part for index in self.packs[pack] for part in self._example(index)] for pack in packs]
        row = build_row(examples, self.capacity, self._pad_id, packing=self._packing)
        if self.reference is None:
            return row
        members = np.concatenate([self.packs[pack] for pack in packs])
        return replace(row, reference=self.reference[members].reshape(-1))

    def _example(self, index: int) -> list[Tokens]:
        return [(self._tokens[begin:end], self._learnt[begin:end]) for begin, end in self._edges[index]]

    def _labels_of_sequences(self) -> np.ndarray:
        """(examples, sequences): how many tokens of each are learnt. The first one is never predicted, whatever its
        mark."""
        edges = self._edges.reshape(-1, 2)
        learnt = np.asarray(self._learnt)  # slices of a memmap cost ten times as much
        counts = [np.count_nonzero(learnt[begin + 1 : end]) for begin, end in edges.tolist()]
        return np.array(counts, np.int64).reshape(-1, self.sequences)


def _pieces(documents: np.ndarray, max_length: int) -> np.ndarray:
    """(pieces, 1, 2): where pieces of `max_length` tokens at most begin and end. Each begins with the last token of the
    one before, as the first token of a row is never predicted: so every token but the first is predicted once."""
    edges = [
        (at, min(at + max_length, end))
        for begin, end in documents.tolist()
        for at in range(begin, max(begin + 1, end - 1), max_length - 1)
    ]
    return np.array(edges, np.int64).reshape(-1, 1, 2)


def open_token_set(
    path: str | Path,
    base_path: str | Path,
    make_encoder: Callable[[], ChatEncoder],
    cache_dir: Path,
    method: Rows,
    *,
    max_length: int,
    packing: bool,
    rank: int,
    alive: Callable[[], None] = lambda: None,
) -> TokenSet:
    """The tokens of `path` (chat JSONL), which rank 0 writes if `cache_dir` does not have them; the others wait for it.

    Args:
        make_encoder: makes the encoder of the tokenizer in `base_path`; called only if something has to be tokenised.
        alive: called for each example, and while a rank waits: rank 0 may need longer than the limit for a hang or for
            a collective.

    Raises InvalidTrainingData, as TokenSet does, and on rank 0 when the chat template or the method refuses an example.
    """
    path, base_path = Path(path), Path(base_path)
    directory = cache_dir / set_of(path, base_path)
    if rank == 0 and not directory.exists():
        encoder = make_encoder()
        with TokenWriter(path, cache_dir) as writer, open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                alive()
                try:
                    record = orjson.loads(line)
                    writer.add(record, method.encode(encoder, record))
                except BadRecord as bad:
                    raise InvalidTrainingData(path.name, [(number, str(bad))], 1) from None
            writer.finish(encoder, base_path)
    while not directory.exists():
        alive()
        time.sleep(_POLL_S)
    return TokenSet(directory, method, max_length=max_length, packing=packing, name=path.name)
