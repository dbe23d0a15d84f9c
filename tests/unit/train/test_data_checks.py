"""Data checks list the lines that they find, and count them."""

import json
from unittest.mock import patch

import pytest

from train.data_checks.check import personal_data
from train.data_checks.process import CheckFailed, report_apart, report_on
from train.plan.errors import InvalidSpec, UnsupportedModel

LONG = "The quick brown fox jumps over the lazy dog while the old man reads his newspaper under a tree in the park."


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def repeats(path):
    """Index of each (near) duplicate -> index of the earlier example."""
    with patch("train.data_checks.check._MOST_SHOWN", 10**6):
        checks = checked(path)["checks"]
    found = [one for name in ("duplicates", "near_duplicates") for one in checks[name]["first"]]
    return {one["line"] - 1: one["of"] - 1 for one in found}


def checked(path, **options):
    return report_on(path, str(path), **options)


def lines(report, name):
    return [one["line"] for one in report["checks"][name]["first"]]


def test_report_lists_lines_of_every_check(tmp_path):
    valid = write(tmp_path / "valid.jsonl", chat("And now?", LONG.replace("old", "young") + " It is late."))
    path = write(
        tmp_path / "train.jsonl",
        chat("What is 2 + 2?", LONG),
        {"messages": list(reversed(chat("x", "y")["messages"]))[:1], "tools": []} | chat("What is 2 + 2?", LONG),
        chat("What is 2 + 2?", LONG.replace("park", "wood")),
        chat("Hi", " "),
        "{no json",
        chat("Who?", "Ann, ann@example.org, card 4111 1111 1111 1111"),
        chat("How?", "It's like this, said the man in the quiet room."),
        chat("And now?", LONG.replace("old", "young") + " It is early."),
    )
    report = checked(path, against=valid, max_tokens=30)
    assert {name: lines(report, name) for name in report["checks"]} == {
        "bad_lines": [5],
        "empty": [4],
        "duplicates": [2],
        "near_duplicates": [3],
        "too_long": [1, 2, 3, 8],
        "contaminated": [8],
        "personal_data": [6],
    }
    assert not report["usable"] and report["examples"] == 8
    assert report["checks"]["personal_data"]["kinds"] == {"email": 1, "card": 1}
    assert "ann@example.org" not in json.dumps(report) and report["checks"]["contaminated"]["first"][0]["of"] == 1
    assert set(checked(path)["checks"]) == {"bad_lines", "empty", "duplicates", "near_duplicates", "personal_data"}


def test_duplicates_are_compared_after_conversion(tmp_path):
    one = chat("What is it?", "It is a very long story that nobody has told before, and nobody will tell again.")
    path = write(
        tmp_path / "f.jsonl", one, json.dumps(one, indent=None, separators=(",", ":")), {**one, "metadata": {"n": 1}}
    )
    found = checked(path)["checks"]["duplicates"]
    assert [(one["line"], one["of"]) for one in found["first"]] == [(2, 1), (3, 1)]


def test_report_has_shape_and_counts_dropped_keys(tmp_path):
    pairs = write(tmp_path / "p.jsonl", {"prompt": "Who?", "chosen": "I", "rejected": ""})
    report = checked(pairs)
    assert lines(report, "empty") == [1] and report["file"]["shape"] == "preference"
    assert checked(write(tmp_path / "b.jsonl", "{no json"))["file"]["shape"] is None
    row = chat("Who is it?", "It is the nightingale.")
    path = write(tmp_path / "f.jsonl", {**row, "source": "x"}, {**row, "source": None, "id": 3})
    assert checked(path)["keys_left_out"] == {"id": 1, "source": 1}


def test_shared_template_does_not_count_as_contamination(tmp_path):
    template = "You are given a sum of two numbers from a school book; say what it makes and nothing else, please: "
    valid = write(tmp_path / "v.jsonl", *(chat(f"{template} {n} and {n + 1}", str(2 * n + 1)) for n in range(50)))
    train = write(tmp_path / "t.jsonl", *(chat(f"{template} {n} and {n + 1}", str(2 * n + 1)) for n in range(50, 100)))
    assert checked(train, against=valid)["checks"]["contaminated"]["count"] == 0
    assert checked(valid, against=valid)["checks"]["contaminated"]["count"] == 50


def test_lengths_are_percentiles_of_tokens(tmp_path):
    path = write(tmp_path / "f.jsonl", *(chat("q", "word " * n) for n in range(1, 101)))
    lengths = checked(path)["lengths"]
    assert list(lengths) == ["shortest", "p5", "p25", "p50", "p75", "p95", "p99", "longest", "mean"]
    assert lengths["shortest"] < lengths["p50"] < lengths["longest"]


def test_report_rejects_meaningless_options(tmp_path):
    path = write(tmp_path / "f.jsonl", chat("a", "b"))
    with pytest.raises(InvalidSpec, match="'poetry'"):
        checked(path, method="poetry")
    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        checked(path, model=tmp_path)
    assert lines(checked(path, method="dpo"), "bad_lines") == [1]


async def test_report_apart_runs_in_separate_process(tmp_path):
    path = write(tmp_path / "f.jsonl", chat("a", "b"))
    assert (await report_apart(path, "f"))["examples"] == 1
    with pytest.raises(CheckFailed, match="nowhere"):
        await report_apart(tmp_path / "nowhere", "f")
    with pytest.raises(UnsupportedModel):
        await report_apart(path, "f", model=tmp_path)


def test_tokenizer_config_with_file_paths_is_rejected(tmp_path):
    data, model = write(tmp_path / "f.jsonl", chat("a", "b")), tmp_path / "model"
    model.mkdir()
    (model / "tokenizer_config.json").write_text(json.dumps({"vocab": str(data)}))
    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        checked(data, model=model)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("write to ann.lee+x@mail.example.org.", "email"),
        ("card 4111 1111 1111 1111 12/27", "card"),
        ("host 8.8.8.8 answers", "ip"),
        ("host 2001:4860:4860::8888 answers", "ip"),
        ("call +49 30 1234567 now", "phone"),
        ("call (212) 555-0123", "phone"),
        ("Tel. 030/1234567", "phone"),
        ("手机 13912345678", "phone"),
        ("key sk-abcdefghijklmnopqrstuvwxyz012345", "secret"),
        ("AKIAIOSFODNN7EXAMPLE", "secret"),
        (
            "https://u:sk-abcdefghijklmnopqrstuvwx@host.example.org",
            "secret",
        ),  # the first of two overlapping kinds
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "secret"),
    ],
)
def test_personal_data_matches_each_form(text, kind):
    ((found, value),) = personal_data(text)
    assert found == kind and value in text


@pytest.mark.parametrize(
    "text",
    [
        "card 4111 1111 1111 1112, 0000000000000000",  # Luhn
        "number 4222222222222",  # an outdated card format that one in ten 13-digit numbers matches
        "version 1.2.3.4.5 or 192.168.0.1 or 999.1.1.1",
        "at 10:30:45 on 2024-01-15, 1,234,567 of 12 345 678",
        "36/4=<<36/4=9>>9 apples cost $1200.50, 200 300 4000",
        "a@b, @someone, x@y@z",
        "skip sk-short",
    ],
)
def test_personal_data_ignores_similar_text(text):
    assert personal_data(text) == []
