"""Stores the training set as tokens on disk. All ranks tokenise it once together, each maps it, and resumes reuse it.

A record of the file gives one row or several (train.data.turns), each an example of the set: one sequence of tokens, or
as many as the training method needs, which stay together. A set is a directory `<run_dir>/tokens/<key>/` with
tokens.npy (int32), learnt.npy (bool), offsets.npy (int64, sequences + 1), labels.npy (int64, sequences: how many tokens
of each are learnt) and facts.json (pad_id, n_records, n_dropped, n_truncated, digest). The key covers all inputs, so a
changed file, tokenizer or length creates a new set; an existing set needs no tokenizer.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import orjson

from runtime.replace_file import replace_file
from train.data.chat import ChatEncoder, Tokens
from train.data.packing import Row, build_row, plan_packs
from train.data.records import BadRecord, Record
from train.plan.errors import InvalidTrainingData
from weights.format.names import TOKENIZER_FILES

_RENDERED_BY = (*TOKENIZER_FILES, "tokenizer_config.json", "special_tokens_map.json")
_MAX_LISTED_ERRORS = 20
_BLOCK_BYTES, _MOST_BLOCKS = 1 << 18, 2048  # of a file: a third of a second of one rank, or more where it is large
_COUNTS = ("n_records", "n_dropped", "n_truncated")
FORMAT = 7


class Rows(Protocol):
    """What a training method makes of a record (train.methods.method)."""

    sequences: int

    def encode(self, encoder: ChatEncoder, record: Record) -> Sequence[Sequence[Tokens]]: ...
    def cut(self, sequences: Sequence[Tokens], max_length: int) -> Sequence[Tokens] | None: ...


def cut(sequences: Sequence[Tokens], max_length: int) -> Sequence[Tokens] | None:
    """The first `max_length` tokens of each sequence; None if nothing to learn is left."""
    short = [(ids[:max_length], learnt[:max_length]) for ids, learnt in sequences]
    return short if any(learnt[1:].any() for _, learnt in short) else None


def pieces(document: Tokens, max_length: int) -> list[Tokens]:
    """A document in rows of `max_length` tokens at most. Each begins with the last token of the one before, as the
    first token of a row is never predicted: so every token but the first is predicted once."""
    ids, trained = document
    starts = range(0, max(1, len(ids) - 1), max_length - 1)
    return [(ids[start : start + max_length], trained[start : start + max_length]) for start in starts]


class TokenSet:
    """Examples as tokens, grouped into packs. Read-only, shared through the page cache by all ranks of a node.

    sequences: of each example. packs: indices of the examples of each. reference: (examples, sequences) float32, what
    the starting model says of them, once it is known (train.trainer.reference). digest: of all tokens and of which are
    learnt.
    """

    def __init__(self, directory: Path, method: Rows, *, max_length: int, packing: bool, as_given: bool):
        self.directory = directory
        self._tokens = np.load(directory / "tokens.npy", mmap_mode="r")
        self._learnt = np.load(directory / "learnt.npy", mmap_mode="r")
        self._offsets = np.load(directory / "offsets.npy")
        self.sequences, self.capacity = method.sequences, method.sequences * max_length
        labels = np.load(directory / "labels.npy").reshape(-1, self.sequences).sum(axis=1)
        self._packing = packing
        self.reference: np.ndarray | None = None
        facts = orjson.loads((directory / "facts.json").read_bytes())
        self._pad_id, self.digest = facts["pad_id"], str(facts["digest"])
        self.n_records, self.n_dropped, self.n_truncated = (facts[name] for name in _COUNTS)
        lengths = np.diff(self._offsets[:: self.sequences])
        self.packs = plan_packs(lengths, self.capacity, packing=packing, as_given=as_given)
        self._labels = np.array([labels[pack].sum() for pack in self.packs], np.int64)

    @property
    def n_examples(self) -> int:
        return (len(self._offsets) - 1) // self.sequences

    @property
    def n_tokens(self) -> int:
        return int(self._offsets[-1])

    def labels_in(self, packs: np.ndarray) -> int:
        """Number of learnt tokens in these packs: the denominator of a step's loss, known to every rank."""
        return int(self._labels[packs].sum())

    def examples_in(self, packs: np.ndarray) -> int:
        """Number of examples in these packs."""
        return sum(len(self.packs[pack]) for pack in packs)

    def tokens_in(self, packs: np.ndarray) -> int:
        """Number of tokens in these packs, padding not counted."""
        edges = self._offsets[:: self.sequences]
        return sum(int(edges[i + 1] - edges[i]) for pack in packs for i in self.packs[pack])

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
        edges = self._offsets[index * self.sequences : (index + 1) * self.sequences + 1]
        return [(self._tokens[a:b], self._learnt[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def open_token_set(
    path: str | Path,
    base_path: str | Path,
    encoder: Callable[[], ChatEncoder],
    cache_dir: Path,
    method: Rows,
    *,
    max_length: int,
    packing: bool,
    rank: int,
    world_size: int,
    barrier: Callable[[], None],
    as_given: bool = False,
    alive: Callable[[], None] = lambda: None,
) -> TokenSet:
    """Tokenise `path` (chat JSONL) with all ranks unless `cache_dir` has it, and open the result.

    `encoder` makes the encoder of the tokenizer in `base_path`; it is called only if something has to be tokenised.
    `as_given`: packs are of neighbours, in the order of the file. `alive` is called for each example: a file of
    gigabytes takes longer than the limit for a hang.

    Sequences longer than `max_length` tokens are cut; examples with nothing to learn left are dropped. Raises
    InvalidTrainingData, on every rank, when the chat template or the method refuses an example or nothing is left.
    """
    directory = Path(cache_dir) / _key(Path(path), Path(base_path), max_length)
    # The barrier keeps rank 0 from creating the directory between the looks of two other ranks.
    complete = directory.exists()
    barrier()
    if not complete:
        # Block by block: where a start is given up, as the scheduler does after ten minutes, the next one goes on.
        kept, blocks = Path(f"{directory}.blocks"), _blocks(Path(path).stat().st_size)
        kept.mkdir(parents=True, exist_ok=True)
        for number in range(rank, len(blocks), world_size):
            if not _block(kept, number).exists():
                lines = _lines(Path(path), *blocks[number])
                _write_block(_block(kept, number), lines, method, encoder(), max_length, alive)
        barrier()
        _raise_if_bad(Path(path), kept, len(blocks))
        if rank == 0:
            _merge(kept, directory, len(blocks), _pad_id(encoder()))
        barrier()
        if rank == 0:  # by now every rank has read the others' errors
            shutil.rmtree(kept)
    tokens = TokenSet(directory, method, max_length=max_length, packing=packing, as_given=as_given)
    if not tokens.packs:
        raise InvalidTrainingData(
            Path(path).name, [(1, f"no example has anything to learn within max_length {max_length}")], 1
        )
    return tokens


def _pad_id(encoder: ChatEncoder) -> int:
    tokenizer = encoder.tokenizer
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return pad_id or 0


def _key(path: Path, base_path: Path, max_length: int) -> str:
    digest = hashlib.sha256()
    stat = path.stat()
    digest.update(f"{FORMAT}:{path.name}:{stat.st_size}:{stat.st_mtime_ns}:{max_length}".encode())
    for name in _RENDERED_BY:
        file = base_path / name
        if file.exists():
            digest.update(name.encode() + file.read_bytes())
    return digest.hexdigest()[:24]


def _blocks(nbytes: int) -> list[tuple[int, int]]:
    """(first byte, byte after the last) of the parts of a file that a rank tokenises one after the other; the same for
    any number of ranks. Equal numbers of lines of a file that is sorted by length would keep one rank so long that the
    others take it for gone."""
    each = max(_BLOCK_BYTES, -(-nbytes // _MOST_BLOCKS))
    return [(begin, min(begin + each, nbytes)) for begin in range(0, max(1, nbytes), each)]


def _block(kept: Path, number: int) -> Path:
    return kept / f"{number}.npz"


def _lines(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """The lines that begin within these bytes."""
    with open(path, "rb") as file:
        if begin:
            file.seek(begin - 1)
            file.readline()
        while file.tell() < end and (line := file.readline()):
            yield line


def _write_block(
    block: Path,
    lines: Iterator[bytes],
    method: Rows,
    encoder: ChatEncoder,
    max_length: int,
    alive: Callable[[], None],
) -> None:
    tokens, learnt, errors = [np.zeros(0, np.int32)], [np.zeros(0, bool)], []
    n_lines = n_records = n_dropped = n_truncated = 0
    for n_lines, line in enumerate(lines, 1):
        if not line.strip():
            continue
        alive()
        try:
            record = orjson.loads(line)
            rows = method.encode(encoder, record)
            if "text" in record:
                rows = [[piece] for piece in pieces(rows[0][0], max_length)]
            kept = [row for row in (method.cut(whole, max_length) for whole in rows) if row is not None]
        except BadRecord as bad:
            errors.append((n_lines, str(bad)))
            continue
        n_records += 1
        n_truncated += sum(any(len(ids) > max_length for ids, _ in whole) for whole in rows)
        n_dropped += len(rows) - len(kept)
        for ids, mask in (sequence for row in kept for sequence in row):
            tokens.append(ids)
            learnt.append(mask)
    content = io.BytesIO()
    np.savez(
        content,
        tokens=np.concatenate(tokens),
        learnt=np.concatenate(learnt),
        lengths=np.array([len(ids) for ids in tokens[1:]], np.int64),
        # The first token is never predicted, whatever its mark.
        labels=np.array([mask[1:].sum() for mask in learnt[1:]], np.int64),
        counts=np.array([n_records, n_dropped, n_truncated]),
        n_lines=np.array(n_lines),
        errors=np.frombuffer(orjson.dumps([len(errors), errors[:_MAX_LISTED_ERRORS]]), np.uint8),
    )
    # It may be taken up after a crash of the machine, and a rank whose supervisor has died may write it too.
    replace_file(block, content.getvalue(), durable=True)


def _raise_if_bad(path: Path, kept: Path, count: int) -> None:
    listed: list[tuple[int, str]] = []
    total = before = 0
    for n_lines, written in zip(_parts(kept, count, "n_lines"), _parts(kept, count, "errors"), strict=True):
        n_errors, errors = orjson.loads(written.tobytes())
        total += n_errors
        listed += [(before + line, reason) for line, reason in errors]
        before += int(n_lines)
    if total:
        raise InvalidTrainingData(path.name, listed[:_MAX_LISTED_ERRORS], total)


def _parts(kept: Path, count: int, name: str) -> Iterator[np.ndarray]:
    """What all blocks have under this name, in their order."""
    for number in range(count):
        with np.load(_block(kept, number)) as block:
            yield block[name]


def _merge(kept: Path, directory: Path, count: int, pad_id: int) -> None:
    partial = Path(f"{directory}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    offsets = np.concatenate([np.zeros(1, np.int64), *_parts(kept, count, "lengths")]).cumsum().astype(np.int64)
    digest = hashlib.sha256(offsets)
    np.save(partial / "offsets.npy", offsets)
    np.save(partial / "labels.npy", np.concatenate([*_parts(kept, count, "labels")]))
    for name in ("tokens", "learnt"):
        joined = np.concatenate([*_parts(kept, count, name)])
        digest.update(joined)
        np.save(partial / f"{name}.npy", joined)
    counts = dict(zip(_COUNTS, np.sum([*_parts(kept, count, "counts")], axis=0).tolist(), strict=True))
    facts = {"pad_id": pad_id, "digest": digest.hexdigest(), **counts}
    (partial / "facts.json").write_bytes(orjson.dumps(facts))
    os.rename(partial, directory)
