"""The start of an engine's HTTP server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from serve.core.errors import EngineFailed
from serve.engine.main import until_started


@pytest.mark.parametrize("error", [OSError("address in use"), None])
async def test_server_that_ends_before_it_listens_fails_the_start(error):
    async def serve():
        if error is not None:
            raise error

    with pytest.raises(type(error or EngineFailed("silent"))):
        await until_started(SimpleNamespace(started=False), asyncio.create_task(serve()))
