"""Token sets on disk: a set that is there is opened as it was, and without the tokenizer."""

import numpy as np
import pytest

from tests.train_support.tiny import make_model_dir
from tests.train_support.world import METHODS
from train.data import token_set
from train.data.chat import ChatEncoder
from train.data.packing import plan_packs
from train.data.token_set import open_token_set
from train.methods.methods import method_of
from train.model.model import load_tokenizer


def refused():
    raise AssertionError("the set is there: nothing to tokenise")


def opener(tmp_path, data, max_length, packing, method):
    """Opens the set again and again; `encoder` is what makes the encoder, if it is asked."""

    def opened(encoder):
        return open_token_set(
            data,
            tmp_path / "base",
            encoder,
            tmp_path / "tokens",
            max_length=max_length,
            packing=packing,
            rank=0,
            world_size=1,
            barrier=lambda: None,
            sequences=method.sequences,
            encode=method.encode,
            cut=method.cut,
            lay_out=method.row,
        )

    return opened


@pytest.mark.parametrize("method", [name for name in METHODS if not method_of(name).rolls_out])
@pytest.mark.parametrize("packing", [True, False])
def test_a_set_is_opened_again_without_its_tokenizer(tmp_path, packing, method):
    base = make_model_dir(tmp_path / "base")
    data = METHODS[method][0](tmp_path / "train.jsonl", 40)
    sides = method_of(method).sequences
    encoder = ChatEncoder(load_tokenizer(str(base)))
    opened = opener(tmp_path, data, 64, packing, method_of(method))
    first, again = opened(lambda: encoder), opened(refused)
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


def test_prompts_of_which_nothing_is_learnt_are_opened_again_as_they_were(tmp_path):
    base, method = make_model_dir(tmp_path / "base"), method_of("reinforcement")
    write, options = METHODS["reinforcement"]
    data = write(tmp_path / "train.jsonl", 40)
    encoder = ChatEncoder(load_tokenizer(str(base)))

    opened = opener(tmp_path, data, method.data_length(96, options), False, method)
    first, again = opened(lambda: encoder), opened(refused)
    assert first.n_examples == again.n_examples == 40
    assert [pack.tolist() for pack in again.packs] == [pack.tolist() for pack in first.packs]
    assert len(again.packs) == 40, "each prompt is a pack of its own"


@pytest.mark.parametrize("lines", [0, 1, 2, 90])
def test_ranks_share_the_bytes_of_a_file_that_is_sorted_by_length(tmp_path, lines):
    data = tmp_path / "train.jsonl"
    data.write_text("".join(f'"{"x" * number * number}"\n' for number in range(lines)))

    def encode(text):
        return [(np.arange(len(text) + 2, dtype=np.int32), np.ones(len(text) + 2, bool))]

    shares = []
    for rank in range(4):
        token_set._write_shard(data, encode, lambda sequences, most: sequences, tmp_path, 10**6, rank, 4)
        shares.append(np.load(tmp_path / f"{rank}.npz")["lengths"].tolist())
    assert sum(shares, []) == [number * number + 2 for number in range(lines)], "each line once, in order"
    if lines == 90:
        assert max(map(sum, shares)) < 1.2 * min(map(sum, shares))
