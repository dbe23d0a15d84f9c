"""Token sets on disk: the check of the data writes them, ranks open them; every token of a document is trained."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train_support.specs import tokenised
from tests.train_support.tiny import make_model_dir, write_chat_file
from tests.train_support.world import METHODS
from train.data.chat import ChatEncoder
from train.data.formats import TEXT
from train.data.packing import plan_packs
from train.data.token_set import TOKENS, TokenSet, _end_tokens, _pieces
from train.data_checks.check import check_training_file
from train.data_checks.process import checked, differ, report_on
from train.methods.methods import method_of
from train.model.model import load_tokenizer
from train.plan.auto import DatasetStats, steps
from train.plan.errors import InvalidTrainingData, UnsupportedModel


def opened(data, method="supervised", max_length=256, packing=True):
    return TokenSet(data, method_of(method), max_length=max_length, packing=packing)


@pytest.mark.parametrize("method", [name for name in METHODS if not method_of(name).rolls_out])
@pytest.mark.parametrize("packing", [True, False])
def test_token_set_counts_examples_labels_and_tokens_of_packs(tmp_path, packing, method):
    data = tokenised(METHODS[method][0](tmp_path / "train.jsonl", 40), make_model_dir(tmp_path / "base"), method)
    sides = method_of(method).sequences
    tokens = opened(data, method, 64, packing)
    examples = [tokens._example(index) for index in range(tokens.n_examples)]
    lengths = np.array([sum(len(ids) for ids, _ in example) for example in examples])
    expected = plan_packs(lengths, 64 * sides, packing=packing)
    assert len(tokens.packs) == len(expected)
    for number, pack in enumerate(expected):
        assert tokens.packs[number].tolist() == pack.tolist()
        marked = sum(int(learnt[1:].sum()) for index in pack for _, learnt in examples[index])
        row = tokens.row(np.array([number]))
        assert len(row.sequence_sizes) == sides * len(pack) and sum(row.sequence_sizes) == marked == len(row.labels)
        assert tokens.examples_in(np.array([number])) == len(pack)
        assert tokens.labels_in(np.array([number])) == marked
        assert tokens.tokens_in(np.array([number])) == sum(int(lengths[index]) for index in pack)
    assert tokens.labels_in(np.arange(len(expected))) > 0


def test_token_set_of_a_checked_file_opens_on_another_node(tmp_path):
    base, source = make_model_dir(tmp_path / "base"), write_chat_file(tmp_path / "upload.jsonl", 30)
    data = tmp_path / "job" / "train.jsonl"
    data.parent.mkdir()
    report = checked(source, chat_path=data, method="supervised", tokenizer=base)
    moved = shutil.copytree(data.parent, tmp_path / "another node", copy_function=shutil.copyfile)
    tokens = opened(moved / "train.jsonl")
    assert report.ok and report.n_tokens_estimate == tokens.n_tokens and tokens.n_examples == 30


def test_token_set_without_checked_tokens_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match="has no tokens"):
        opened(write_chat_file(tmp_path / "train.jsonl", 3))


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ('{"eos_token_id": [5, 6]}', '{"eos_token_id": 9}', [5, 6]),
        ("{}", '{"eos_token_id": 9}', []),
        (None, '{"limits": [0, Infinity], "eos_token_id": 9}', [9]),
        ("not JSON", '{"eos_token_id": 9}', [9]),
        (None, '{"eos_token_id": [5, 9], "text_config": {}}', [5, 9]),
        (None, '{"text_config": {"eos_token_id": 9}}', [9]),
        (None, None, []),
    ],
)
def test_token_set_has_end_tokens_of_engines(tmp_path, generation, config, ends):
    base = make_model_dir(tmp_path / "base")
    own = load_tokenizer(str(base)).eos_token_id
    shutil.copytree(base, tmp_path / "other")
    for name, text in (("generation_config.json", generation), ("config.json", config)):
        (tmp_path / "other" / name).unlink(missing_ok=True)
        if text is not None:
            (tmp_path / "other" / name).write_text(text)
    assert _end_tokens(load_tokenizer(str(base)), tmp_path / "other") == sorted({*ends, own})


def test_check_of_rejected_file_leaves_no_tokens(tmp_path):
    base, source = make_model_dir(tmp_path / "base"), write_chat_file(tmp_path / "upload.jsonl", 3)
    source.write_text(source.read_text() + '{"messages": []}\n')
    assert not checked(source, chat_path=tmp_path / "train.jsonl", method="supervised", tokenizer=base).ok
    assert [*(tmp_path / TOKENS).iterdir()] == []


def test_token_set_cuts_sequences_when_opened(tmp_path):
    data = tokenised(write_chat_file(tmp_path / "train.jsonl", 30), make_model_dir(tmp_path / "base"))
    whole = opened(data)
    longest = max(len(whole._example(index)[0][0]) for index in range(30))
    short = opened(data, max_length=longest - 4)
    assert short.n_truncated > short.n_dropped == 30 - short.n_examples >= 0 == whole.n_truncated
    assert all(learnt[1:].any() for index in range(short.n_examples) for _, learnt in short._example(index))
    with pytest.raises(InvalidTrainingData, match="within max_length 2"):
        opened(data, max_length=2)


def test_checked_line_that_the_template_refuses_is_named(tmp_path):
    base, source = make_model_dir(tmp_path / "base"), write_chat_file(tmp_path / "upload.jsonl", 3)
    bad = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a<|im_end|> b"}]}
    source.write_text(source.read_text() + json.dumps(bad) + "\n")
    report = checked(source, chat_path=tmp_path / "train.jsonl", method="supervised", tokenizer=base)
    assert [line for line, _ in report.errors] == [4] and "within messages" in report.errors[0][1]


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
        assert "a form that cannot be compared" in differ(ours, tmp_path / str(number))
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


def test_token_set_of_documents_trains_every_token_and_cuts_none(bare, tmp_path):
    encoder, texts = ChatEncoder(load_tokenizer(str(bare))), ["word " * 100, "short"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = opened(tokenised(tmp_path / "train.jsonl", bare), max_length=32)
    lengths = [len(encoder.encode_text(text)[0]) for text in texts]
    assert lengths[0] > 32
    assert found.n_truncated == found.n_dropped == 0
    assert found.labels_in(np.arange(len(found.packs))) == sum(lengths) - len(texts)


def test_checked_conversation_for_a_model_without_template_is_refused_by_line(bare, tmp_path):
    report = checked(write_chat_file(tmp_path / "upload.jsonl", 3), method="supervised", tokenizer=bare)
    assert report.errors[0][0] == 1 and "chat template" in report.errors[0][1]


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
