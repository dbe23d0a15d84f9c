"""The sizes that `make lint` holds."""

from __future__ import annotations

import json

import pytest

from tests.tools import sizes


@pytest.mark.parametrize(
    "source, number",
    [
        ("from vllm.a import B\n\n\ndef patch():\n    B.f = B.c.g = None\n    setattr(B, 'h', 1)\n", 2),
        ("import vllm.a\nimport torch as t\n\n\ndef patch():\n    vllm.a.f = 1\n    t.nn.Linear.forward = 2\n", 2),
        ("from vllm.a import B\n\n\nclass C:\n    def f(self):\n        self.b = B.g\n", 0),
    ],
)
def test_patches_counts_what_is_set_on_imported_names(source, number):
    assert sizes.patches(source) == number


def test_main_fails_for_a_grown_room_and_lowers_the_number_of_a_smaller_one(tmp_path, monkeypatch):
    held = tmp_path / "sizes.json"
    monkeypatch.setattr(sizes, "HELD", held)
    monkeypatch.setattr(sizes, "ROOT", tmp_path)
    monkeypatch.setattr(sizes, "sizes", lambda: {"train": 7, "serve": 5})
    held.write_text(json.dumps({"train": 9, "serve": 4}))
    assert sizes.main() == 1
    assert json.loads(held.read_text()) == {"train": 7, "serve": 4}
    held.write_text(json.dumps({"train": 7, "serve": 5}))
    assert sizes.main() == 0
