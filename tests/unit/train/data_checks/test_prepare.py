"""What a preparation writes, and what it says of it."""

import hashlib
import json

import pytest

from tests.train_support.tiny import gsm8k
from tests.unit.train.data_checks.made import chat, prepared, write
from train.data_checks.prepare import Unusable

LONG = "The quick brown fox jumps over the lazy dog while the old man reads his newspaper under a tree in the park."


def test_nothing_is_changed_that_was_not_asked_for(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(
        b'{ "question":"a b",  "answer" : "c\\u00e4 ann@example.org" }\r\n\n{"question": "a b", "answer": "c"}'
    )
    made = prepared(path, out=tmp_path / "o.jsonl")
    assert (tmp_path / "o.jsonl").read_bytes() == path.read_bytes().replace(b"\r", b"").replace(b"\n\n", b"\n") + b"\n"
    assert made["dropped"] == {} and made["masked"] == {} and made["made"][0]["examples"] == 2
    assert (tmp_path / "o.jsonl").stat().st_mode & 0o777 == 0o600


def test_lineage_has_source_options_and_counts(tmp_path):
    path = write(
        tmp_path / "f.jsonl",
        chat("q", LONG),
        chat("q", LONG),
        chat("q", LONG.replace("park", "wood")),
        "{",
        chat("q", ""),
        chat("another", "thing"),
    )
    drop = ("duplicates", "near_duplicates", "bad_lines", "empty")
    made = prepared(path, out=tmp_path / "o.jsonl", drop=drop)
    assert made["dropped"] == dict.fromkeys(drop, 1)
    lineage = json.loads((tmp_path / "o.lineage.json").read_text())
    assert lineage["from"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert lineage["made"][0]["sha256"] == hashlib.sha256((tmp_path / "o.jsonl").read_bytes()).hexdigest()
    assert lineage["asked"]["drop"] == list(drop) and lineage["from"]["examples"] == 6
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 2


def test_near_duplicate_of_a_dropped_example_stays(tmp_path):
    path = write(
        tmp_path / "f.jsonl",
        chat("q", f"{LONG} Write to ann@example.org."),
        chat("q", f"{LONG} Write to the park."),
        chat("another", "thing"),
    )
    made = prepared(path, out=tmp_path / "o.jsonl", drop=("personal_data", "near_duplicates"))
    assert made["dropped"] == {"personal_data": 1} and made["made"][0]["examples"] == 2


def test_bad_lines_are_not_passed_over(tmp_path):
    path = write(tmp_path / "f.jsonl", chat("a", "b"), "{", chat("a", " "))
    with pytest.raises(Unusable, match="1 examples are bad lines, the first on line 2"):
        prepared(path, out=tmp_path / "o.jsonl")
    with pytest.raises(Unusable, match="empty"):
        prepared(path, out=tmp_path / "o.jsonl", drop=("bad_lines",))
    assert not (tmp_path / "o.jsonl").exists()


def test_personal_data_is_masked_everywhere_and_calls_stay_json(tmp_path):
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "pay", "arguments": '{"card": 4111111111111111, "n": 2}'},
    }
    record = {
        "messages": [
            {"role": "system", "content": "Ann is ann@example.org"},
            {"role": "user", "content": "pay"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "paid from 8.8.8.8"},
            {"role": "assistant", "content": "done"},
        ]
    }
    made = prepared(write(tmp_path / "f.jsonl", record, chat("a", "b")), out=tmp_path / "o.jsonl", mask=True)
    first, second = (tmp_path / "o.jsonl").read_text().splitlines()
    messages = json.loads(first)["messages"]
    assert messages[0]["content"] == "Ann is [EMAIL]" and messages[3]["content"] == "paid from [IP]"
    assert json.loads(messages[2]["tool_calls"][0]["function"]["arguments"]) == {"card": "[CARD]", "n": 2}
    assert json.loads(second) == chat("a", "b") and made["masked"] == {"email": 1, "card": 1, "ip": 1}


def test_a_split_is_by_content_and_stays_when_data_comes(tmp_path):
    path = gsm8k(tmp_path / "f.jsonl", "train", 600)
    more = gsm8k(tmp_path / "g.jsonl", "train", 900)
    more.write_text(more.read_text() + path.read_text())
    made = prepared(path, out=tmp_path / "o.jsonl", split=0.1)
    assert 30 <= made["made"][1]["examples"] <= 90
    prepared(more, out=tmp_path / "p.jsonl", split=0.1)
    few, many = (set((tmp_path / f"{name}.valid.jsonl").read_text().splitlines()) for name in "op")
    assert few <= many and not many & set((tmp_path / "p.jsonl").read_text().splitlines())


def test_empty_or_existing_target_is_refused(tmp_path):
    path = write(tmp_path / "f.jsonl", chat("a", "ann@example.org"), chat("a", "bob@example.org"))
    with pytest.raises(Unusable, match="no example would be left"):
        prepared(path, out=tmp_path / "o.jsonl", drop=("personal_data",))
    with pytest.raises(OSError, match="exists"):
        prepared(path, out=path)
    assert len(path.read_text().splitlines()) == 2
