"""Errors of tasks of the harness."""


class Unsupported(Exception):
    """A task asks for what no OpenAI API answers; the message says what."""
