"""The check of uploaded training files: contents, errors and conversion."""

import json
import tracemalloc

import pytest

from train.data.formats import convert
from train.data.records import BadRecord
from train.data_checks.check import MAX_COUNTED_ERRORS, MAX_LISTED_ERRORS, check_training_file
from train.methods.methods import METHODS

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def write(path, *records, sep="\n"):
    path.write_text(sep.join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def chat(*messages, **extra):
    return {"messages": [{"role": role, "content": content} for role, content in messages], **extra}


def test_check_lists_bad_lines_with_reasons(tmp_path):
    path = write(
        tmp_path / "f.jsonl",
        GOOD,
        "{not json",
        chat(("user", "x")),
        chat(("robot", "x"), ("assistant", "y")),
        chat(("user", "x"), ("assistant", "  ")),
        "",
        {"messages": [{"role": "user", "content": "x", "weight": 1}, {"role": "assistant", "content": "y"}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0}]},
        {"instruction": "a", "output": "b"},
        chat(("user", [{"type": "image_url", "image_url": {}}]), ("assistant", "y")),
        '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "y"}]}',
        {"messages": [], "colour": 1},
        [1],
    )
    report = check_training_file(path)
    assert (report.shape, report.n_examples, report.n_errors, report.ok) == ("chat", 1, 11, False)
    lines = {line: reason for line, reason in report.errors}
    assert lines.keys() == {2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13}
    for line, part in {2: "JSON", 4: "'robot'", 7: "weight", 9: "'alpaca'", 10: "text", 12: "'messages'"}.items():
        assert part in lines[line], (line, lines[line])


def test_check_limits_listed_and_counted_errors(tmp_path):
    for lines, counted in ((1000, 1000), (MAX_COUNTED_ERRORS + 5, MAX_COUNTED_ERRORS)):
        (tmp_path / "f.jsonl").write_bytes(b"1\n" * lines)
        report = check_training_file(tmp_path / "f.jsonl")
        assert report.n_errors == counted and len(report.errors) == MAX_LISTED_ERRORS


@pytest.mark.parametrize("array", [False, True])
def test_check_converts_other_shapes_to_chats(tmp_path, array):
    record = {"instruction": "Add", "input": "1 2", "output": "3", "history": [["q", "a"]]}
    source = tmp_path / "in"
    source.write_text(json.dumps([record] * 12, indent=2) if array else "\n".join([json.dumps(record)] * 12))
    report = check_training_file(source, chat_path=tmp_path / "out.jsonl")
    assert report.ok and (report.shape, report.n_examples) == ("alpaca", 12)
    assert report.notes and not report.warnings, "what was done is not a fault"
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    expected = chat(("user", "q"), ("assistant", "a"), ("user", "Add\n1 2"), ("assistant", "3"))
    assert len(lines) == 12 and json.loads(lines[3]) == expected
    assert (tmp_path / "out.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "no examples"),
        (b"\xff\xfe{\x00}\x00", "UTF-16"),
        (b"\x1f\x8b\x08\x00", "gzip -dc FILE"),
        (b"PAR1\x15\x04", "pd.read_parquet"),
        (b"a\tb\n1\t2\n", "sep='\\t'"),
        (b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", "deeper than 64"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is not valid JSON"),
        (b'{"messages": "' + b"a" * 5000 + b'"}', "lines after it were not checked"),
        (b'[{"a": 1}] x', "is not valid JSON"),
        (b'{"messages": "\x81"}', "iconv -f ENCODING -t utf-8"),
        ('{"messages": "你是谁"}'.encode("gbk"), "gb18030"),
        (b"prompt,completion\na,b\n", "pd.read_csv('FILE')"),
        (b'{"messages": Infinity}', "Infinity"),
        (b"{'messages': [{'role': 'user'}]}", "as Python prints it"),
        ("{\u201cprompt\u201d: 1}".encode(), "curly quotes"),
        (b'{"prompt": "a"},\n{"prompt": "b"},\n', "a comma follows"),
        (b'{"prompt": "a"}{"prompt": "b"}\n', "several JSON values on one line"),
        (b'{"prompt": "a", "completion": "b", "prompt": "c"}', "the key 'prompt' twice"),
        (b'{"prompt": "a", "completion": "b", "pr\\u003ampt": "::", "pr:mpt": 1}', "the key 'pr:mpt' twice"),
        (b'{"data": [{"prompt": "a", "completion": "b"}]}', "jq -c '.data[]'"),
    ],
)
def test_check_rejects_hostile_files_with_reason(tmp_path, monkeypatch, content, reason):
    if b"aaa" in content:
        monkeypatch.setattr("train.data.records.MAX_EXAMPLE_BYTES", 1000)
    (tmp_path / "f").write_bytes(content)
    report = check_training_file(tmp_path / "f")
    assert not report.ok and any(reason in why for _, why in report.errors), report.errors


def test_check_keeps_few_examples_in_memory(tmp_path):
    path = write(tmp_path / "f.jsonl", *[chat(("user", "x" * 400_000), ("assistant", "y"))] * 30)
    tracemalloc.start()
    assert check_training_file(path).n_examples == 30
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


def test_check_of_json_array_names_bad_element(tmp_path):
    (tmp_path / "f").write_text("[\n" + json.dumps(GOOD) + ",\n\n" + json.dumps({"messages": []}, indent=1) + "\n]")
    report = check_training_file(tmp_path / "f")
    assert report.n_examples == 1 and [line for line, _ in report.errors] == [2]


def test_check_accepts_byte_order_marks_and_crlf(tmp_path):
    line = b"\xef\xbb\xbf" + (json.dumps(GOOD) + "\r\n").encode()
    (tmp_path / "f").write_bytes(line * 2 + line.removeprefix(b"\xef\xbb\xbf") * 8)
    assert check_training_file(tmp_path / "f").n_examples == 10


def test_check_of_pretty_printed_json_reports_one_error(tmp_path):
    (tmp_path / "f").write_text("\n".join(json.dumps(GOOD, indent=2) for _ in range(12)))
    report = check_training_file(tmp_path / "f")
    assert [line for line, _ in report.errors] == [1] and "jq -c . FILE" in report.errors[0][1]


def test_check_after_broken_first_line_reads_the_rest(tmp_path):
    report = check_training_file(write(tmp_path / "f.jsonl", '{"messages": [', *[GOOD] * 3))
    assert ([line for line, _ in report.errors], report.n_examples) == ([1], 3)


@pytest.mark.parametrize("sep", ["lines", "array", "one"])
def test_check_accepts_bare_message_lists_as_chats(tmp_path, sep):
    turns = GOOD["messages"]
    text = {"lines": f"{json.dumps(turns)}\n" * 3, "array": json.dumps([turns] * 3, indent=1), "one": json.dumps(turns)}
    (tmp_path / "f").write_text(text[sep])
    report = check_training_file(tmp_path / "f")
    assert report.ok and (report.shape, report.n_examples) == ("chat", 1 if sep == "one" else 3), report.errors


PAIR = {
    "input": {"messages": [{"role": "user", "content": "2 and 2?"}]},
    "preferred_output": [{"role": "assistant", "content": "4"}],
    "non_preferred_output": [{"role": "assistant", "content": "5"}],
}
PROMPT = PAIR["input"]


@pytest.mark.parametrize("method", [None, "supervised", "dpo", "reinforcement"])
@pytest.mark.parametrize("odd", [PAIR, PROMPT], ids=["pair", "prompt"])
def test_check_of_mixed_shapes_rejects_minority_lines(tmp_path, odd, method):
    source = write(tmp_path / "f.jsonl", odd, odd, *[GOOD] * 10)
    how = {} if method is None else {"refuses": METHODS[method].refuses}
    report = check_training_file(source, chat_path=tmp_path / "out", **how)
    mine = {"dpo": PAIR, "reinforcement": PROMPT}.get(method)
    if mine is odd:
        assert [line for line, _ in report.errors] == list(range(3, 13))
    elif (method, odd) in (("dpo", PROMPT), ("reinforcement", PAIR)):
        assert [line for line, _ in report.errors] == [1] and report.shape == "chat", "of the whole file"
    else:
        assert [line for line, _ in report.errors] == [1, 2] and report.n_examples == 10, report.errors
    assert not (tmp_path / "out").exists() and not report.ok


def test_convert_limits_size_of_grader_item():
    asked = {"messages": [{"role": "user", "content": "How many?"}]}
    with pytest.raises(BadRecord, match="bytes long"):
        convert({**asked, "answer": "x" * (1 << 20)})
    assert convert({**asked, "answer": "x" * 1000, "tests": [[1, 2]] * 1000}).record["item"].keys() == {
        "answer",
        "tests",
    }


def test_check_counts_rows_of_multi_row_examples(tmp_path):
    """As under a template that needs one row per turn."""
    path = write(tmp_path / "f.jsonl", *[GOOD] * 6)
    report = check_training_file(path, count=lambda record: [[10], [30]], counted=4)
    assert (report.n_examples, report.n_rows, report.longest_example_tokens) == (6, 12, 30)
    assert report.example_tokens[:8] == [10, 30] * 4 and len(report.example_tokens) == 12
    assert report.n_tokens_estimate == 6 * 40
