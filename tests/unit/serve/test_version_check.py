"""Checks of a version by a running engine: the same model, and the token that training recorded."""

import json

import pytest

from serve.core.errors import FingerprintMismatch, VersionBroken, VersionMismatch, WithoutNumbers
from serve.load.version_check import Token, check_same_model, check_token, identity, read_chat_template, recorded_token
from weights.format.layout import Layout, TensorSpec
from weights.memory.store import WeightStore


@pytest.fixture
def pair(tmp_path):
    for name in ("old", "new"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1e4, "dtype": name}))
        (directory / "tokenizer.json").write_text("{}")
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": "x"}))
    return tmp_path / "old", tmp_path / "new"


def test_check_same_model_ignores_writer_metadata(pair):
    (pair[1] / "config.json").write_text(
        json.dumps({"model_type": "llama", "rope_theta": 1e4, "transformers_version": "9"})
    )
    (pair[1] / "generation_config.json").write_text('{"transformers_version": "9", "_from_model_config": true}')
    check_same_model(identity(pair[0]), pair[1])


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("config.json", '{"model_type": "llama", "rope_theta": 500000.0}', "rope_theta is 500000.0"),
        ("tokenizer.json", '{"a": 1}', "tokenizer: tokenizer.json is"),
        ("tekken.json", "{}", "tokenizer: tekken.json is"),
        ("vocab.txt", "a", "tokenizer: vocab.txt is"),
        ("chat_template.jinja", "{{ messages }}", "tokenizer: chat_template.jinja is"),
        ("tokenizer_config.json", '{"eos_token": "<|end|>", "chat_template": "x"}', "eos_token"),
        ("generation_config.json", '{"temperature": 0.1}', "generation_config.json: temperature"),
    ],
)
def test_check_same_model_names_incompatible_field(pair, file, text, named):
    (pair[1] / file).write_text(text)
    with pytest.raises(VersionMismatch, match=named):
        check_same_model(identity(pair[0]), pair[1])


def test_chat_template_file_overrides_tokenizer_template(pair):
    assert read_chat_template(pair[0]) == "x"
    (pair[0] / "chat_template.jinja").write_text("y")
    assert read_chat_template(pair[0]) == "y"
    assert read_chat_template(pair[0].parent) is None


RECORD = Token((1, 2), 7, -0.5)
ANSWER = {7: -0.5, 9: -1.5}
NAN = float("nan")


def checked(answer, record=RECORD):
    return check_token(answer, record, tolerance=0.15, version="v")


@pytest.mark.parametrize("answer", [ANSWER, {7: -0.6, 9: -0.59}], ids=["equal", "near tie"])
def test_check_of_recorded_token_verifies(answer):
    assert checked(answer) == {"token": 7, "logprob": answer[7], "verdict": "verified"}


@pytest.mark.parametrize(
    ("answer", "record", "error"),
    [
        pytest.param({7: -0.8, 9: -1.5}, RECORD, FingerprintMismatch, id="other logprob"),
        pytest.param({8: -0.5, 9: -1.5}, RECORD, FingerprintMismatch, id="other token"),
        pytest.param({7: NAN, 9: -1.5}, RECORD, VersionBroken, id="not finite"),
        pytest.param({7: NAN, 9: -1.5}, None, VersionBroken, id="not finite, unrecorded"),
    ],
)
def test_check_of_other_weights_raises(answer, record, error):
    with pytest.raises(error):
        checked(answer, record)


def test_check_without_record_claims_nothing():
    assert checked(ANSWER, None) == {"verdict": "unrecorded"}


@pytest.fixture
def sealed(tmp_path):
    """Path of a sealed version with this `meta`."""

    def seal(meta):
        layout = Layout.plan([TensorSpec("w", "F32", (1,))])
        with WeightStore(tmp_path, budget_bytes=None).reserve(layout, kind="version", model="m", version="v1") as draft:
            return draft.commit(meta=meta).path

    return seal


@pytest.mark.parametrize(
    ("meta", "record"), [({}, None), ({"fingerprint": {"prompt": [1, 2], "token": 7, "logprob": -0.5}}, RECORD)]
)
def test_recorded_token_is_read_from_manifest(tmp_path, sealed, meta, record):
    assert recorded_token(tmp_path) is None and recorded_token(sealed(meta)) == record


def test_recorded_token_of_nan_version_raises_without_numbers(sealed):
    with pytest.raises(WithoutNumbers):
        recorded_token(sealed({"fingerprint": None}))
