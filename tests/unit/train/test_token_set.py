"""Token sets on disk: a set that is there is opened as it was, and without the tokenizer."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from tests.train_support.tiny import make_model_dir
from tests.train_support.world import METHODS
from train.data import token_set
from train.data.chat import ChatEncoder
from train.data.packing import plan_packs
from train.data.records import BadRecord
from train.data.token_set import open_token_set
from train.methods.methods import method_of
from train.model.model import load_tokenizer
from train.plan.errors import InvalidTrainingData


def refused():
    raise AssertionError("the set is there: nothing to tokenise")


@pytest.mark.parametrize("method", [name for name in METHODS if not method_of(name).rolls_out])
@pytest.mark.parametrize("packing", [True, False])
def test_a_set_is_opened_again_without_its_tokenizer(tmp_path, packing, method):
    base = make_model_dir(tmp_path / "base")
    data = METHODS[method][0](tmp_path / "train.jsonl", 40)
    sides = method_of(method).sequences
    encoder = ChatEncoder(load_tokenizer(str(base)))
    how = {"max_length": 64, "packing": packing, "rank": 0, "world_size": 1, "barrier": lambda: None}
    first, again = (
        open_token_set(data, base, made, tmp_path / "tokens", method_of(method), **how)
        for made in (lambda: encoder, refused)
    )
    lengths = np.diff(first._offsets).reshape(-1, sides).sum(1)
    assert first.n_examples == len(lengths)
    expected = plan_packs(lengths, 64 * sides, packing=packing)
    assert len(again.packs) == len(expected)
    for number, pack in enumerate(expected):
        assert again.packs[number].tolist() == pack.tolist()
        marked = sum(int(learnt[1:].sum()) for index in pack for _, learnt in first._example(index))
        row = first.row(np.array([number]))
        assert len(row.sequence_sizes) == sides * len(pack) and sum(row.sequence_sizes) == marked == len(row.labels)
        assert again.examples_in(np.array([number])) == len(pack)
        assert again.labels_in(np.array([number])) == marked
        assert again.tokens_in(np.array([number])) == sum(int(lengths[index]) for index in pack)
    whole = np.arange(len(expected))
    assert again.labels_in(whole) == first.labels_in(whole) > 0


def letters(text):
    """A token for each letter and two more."""
    return [[(np.arange(len(text) + 2, dtype=np.int32), np.ones(len(text) + 2, bool))]]


class World:
    """Ranks that tokenise one after the other, by an encoding of their own; `encoded`: the lengths of texts, by
    rank."""

    def __init__(self, data, folder, size):
        self.data, self.folder, self.size = data, folder, size
        self.encoded = [[] for _ in range(size)]

    def rank(self, number, *, ends_after=10**9):
        """Up to its second barrier, at which it would wait for others; or it ends with so many texts encoded."""

        class Waits(Exception):
            pass

        def encode(encoder, text):
            if len(self.encoded[number]) == ends_after:
                raise Waits
            self.encoded[number].append(len(text))
            return letters(text)

        barriers = iter([None, Waits()])

        def barrier():
            if (wait := next(barriers, None)) is not None and self.size > 1:
                raise wait

        with contextlib.suppress(Waits):
            return self._open(number, encode, barrier)

    def _open(self, number, encode, barrier):
        encoder = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0, eos_token_id=0))
        return open_token_set(
            self.data,
            self.folder,
            lambda: encoder,
            self.folder / "tokens",
            SimpleNamespace(sequences=1, encode=encode, cut=lambda sequences, most: sequences),
            max_length=10**6,
            packing=False,
            rank=number,
            world_size=self.size,
            barrier=barrier,
        )


def sorted_file(folder, lines):
    data = folder / "train.jsonl"
    data.write_text("".join(f'"{"x" * number**2}"\n' for number in range(lines)))
    return data


@pytest.mark.parametrize("lines", [0, 1, 90])
def test_token_set_blocks_hold_each_line_once(tmp_path, monkeypatch, lines):
    monkeypatch.setattr(token_set, "_BLOCK_BYTES", 7)
    world = World(sorted_file(tmp_path, lines), tmp_path, 4)
    for rank in range(4):
        world.rank(rank)
    assert sorted(sum(world.encoded, [])) == [number * number for number in range(lines)]


def test_a_start_that_was_given_up_goes_on_where_it_was(tmp_path, monkeypatch):
    """The scheduler gives a start up after ten minutes; half a gigabyte takes longer."""
    monkeypatch.setattr(token_set, "_BLOCK_BYTES", 1000)
    data = sorted_file(tmp_path, 60)
    given_up = World(data, tmp_path, 2)
    given_up.rank(0, ends_after=20)
    given_up.rank(1, ends_after=20)
    again = World(data, tmp_path, 1)
    opened = again.rank(0)
    assert opened.n_examples == 60 and np.diff(opened._offsets).tolist() == [n * n + 2 for n in range(60)]
    lost = len(sum(given_up.encoded, [])) + len(again.encoded[0]) - 60
    assert 0 <= lost <= 2 * 32 and len(again.encoded[0]) < 30, "no more than the blocks under way"
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == [opened_name(tmp_path)]


def opened_name(folder):
    return token_set._key(folder / "train.jsonl", folder, 10**6)


def test_a_line_that_is_refused_is_named_by_its_place_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(token_set, "_BLOCK_BYTES", 100)
    data = sorted_file(tmp_path, 30)

    def encode(encoder, text):
        if len(text) in (25, 400):
            raise BadRecord(f"{len(text)} letters")
        return letters(text)

    with pytest.raises(InvalidTrainingData) as refused_:
        World(data, tmp_path, 1)._open(0, encode, lambda: None)
    assert "line 6" in str(refused_.value) and "line 21" in str(refused_.value)
