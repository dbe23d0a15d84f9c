"""Two streams side by side (`--numprocesses 2 --dist loadgroup`), each busy with about one core: whole boxes, one at a
time; and engines and training, each with one warm parent for all. Files that need neither go to who is done first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from serve.config import EngineConfig
from serve.replica import Replica
from tests.e2e.engine_support import Box
from tests.train_support.world import WarmTrain, Workshop

STREAMS = {"box": "boxes", "crash": "boxes", "join": "boxes", "leftovers": "boxes", "standby": "boxes",
           "engine": "engines and training", "train": "engines and training"}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def stream(item: pytest.Item) -> str:
        """By the first word of the file's name."""
        return STREAMS.get(item.path.stem.split("_")[1], item.path.stem)

    order = list(dict.fromkeys(STREAMS.values()))
    items.sort(key=lambda item: order.index(stream(item)) if stream(item) in order else len(order))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(stream(item)))


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
