"""Pytest plugin for openai-python's tests: resets all fixtures before every test.

It runs inside that project's own pytest, where `tests` is that project's package: hence `import seed` (this folder is
on PYTHONPATH), and its argument from the environment: CONFORMANCE_DATA_DIR is the box's data directory.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import seed

from appliance.store.database import Database


@pytest.fixture(scope="session")
def seeded_store() -> Iterator[tuple[Database, Path]]:
    data_dir = Path(os.environ["CONFORMANCE_DATA_DIR"])
    with Database(data_dir / "appliance.db") as db:
        yield db, data_dir / "files"


@pytest.fixture(autouse=True)
def fresh_fixtures(seeded_store: tuple[Database, Path]) -> None:
    seed.reset(*seeded_store)
