from __future__ import annotations

import json

import pytest

from serve.core.errors import VersionMismatch
from serve.load.version_check import check_same_model, identity, read_chat_template


@pytest.fixture
def pair(tmp_path):
    for name in ("old", "new"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1e4, "dtype": name}))
        (directory / "tokenizer.json").write_text("{}")
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": "x"}))
    return tmp_path / "old", tmp_path / "new"


def test_versions_that_differ_only_in_how_they_were_written_fit(pair):
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
def test_what_a_running_engine_cannot_take_over_is_refused_by_name(pair, file, text, named):
    (pair[1] / file).write_text(text)
    with pytest.raises(VersionMismatch, match=named):
        check_same_model(identity(pair[0]), pair[1])


def test_the_chat_template_file_wins_over_the_tokenizers(pair):
    assert read_chat_template(pair[0]) == "x"
    (pair[0] / "chat_template.jinja").write_text("y")
    assert read_chat_template(pair[0]) == "y"
    assert read_chat_template(pair[0].parent) is None
