"""Documents, {"text": ...}: all of each is trained, in rows of the model's context, without a chat template."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train_support.tiny import make_model_dir
from tests.unit.train.test_deepspeed_contract import world_of_one  # noqa: F401
from train.data.chat import ChatEncoder
from train.data.check import check_training_file
from train.data.formats import TEXT
from train.data.token_set import _pieces, open_token_set
from train.data_checks.check import Check
from train.data_checks.process import CHECKS
from train.methods.methods import method_of
from train.model.model import load_tokenizer
from train.plan.auto import DatasetStats, steps
from train.plan.errors import InvalidTrainingData


@given(count=st.integers(1, 400), most=st.integers(2, 50))
def test_pieces_predict_each_token_but_the_first_once(count, most):
    edges = _pieces(np.array([[0, count], [count, count + 1]]), most)[:, 0].tolist()
    assert all(1 <= end - begin <= most for begin, end in edges) and edges[-1] == [count, count + 1]
    assert [token for begin, end in edges for token in range(begin + 1, end)] == list(range(1, count))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model without a chat template."""
    folder = make_model_dir(tmp_path_factory.mktemp("base") / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def opened(base, folder, rows, max_length=32):
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = ChatEncoder(load_tokenizer(str(base)))
    how = {"max_length": max_length, "packing": True, "rank": 0}
    return open_token_set(data, base, lambda: encoder, folder / "tokens", method_of("supervised"), **how)


def test_token_set_of_documents_trains_every_token_and_cuts_none(base, tmp_path):
    encoder, texts = ChatEncoder(load_tokenizer(str(base))), ["word " * 100, "short"]
    found = opened(base, tmp_path, [{"text": text} for text in texts])
    lengths = [len(encoder.encode_text(text)[0]) for text in texts]
    assert lengths[0] > 32
    assert found.n_truncated == found.n_dropped == 0
    assert found.labels_in(np.arange(len(found.packs))) == sum(lengths) - len(texts)


def test_conversation_for_a_model_without_template_is_refused_by_line(base, tmp_path):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(InvalidTrainingData, match="line 1.*chat template"):
        opened(base, tmp_path, [chat])


def test_check_of_documents_counts_and_converts_them(tmp_path):
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps({"text": "word " * n, "source": "web"}) + "\n" for n in range(1, 21)))
    report = check_training_file(data, chat_path=tmp_path / "out.jsonl")
    assert (report.ok, report.shape, report.n_examples) == (True, TEXT, 20)
    assert report.left_out == {"source": 20} and not any("to chat" in note for note in report.notes)
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0]) == {"text": "word "}
    check = Check(CHECKS, max_tokens=8)
    check.report(data, "")
    assert not check.found["too_long"].count, "none is cut"


def test_steps_of_one_long_document_are_counted_in_rows():
    fields = {"packing": True, "max_length": 100, "n_epochs": 2, "batch_size": 4}
    stats = DatasetStats(1, 10_000, 10_000, (10_000,), documents=True)
    assert steps(stats, fields) == 50
    assert steps(DatasetStats(40, 400, 10, documents=True), fields | {"packing": False}) == 20
