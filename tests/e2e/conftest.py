from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import AsyncOpenAI

from serve.core.config import EngineConfig
from serve.core.spec import ReplicaSpec
from serve.engine.replica import Replica
from tests.e2e.engine_support import Box, client
from tests.train_support.world import WarmTrain, Workshop

# The longest files come first: a long file begun last would run alone at the end. No two box files in a row.
LONGEST = ("test_box.py", "test_train_world.py", "test_box_work.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


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
    """Factory of replicas on the box, all stopped after the test."""
    made: list[Replica] = []

    def make(config: EngineConfig | None = None) -> Replica:
        made.append(Replica(str(engine_box.warm_socket), str(engine_box.logs), config))
        return made[-1]

    yield make
    for replica in made:
        await replica.stop()


class Engine(NamedTuple):
    replica: Replica
    sdk: AsyncOpenAI
    spec: ReplicaSpec
    pid: int


@pytest.fixture
async def start(engine_box: Box, replicas: Callable[..., Replica]) -> Callable[..., Awaitable[Engine]]:
    """Starts an engine of a version, which is stopped after the test."""

    async def start(name: str, path: Path, config: EngineConfig | None = None, **spec_fields: Any) -> Engine:
        replica, spec = replicas(config), engine_box.spec(name, path, **spec_fields)
        return Engine(replica, client(spec), spec, (await replica.start(spec))["pid"])

    return start


@pytest.fixture
def a(engine_box: Box) -> Path:
    return engine_box.version("a", seed=1)


@pytest.fixture
def b(engine_box: Box) -> Path:
    return engine_box.version("b", seed=2)


@pytest.fixture(scope="session")
def warm_train() -> Iterator[WarmTrain]:
    """A warm parent of training ranks, so that imports run once per session."""
    parent = WarmTrain().wait()
    yield parent
    parent.close()


@pytest.fixture
def shop(warm_train: WarmTrain, tmp_path: Path) -> Iterator[Workshop]:
    made = Workshop(warm_train, tmp_path)
    yield made
    made.close()
