"""The input file of a batch, by itself: what a hostile one costs."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from appliance.controller.batches import Lines, parse_line, read_lines

URL = "/v1/chat/completions"
LINE_BYTES = 1000


def request(number: int, text: str = "") -> bytes:
    body = {"model": "starter", "messages": [{"role": "user", "content": text}]}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": URL, "body": body}).encode() + b"\n"


@pytest.fixture
def found(tmp_path: Path):
    def read(data: bytes, max_lines: int = 10) -> Lines:
        path = tmp_path / "input"
        path.write_bytes(data)
        return read_lines(path, URL, max_lines, LINE_BYTES)

    return read


def test_read_of_an_endless_line_stops_at_the_limit(found):
    data = request(1) + b"x" * (64 << 20)
    tracemalloc.start()
    try:
        lines = found(data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert [(error["code"], error["line"]) for error in lines.errors] == [("line_too_long", 2)]


def test_read_of_a_file_from_windows_skips_byte_order_marks_and_blank_lines(found):
    mark, lines_of = b"\xef\xbb\xbf", [request(number).rstrip() for number in (1, 2, 3)]
    data = mark + lines_of[0] + b"\r\n\r\n" + lines_of[1] + b"\r\n" + mark + lines_of[2]
    lines = found(data)
    assert not lines.errors and len(lines.requests) == 3
    parts = [data[line.offset : line.offset + line.size] for line in lines.requests.values()]
    assert [parse_line(part)["custom_id"] for part in parts] == ["c1", "c2", "c3"]


@pytest.mark.parametrize(
    ("data", "what"),
    [(request(1).decode().encode("utf-16"), "UTF-16"), (b"PAR1\x15\x04", "Parquet"), (b"\x1f\x8b\x08", "gzip")],
)
def test_read_of_a_file_that_is_not_json_lines_names_what_it_is(found, data, what):
    (error,) = found(data).errors
    assert (error["code"], error["line"]) == ("invalid_json_line", 1) and what in error["message"]
