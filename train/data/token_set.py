"""Stores a job's data as tokens on disk: the data check writes the files, every rank maps them.

A record of the file gives one row or several (train.data.chat). Each row is an example of the set: one sequence of
tokens, or as many sequences as the training method needs, which stay together. A set is the directory `tokens/<file>/`
beside the file, with tokens (int32) and learnt (bool), both raw, offsets.npy (int64, sequences + 1) and facts.json.
Sequences are stored uncut; opening a set cuts sequences to max_length, and splits documents into pieces.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import orjson

from train.data.packing import Row, build_row, plan_packs
from train.data.records import Record
from train.plan.errors import InvalidTrainingData, UnsupportedModel
from weights.checkpoint.generation import FILE, eos_ids
from weights.format.foreign_json import config_in
from weights.format.names import sync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from train.data.chat import ChatEncoder, Tokens

TOKENS = "tokens"
"""The folder of sets beside a job's data."""


class Rows(Protocol):
    """The parts of a training method that a set uses (train.methods.method)."""

    sequences: int

    @property
    def rolls_out(self) -> bool: ...


def tokens_of(path: str | Path) -> Path:
    """Return the directory of the token set for a job's data file, which never changes."""
    return Path(path).parent / TOKENS / Path(path).name


class TokenWriter:
    """Writes a file's set record by record, in a `with`, which removes an unfinished set. After a crash, the file's
    next writer removes the remains."""

    def __init__(self, path: Path):
        self._directory = tokens_of(path)
        self._folder = self._directory.with_name(f"{path.name}.partial")
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

    def finish(self, encoder: ChatEncoder, model: Path) -> None:
        """Move the complete set to its final directory. model: the directory with the tokenizer."""
        for file in self._files:
            file.close()
        offsets = np.cumsum(np.array(self._lengths, np.int64))
        self._digest.update(offsets.tobytes())
        np.save(self._folder / "offsets.npy", offsets)
        tokenizer = encoder.tokenizer
        facts = {
            "pad_id": (tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id) or 0,
            "ends": _end_tokens(tokenizer, model),
            "n_records": self._n_records,
            "documents": self._documents,
            "digest": self._digest.hexdigest(),
        }
        (self._folder / "facts.json").write_bytes(orjson.dumps(facts))
        for path in (*self._folder.iterdir(), self._folder):
            sync(path)  # so that the set of a queued job survives a power cut
        shutil.rmtree(self._directory, ignore_errors=True)
        os.rename(self._folder, self._directory)


class TokenSet:
    """The examples of a data file as tokens, grouped into packs. Read-only, shared through the page cache by all ranks
    of a node.

    Sequences longer than `max_length` tokens are cut. Examples without a trained token after the cut, and prompts that
    are too long, are dropped. packs: example indices of each pack. reference: (examples, sequences) float32,
    log-probabilities in the starting model, once computed (train.trainer.train). digest: a hash of all tokens and their
    loss mask. ends: tokens that end an answer. Raises UnsupportedModel if the check wrote no tokens,
    InvalidTrainingData without any example.
    """

    def __init__(self, path: str | Path, method: Rows, *, max_length: int, packing: bool):
        directory, name = tokens_of(path), Path(path).name
        if not directory.exists():
            why = "the model's tokenizer was missing when the data was checked, or another release checked it"
            raise UnsupportedModel(f"{name} has no tokens: {why}. Create the job again")
        facts = orjson.loads((directory / "facts.json").read_bytes())
        self._pad_id, self.n_records, self.digest = facts["pad_id"], facts["n_records"], str(facts["digest"])
        self.ends: list[int] = facts["ends"]
        offsets = np.load(directory / "offsets.npy")
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
            raise InvalidTrainingData(f"no example of {name} has a trained token within max_length {max_length}")
        self._labels = np.array([labels[pack].sum() for pack in self.packs], np.int64)

    @property
    def n_examples(self) -> int:
        return len(self._edges)

    @property
    def n_tokens(self) -> int:
        return int(self._lengths.sum())

    def labels_in(self, packs: np.ndarray) -> int:
        """Number of trained tokens in these packs: the denominator of a step's loss."""
        return int(self._labels[packs].sum())

    def examples_in(self, packs: np.ndarray) -> int:
        """Number of examples in these packs."""
        return sum(len(self.packs[pack]) for pack in packs)

    def tokens_in(self, packs: np.ndarray) -> int:
        """Number of tokens in these packs, padding not counted."""
        return sum(int(self._lengths[self.packs[pack]].sum()) for pack in packs)

    def tokens_of(self, index: int) -> np.ndarray:
        """Return the tokens (n,) int32 of an example that is a single sequence."""
        ((ids, _),) = self._example(index)
        return np.asarray(ids)

    def row(self, packs: np.ndarray) -> Row:
        """Build one micro-batch from these packs."""
        examples = [[part for index in self.packs[pack] for part in self._example(index)] for pack in packs]
        row = build_row(examples, self.capacity, self._pad_id, packing=self._packing)
        if self.reference is None:
            return row
        members = np.concatenate([self.packs[pack] for pack in packs])
        return replace(row, reference=self.reference[members].reshape(-1))

    def _example(self, index: int) -> list[Tokens]:
        return [(self._tokens[begin:end], self._learnt[begin:end]) for begin, end in self._edges[index]]

    def _labels_of_sequences(self) -> np.ndarray:
        """Count trained tokens, (examples, sequences), without each first token, which is never predicted."""
        edges = self._edges.reshape(-1, 2)
        learnt = np.asarray(self._learnt)  # slicing a memmap takes ten times as long
        counts = [np.count_nonzero(learnt[begin + 1 : end]) for begin, end in edges.tolist()]
        return np.array(counts, np.int64).reshape(-1, self.sequences)


def _end_tokens(tokenizer: PreTrainedTokenizerBase, model: Path) -> list[int]:
    """Return the tokens at which engines end an answer of the model in this directory."""
    own = None
    with suppress(OSError, ValueError):  # without a readable file, engines read config.json
        own = json.loads((model / FILE).read_bytes())
    ends = (*eos_ids(own, config_in(model) or {}), tokenizer.eos_token_id)
    return sorted({token for token in ends if type(token) is int})


def _pieces(documents: np.ndarray, max_length: int) -> np.ndarray:
    """Split documents into pieces of at most `max_length` tokens; return (pieces, 1, 2) begins and ends. A row's first
    token is never predicted, so each piece begins with the last token of the piece before: every token but the first is
    predicted once."""
    edges = [
        (at, min(at + max_length, end))
        for begin, end in documents.tolist()
        for at in range(begin, max(begin + 1, end - 1), max_length - 1)
    ]
    return np.array(edges, np.int64).reshape(-1, 1, 2)
