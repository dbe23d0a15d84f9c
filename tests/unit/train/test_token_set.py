"""Token sets on disk: a set that is there is opened as it was, and without the tokenizer."""

import numpy as np
import pytest

from tests.train_support.tiny import make_model_dir, write_chat_file
from train.data.chat import ChatEncoder
from train.data.packing import plan_packs
from train.data.token_set import open_token_set
from train.model.model import load_tokenizer


def refused():
    raise AssertionError("the set is there: nothing to tokenise")


@pytest.mark.parametrize("packing", [True, False])
def test_a_set_is_opened_again_without_its_tokenizer(tmp_path, packing):
    base = make_model_dir(tmp_path / "base")
    data = write_chat_file(tmp_path / "train.jsonl", 40)
    encoder = ChatEncoder(load_tokenizer(str(base)))

    def opened(encoder):
        return open_token_set(
            data,
            base,
            encoder,
            tmp_path / "tokens",
            max_length=64,
            packing=packing,
            rank=0,
            world_size=1,
            barrier=lambda: None,
        )

    first, again = opened(lambda: encoder), opened(refused)
    expected = plan_packs(np.diff(first._offsets), 64, packing=packing)
    assert len(again.packs) == len(expected)
    for number, pack in enumerate(expected):
        assert again.packs[number].tolist() == pack.tolist()
        marked = sum(int(first._example(index)[1][1:].sum()) for index in pack)
        assert again.labels_in(np.array([number])) == marked
        assert again.tokens_in(np.array([number])) == sum(int(np.diff(first._offsets)[index]) for index in pack)
    whole = np.arange(len(expected))
    assert again.labels_in(whole) == first.labels_in(whole) > 0
