"""The control app on a TCP port of this machine, served by uvicorn on a thread, with a simulated rest of the box."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from appliance.controller.app import create_app
from appliance.controller.interfaces.principal import Listener
from appliance.store.database import Database
from tests.simulator.control_plane import simulated_context


@contextlib.contextmanager
def served_app(folder: Path) -> Iterator[str]:
    """Base URL of the app; its data directory is `folder`. It has stopped on return."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready = threading.Event()
    servers: list[uvicorn.Server] = []

    def serve() -> None:
        # The database belongs to the thread that opens it.
        with Database(folder / "appliance.db") as db:
            app = create_app(simulated_context(folder, db))
            config = uvicorn.Config(Listener(app), log_level="warning", loop="asyncio", lifespan="on")
            servers.append(uvicorn.Server(config))
            ready.set()
            servers[0].run(sockets=[listener])

    thread = threading.Thread(target=serve, name="served app")
    thread.start()
    try:
        if not ready.wait(30):
            raise TimeoutError("the control app did not start within 30 s")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(30)
        listener.close()
