"""A head that differs from a known one in nothing but the digits of its length is the same; a parser reads all that
differ in anything else."""

from __future__ import annotations

import pytest

from appliance.gateway.http.known_head import KnownHead, plain_head

BEFORE, AFTER = b"HTTP/1.1 200 OK\r\ncontent-length: ", b"\r\ndate: now\r\n\r\n"
HEAD = KnownHead(BEFORE, AFTER)


def answer(digits: bytes, body: bytes) -> bytes:
    return b"%b%b%b%b" % (BEFORE, digits, AFTER, body)


@pytest.mark.parametrize("length", [*range(130), 998, 999, 1000, 1001, 4095, 4096, 9999, 10_000, 99_999, 100_000])
def test_a_body_of_any_length_is_found(length: int) -> None:
    body = b"x" * length
    assert HEAD.body_of(answer(b"%d" % length, body)) == body
    for other in (length - 1, length + 1, length + 10):
        assert HEAD.body_of(answer(b"%d" % other, body)) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        BEFORE,
        b"%b%b" % (BEFORE, AFTER),
        answer(b"", b"x"),
        answer(b"01", b"x"),
        answer(b"+1", b"x"),
        answer(b" 1", b"x"),
        answer(b"-0", b""),
        answer(b"1", b"x").replace(b"now", b"new"),
        answer(b"1", b"x").replace(b"200", b"201"),
        answer(b"1\r\nx-other: 1", b"x"),
    ],
)
def test_what_differs_in_anything_else_is_not_it(data: bytes) -> None:
    assert HEAD.body_of(data) is None


def test_the_head_of_a_plain_answer_is_remembered_without_its_length() -> None:
    head = plain_head(answer(b"3", b"abc"))
    assert head is not None and head.body_of(answer(b"12", b"x" * 12)) == b"x" * 12
    assert head.headers[b"date"] == b"now" and not head.closes
