"""Token sets on disk: reopening without a tokenizer, truncation, tokenizer comparison and documents."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train_support.tiny import make_model_dir, write_chat_file
from tests.train_support.world import METHODS
from train.data.chat import ChatEncoder
from train.data.formats import TEXT
from train.data.packing import plan_packs
from train.data.token_set import _pieces, open_token_set
from train.data_checks.check import check_training_file
from train.data_checks.process import TOKENS, checked, differ, report_on
from train.methods.methods import method_of
from train.model.model import load_tokenizer
from train.plan.auto import DatasetStats, steps
from train.plan.errors import InvalidTrainingData


def refused():
    raise AssertionError("the set is there: nothing to tokenise")


def opened(data, base, folder, method="supervised", encoder=refused, max_length=256, packing=True, **how):
    how = {"max_length": max_length, "packing": packing, "rank": 0, **how}
    return open_token_set(data, base, encoder, folder / TOKENS, method_of(method), **how)


@pytest.mark.parametrize("method", [name for name in METHODS if not method_of(name).rolls_out])
@pytest.mark.parametrize("packing", [True, False])
def test_token_set_reopens_without_tokenizer(tmp_path, packing, method):
    base = make_model_dir(tmp_path / "base")
    data = METHODS[method][0](tmp_path / "train.jsonl", 40)
    sides = method_of(method).sequences
    encoder = ChatEncoder(load_tokenizer(str(base)))
    first, again = (opened(data, base, tmp_path, method, made, 64, packing) for made in (lambda: encoder, refused))
    examples = [first._example(index) for index in range(first.n_examples)]
    lengths = np.array([sum(len(ids) for ids, _ in example) for example in examples])
    expected = plan_packs(lengths, 64 * sides, packing=packing)
    assert len(again.packs) == len(expected)
    for number, pack in enumerate(expected):
        assert again.packs[number].tolist() == pack.tolist()
        marked = sum(int(learnt[1:].sum()) for index in pack for _, learnt in examples[index])
        row = first.row(np.array([number]))
        assert len(row.sequence_sizes) == sides * len(pack) and sum(row.sequence_sizes) == marked == len(row.labels)
        assert again.examples_in(np.array([number])) == len(pack)
        assert again.labels_in(np.array([number])) == marked
        assert again.tokens_in(np.array([number])) == sum(int(lengths[index]) for index in pack)
    whole = np.arange(len(expected))
    assert again.labels_in(whole) == first.labels_in(whole) > 0 and again.digest == first.digest


def test_token_set_of_checked_file_opens_without_tokenizer(tmp_path):
    base, source = make_model_dir(tmp_path / "base"), write_chat_file(tmp_path / "upload.jsonl", 30)
    data = tmp_path / "job" / "train.jsonl"
    data.parent.mkdir()
    report = checked(source, chat_path=data, method="supervised", tokenizer=base)
    moved = shutil.copytree(data.parent, tmp_path / "another node", copy_function=shutil.copyfile)
    tokens = opened(moved / "train.jsonl", base, moved)
    assert report.ok and report.n_tokens_estimate == tokens.n_tokens and tokens.n_examples == 30


def test_token_set_makes_other_ranks_wait_with_progress(tmp_path, monkeypatch):
    base, data = make_model_dir(tmp_path / "base"), write_chat_file(tmp_path / "train.jsonl", 30)
    monkeypatch.setattr("train.data.token_set._POLL_S", 0.01)
    ticks = []

    def alive():
        ticks.append(1)
        if len(ticks) == 3:
            opened(data, base, tmp_path, encoder=lambda: ChatEncoder(load_tokenizer(str(base))))

    assert opened(data, base, tmp_path, rank=1, alive=alive).n_examples == 30 and len(ticks) == 3


def test_check_of_rejected_file_leaves_no_tokens(tmp_path):
    base, source = make_model_dir(tmp_path / "base"), write_chat_file(tmp_path / "upload.jsonl", 3)
    source.write_text(source.read_text() + '{"messages": []}\n')
    assert not checked(source, chat_path=tmp_path / "train.jsonl", method="supervised", tokenizer=base).ok
    assert [*(tmp_path / TOKENS).iterdir()] == []


def test_token_set_truncates_sequences_at_opening(tmp_path):
    base, data = make_model_dir(tmp_path / "base"), write_chat_file(tmp_path / "train.jsonl", 30)
    whole = opened(data, base, tmp_path, encoder=lambda: ChatEncoder(load_tokenizer(str(base))))
    longest = max(len(whole._example(index)[0][0]) for index in range(30))
    short = opened(data, base, tmp_path, max_length=longest - 4)
    assert short.n_truncated > short.n_dropped == 30 - short.n_examples >= 0 == whole.n_truncated
    assert all(learnt[1:].any() for index in range(short.n_examples) for _, learnt in short._example(index))
    with pytest.raises(InvalidTrainingData, match="within max_length 2"):
        opened(data, base, tmp_path, max_length=2)


def test_token_set_rejected_record_names_its_line(tmp_path):
    base, data = make_model_dir(tmp_path / "base"), write_chat_file(tmp_path / "train.jsonl", 3)
    bad = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a<|im_end|> b"}]}
    data.write_text(data.read_text() + json.dumps(bad) + "\n")
    with pytest.raises(InvalidTrainingData, match="line 4.*within messages"):
        opened(data, base, tmp_path, encoder=lambda: ChatEncoder(load_tokenizer(str(base))))


def put(path, vocabulary, added=(), **more):
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": list(added), **more}))
    return path


def test_differ_compares_tokens_not_bytes(tmp_path):
    ours = put(tmp_path / "a", {"x": 0, "y": 1}, [{"id": 2, "content": "<end>"}])
    assert differ(ours, ours) == ""
    assert differ(ours, put(tmp_path / "b", {"y": 1, "x": 0, "<end>": 2}, version="other")) == ""
    assert differ(ours, put(tmp_path / "c", [["x", -1.0], ["y", -2.0], ["<end>", 0.0]])) == ""
    found = differ(ours, put(tmp_path / "d", {"x": 0, "z": 1}))
    assert found.endswith("their tokenizers differ: 1 is 'y' to the student and 'z' to it")
    assert differ(put(tmp_path / "e", {"x": 0, "y": 1}), ours)


def test_differ_reports_unreadable_tokenizer(tmp_path):
    ours = put(tmp_path / "a", {"x": 0})
    for number, text in enumerate(("[]", '{"model": []}', "{", '{"model": {"vocab": [[]]}}')):
        (tmp_path / str(number)).write_text(text)
        assert "not of a form that can be compared" in differ(ours, tmp_path / str(number))
    assert differ(ours, tmp_path / "gone") == "their tokenizers could not be read: No such file or directory"


# -- documents ---------------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 400), most=st.integers(2, 50))
def test_pieces_predict_each_token_except_first_once(count, most):
    edges = _pieces(np.array([[0, count], [count, count + 1]]), most)[:, 0].tolist()
    assert all(1 <= end - begin <= most for begin, end in edges) and edges[-1] == [count, count + 1]
    assert [token for begin, end in edges for token in range(begin + 1, end)] == list(range(1, count))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A model without a chat template."""
    folder = make_model_dir(tmp_path_factory.mktemp("base") / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def opened_rows(bare, folder, rows, max_length=32):
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return opened(data, bare, folder, encoder=lambda: ChatEncoder(load_tokenizer(str(bare))), max_length=max_length)


def test_token_set_of_documents_trains_every_token(bare, tmp_path):
    encoder, texts = ChatEncoder(load_tokenizer(str(bare))), ["word " * 100, "short"]
    found = opened_rows(bare, tmp_path, [{"text": text} for text in texts])
    lengths = [len(encoder.encode_text(text)[0]) for text in texts]
    assert lengths[0] > 32
    assert found.n_truncated == found.n_dropped == 0
    assert found.labels_in(np.arange(len(found.packs))) == sum(lengths) - len(texts)


def test_token_set_rejects_chat_without_template_by_line(bare, tmp_path):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(InvalidTrainingData, match="line 1.*chat template"):
        opened_rows(bare, tmp_path, [chat])


def test_check_counts_and_converts_documents(tmp_path):
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps({"text": "word " * n, "source": "web"}) + "\n" for n in range(1, 21)))
    report = check_training_file(data, chat_path=tmp_path / "out.jsonl")
    assert (report.ok, report.shape, report.n_examples) == (True, TEXT, 20)
    assert report.left_out == {"source": 20} and not any("to chat" in note for note in report.notes)
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0]) == {"text": "word "}
    assert not report_on(data, "", max_tokens=8)["checks"]["too_long"]["count"], "none is cut"


def test_steps_of_long_document_are_counted_in_rows():
    fields = {"packing": True, "max_length": 100, "n_epochs": 2, "batch_size": 4}
    stats = DatasetStats(1, 10_000, 10_000, (10_000,), documents=True)
    assert steps(stats, fields) == 50
    assert steps(DatasetStats(40, 400, 10, documents=True), fields | {"packing": False}) == 20
