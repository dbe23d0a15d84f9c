"""Tokens of a tokenizer, by its files."""

import json

import pytest

from weights.checkpoint.folder import tokens_of

BEGINS = "<｜tool▁calls▁begin｜>"
WANTED = ("[TOOL_CALLS]", BEGINS)


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("tokenizer.json", {"added_tokens": [{"id": 3, "content": BEGINS}], "model": {"vocab": {"a": 0}}}),
        ("tokenizer.json", {"model": {"vocab": {BEGINS: 0}}}),
        ("tokenizer.json", {"model": {"vocab": [[BEGINS, -1.5]]}}),
        ("vocab.json", {BEGINS: 5}),
        ("added_tokens.json", {BEGINS: 5}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": BEGINS}}}),
    ],
)
def test_tokens_of_finds_a_token_wherever_files_have_it(tmp_path, name, body, ascii_only):
    (tmp_path / name).write_text(json.dumps(body, ensure_ascii=ascii_only))
    assert tokens_of(tmp_path, WANTED) == {BEGINS}


def test_tokens_of_a_template_that_writes_a_token_are_none(tmp_path):
    body = {"chat_template": "{{ '[TOOL_CALLS]' }}{{ \"[TOOL_CALLS]\" }}", "vocab": {"[TOOL_CALLS]s": 1}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(body))
    assert tokens_of(tmp_path, WANTED) == frozenset()


def test_tokens_of_pieces_and_of_mistrals_format(tmp_path):
    (tmp_path / "tekken.json").write_text("{}")
    assert tokens_of(tmp_path, WANTED) == {"[TOOL_CALLS]"}
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x10" + BEGINS.encode() + b"\x00")
    assert tokens_of(tmp_path, WANTED) == {BEGINS}
