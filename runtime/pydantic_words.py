"""Reads what pydantic says of a value that a check of ours refused."""

from __future__ import annotations


def words_of_check(message: str) -> str:
    """The words of the check alone; pydantic writes its own before them."""
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
