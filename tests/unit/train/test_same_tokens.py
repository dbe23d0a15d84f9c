"""Whether two tokenizers have the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train.data.same_tokens import differ


def put(path: Path, vocabulary: Any, added: Any = (), **more: Any) -> Path:
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": list(added), **more}))
    return path


def test_they_are_the_same_token_by_token_and_not_byte_by_byte(tmp_path: Path):
    ours = put(tmp_path / "a", {"x": 0, "y": 1}, [{"id": 2, "content": "<end>"}])
    assert differ(ours, ours) == ""
    assert differ(ours, put(tmp_path / "b", {"y": 1, "x": 0, "<end>": 2}, version="other")) == ""
    assert differ(ours, put(tmp_path / "c", [["x", -1.0], ["y", -2.0], ["<end>", 0.0]])) == ""
    found = differ(ours, put(tmp_path / "d", {"x": 0, "z": 1}))
    assert found.endswith("their tokenizers differ: 1 is 'y' to the student and 'z' to it")
    assert differ(put(tmp_path / "e", {"x": 0, "y": 1}), ours)


def test_what_is_not_a_tokenizer_is_said_to_be_none(tmp_path: Path):
    ours = put(tmp_path / "a", {"x": 0})
    for number, text in enumerate(("[]", '{"model": []}', "{", '{"model": {"vocab": [[]]}}')):
        (tmp_path / str(number)).write_text(text)
        assert "not of a form that can be compared" in differ(ours, tmp_path / str(number))
    assert differ(ours, tmp_path / "gone") == "their tokenizers could not be read: No such file or directory"
