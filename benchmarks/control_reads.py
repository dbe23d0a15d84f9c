"""What reading costs on the controller: a short list by itself, and a neighbour's requests while one owner lists all
that its pages may hold.

    python benchmarks/control_reads.py [--against CHECKOUT] [--rounds 3]

The controller's app is served as on a box, by uvicorn on a Unix socket, in a process of its own; beside it stands the
simulated rest of the box. `--against` runs another checkout of this repository in turn with this one, so that both see
the same machine. Latency is a client's, in milliseconds; processor time is the server's, for each request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
ROWS, SHORT_LISTS, NEIGHBOURS, AT_ONCE = 40, 400, 150, 4
PAUSE_S = 0.01
_VALUES = 2_000
"""In the JSON of one of the long rows."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, run in turn with this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs=2, type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        return _serve(*asked.serve)
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(asked.rounds):
        for name, checkout in (("before", asked.against), ("now", REPOSITORY)):
            if checkout is not None:
                found.setdefault(name, []).append(_measured(checkout.resolve()))
    names = list(found)
    print(f"| milliseconds, medians of {asked.rounds} rounds | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for what in found["now"][0]:
        medians = (statistics.median(one[what] for one in found[name]) for name in names)
        print(f"| {what} | {' | '.join(f'{median:.2f}' for median in medians)} |")
    return 0


def _measured(checkout: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, _server(checkout, Path(folder)) as (path, pid):
        return asyncio.run(_ask(path, pid))


@contextmanager
def _server(checkout: Path, folder: Path) -> Iterator[tuple[str, int]]:
    path = folder / "controller.sock"
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(path), str(folder)]
    server = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(checkout)}, cwd=checkout)
    try:
        while not _listens(path):
            if server.poll() is not None:
                raise RuntimeError(f"the server of {checkout} ended with {server.returncode}")
            time.sleep(0.05)
        yield str(path), server.pid
    finally:
        server.terminate()
        server.wait()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as tried:
        return tried.connect_ex(str(path)) == 0


async def _ask(path: str, pid: int) -> dict[str, float]:
    found: dict[str, float] = {}
    async with _Client(path, "ann") as ann, _Client(path, "bob") as bob:
        await _times(bob, "/v1/files?limit=20", 20)
        before_s = _cpu_s(pid)
        took = await _times(bob, "/v1/files?limit=20", SHORT_LISTS)
        found |= _told("list of 20 small rows", took)
        found["list of 20 small rows, processor"] = (_cpu_s(pid) - before_s) / SHORT_LISTS * 1e3
        found |= _told("longest page, alone", await _times(ann, "/v1/evals?limit=500", 10))
        done = asyncio.Event()
        listing = [asyncio.create_task(_list_on(path, done)) for _ in range(AT_ONCE)]
        for what, asked in (
            ("neighbour, nothing of the store", "/admin/v1/oidc"),
            ("neighbour, list of 20 small rows", "/v1/files?limit=20"),
        ):
            found |= _told(what, await _times(bob, asked, NEIGHBOURS, PAUSE_S))
        done.set()
        pages = sum(await asyncio.gather(*listing))
        found["longest pages listed meanwhile"] = float(pages)
    return found


async def _list_on(path: str, done: asyncio.Event) -> int:
    pages = 0
    async with _Client(path, "ann") as client:
        while not done.is_set():
            await client.get("/v1/evals?limit=500")
            pages += 1
    return pages


async def _times(client: _Client, path: str, count: int, pause_s: float = 0.0) -> list[float]:
    took = []
    for _ in range(count):
        await asyncio.sleep(pause_s)
        began_s = time.perf_counter()
        await client.get(path)
        took.append(time.perf_counter() - began_s)
    return took


def _told(what: str, took: list[float]) -> dict[str, float]:
    ordered = sorted(took)
    return {
        f"{what}, median": statistics.median(ordered) * 1e3,
        f"{what}, 99th of 100": ordered[int(len(ordered) * 0.99)] * 1e3,
    }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Client:
    """One connection, as a gateway's to the controller: heads that name a key."""

    def __init__(self, path: str, key: str):
        self._path = path
        self._head = f"host: box\r\nx-appliance-key-id: {key}\r\nx-appliance-scopes: fine_tuning,inference\r\n\r\n"

    async def __aenter__(self) -> _Client:
        self._reader, self._writer = await asyncio.open_unix_connection(self._path, limit=1 << 26)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def get(self, path: str) -> bytes:
        self._writer.write(f"GET {path} HTTP/1.1\r\n{self._head}".encode())
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        body = await self._reader.readexactly(int(head.partition("content-length: ")[2].partition("\r")[0]))
        if " 200 " not in head.partition("\r")[0]:
            raise RuntimeError(f"{path}: {head} {body[:500]!r}")
        return body


def _serve(path: Path, folder: Path) -> int:
    import uvicorn

    from appliance.controller.app import create_app
    from appliance.controller.http.peers import FromBox
    from appliance.store.database import Database
    from tests.simulator.control_plane import simulated_context

    with Database(folder / "appliance.db") as db:
        _fill(db)
        app = create_app(simulated_context(folder, db))
        config = uvicorn.Config(FromBox(app), uds=str(path), lifespan="off", log_level="warning", access_log=False)

        async def run() -> None:
            async with app.router.lifespan_context(app):
                await uvicorn.Server(config).serve()

        asyncio.run(run())
    return 0


def _fill(db: Any) -> None:
    """For both owners short files; for one of them evaluations, of which a page holds as many as it may."""
    from appliance.store.objects import evals, files
    from appliance.store.rows import EvalRow, FileRow

    schema = {f"field_{number}": number for number in range(_VALUES)}
    with db.transaction():
        for owner in ("ann", "bob"):
            for number in range(200):
                row = FileRow(f"file-{owner}{number}", "n.jsonl", "batch", 1, "0" * 64, "processed", 1.0, owner=owner)
                files.insert(db, row)
        for number in range(ROWS):
            evals.insert(db, EvalRow(f"eval_{number}", "n", 1.0, owner="ann", item_schema=schema))
    assert len(json.dumps(schema)) * ROWS > 1 << 20


if __name__ == "__main__":
    sys.exit(main())
