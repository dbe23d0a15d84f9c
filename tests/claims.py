"""Tells the check at the end of a test session which files are the session's own: other sessions, boxes and benchmarks
put theirs beside them, in one folder and under names of the same kind."""

import os

FILE = "TESTS_CLAIMS"  # set by tests/conftest.py


def claim(*parts: str) -> None:
    """What bears one of these parts in its name, in shared memory or among temporary files, is this session's."""
    if FILE in os.environ:
        with open(os.environ[FILE], "a") as file:
            file.writelines(f"{part}\n" for part in parts)
