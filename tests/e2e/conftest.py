from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from serve.core.config import EngineConfig
from serve.engine.replica import Replica
from tests.e2e.engine_support import Box
from tests.train_support.world import WarmTrain, Workshop

# The longest files come first: begun last, one of them would go on alone in the end.
LONGEST = ("test_box.py", "test_train_world.py", "test_box_work.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session")
def engine_box() -> Iterator[Box]:
    """One warm parent for all engine tests of a session."""
    box = Box()
    try:
        yield box
    finally:
        box.close()


@pytest.fixture
async def replicas(engine_box: Box) -> AsyncIterator:
    """Makes replicas on the box and stops them, whatever happened."""
    made: list[Replica] = []

    def make(config: EngineConfig | None = None) -> Replica:
        made.append(Replica(str(engine_box.warm_socket), str(engine_box.logs), config))
        return made[-1]

    yield make
    for replica in made:
        await replica.stop()


@pytest.fixture(scope="session")
def warm_train() -> Iterator[WarmTrain]:
    """A warm parent of training ranks; its imports are paid once per session."""
    parent = WarmTrain().wait()
    yield parent
    parent.close()


@pytest.fixture
def shop(warm_train: WarmTrain, tmp_path: Path) -> Iterator[Workshop]:
    made = Workshop(warm_train, tmp_path)
    yield made
    made.close()
