"""The exporter: tells the trackers of the configuration of jobs, from where each left off.

    python -m appliance.tracking.main --settings JSON

The box's main process starts it, and again when it ends (appliance/boot/tracking.py). A tracker that is away or slow is
tried again for ever, with a growing pause; `status.json` in its folder says so to the main process, and nobody waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from appliance.cli.client import Address, Client
from appliance.cli.errors import CliError, NotFound
from appliance.tracking.errors import TrackerFailed
from appliance.tracking.follower import Failing, Follower, Tracker
from appliance.tracking.store_reader import StoreReader
from runtime.background_tasks import BackgroundTasks
from runtime.logs import configure_logging
from runtime.replace_file import replace_file

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
SLOW_S = 60.0


@dataclass(frozen=True)
class Settings:
    """database, folder, controller_socket: paths of the box; the others as [tracking] has them."""

    database: str
    folder: str
    controller_socket: str
    mlflow_uri: str | None
    mlflow_experiment: str
    wandb_mode: Literal["offline", "online"] | None
    wandb_dir: str
    wandb_url: str | None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.tracking.main", description=__doc__)
    parser.add_argument("--settings", required=True, help="JSON")
    settings = Settings(**json.loads(parser.parse_args(argv).settings))
    configure_logging("tracking")
    asyncio.run(_run(settings))
    return 0


async def _run(settings: Settings) -> None:
    folder, background = Path(settings.folder), BackgroundTasks()
    box = Client(Address(socket_path=settings.controller_socket))
    watches = []
    for key, name, make in _trackers(settings):
        follower = partial(_follower, make, StoreReader(Path(settings.database)), folder / f"{key}.json", box)
        watch = Watch(name, follower)
        watches.append(watch)
        background.keep_every(name, watch.round, LOOK_EVERY_S, at_once=True)
    await _report(folder / "status.json", background, watches)


def _trackers(settings: Settings) -> list[tuple[str, str, Callable[[], Tracker]]]:
    """(name of its file, name for people, what makes it), of those that are configured. Their libraries are imported
    when they are made."""
    found: list[tuple[str, str, Callable[[], Tracker]]] = []
    if settings.mlflow_uri is not None:
        found.append(("mlflow", "tracking: MLflow", partial(_mlflow, settings.mlflow_uri, settings.mlflow_experiment)))
    if settings.wandb_mode is not None:
        wandb = partial(_wandb, settings.wandb_mode, Path(settings.wandb_dir), settings.wandb_url)
        found.append(("wandb", "tracking: W&B", wandb))
    return found


def _mlflow(uri: str, experiment: str) -> Tracker:
    try:
        from appliance.tracking.mlflow_tracker import MlflowTracker
    except ModuleNotFoundError as error:
        raise _not_installed("mlflow-skinny", error) from error
    return MlflowTracker(uri, experiment)


def _wandb(mode: Literal["offline", "online"], folder: Path, url: str | None) -> Tracker:
    try:
        from appliance.tracking.wandb_tracker import WandbTracker
    except ModuleNotFoundError as error:
        raise _not_installed("wandb", error) from error
    return WandbTracker(mode, folder, url)


def _not_installed(package: str, error: ModuleNotFoundError) -> TrackerFailed:
    return TrackerFailed(
        f"{package} is not installed for {sys.executable} ({error}); docs/tracking.md says how to install it, and "
        "[tracking] python where"
    )


def _follower(make: Callable[[], Tracker], store: StoreReader, path: Path, box: Client) -> Follower:
    callbacks = (partial(_tell, box, kind) for kind in ("address", "refused"))
    return Follower(make(), store, path, *callbacks)


def _tell(box: Client, kind: str, job_id: str, tracker: str, text: str) -> bool:
    try:
        box.post(f"/admin/v1/jobs/{job_id}/tracked", {"tracker": tracker, kind: text})
    except NotFound:
        return True  # the job was deleted meanwhile
    except CliError as error:
        log.warning("the box could not be told of a run: %s", error, extra={"job_id": job_id})
        return False
    return True


class Watch:
    """One tracker's rounds, each on a thread: a library that waits for its server holds up nobody else."""

    def __init__(self, name: str, make: Callable[[], Follower], clock: Callable[[], float] = time.time):
        self._name, self._make, self._clock = name, make, clock
        self._follower: Follower | None = None
        self._failing: list[Failing] = []  # as the last round left them
        self._since_s: float | None = None

    async def round(self) -> None:
        self._since_s = self._clock()
        try:
            await asyncio.to_thread(self._round)
        finally:
            self._since_s = None

    def _round(self) -> None:
        if self._follower is None:
            self._follower = self._make()
        self._follower.round()
        self._failing = self._follower.failing

    def troubles(self) -> list[dict[str, Any]]:
        """In the form of `BackgroundTasks.degraded`: the round that takes longer than SLOW_S, if one does, or else that
        the tracker could not be told of some jobs."""
        since_s = self._since_s
        if since_s is not None and self._clock() - since_s >= SLOW_S:
            why = f"has not answered for {self._clock() - since_s:.0f} s; jobs go on, and it is told later"
            return [self._trouble(since_s, why, 1, None)]
        if not self._failing:
            return []
        first, jobs = self._failing[0], len(self._failing)
        why = f"{jobs} jobs could not be told of: {first.why}" if jobs > 1 else first.why
        return [self._trouble(first.since_s, why, first.failures, first.again_s)]

    def _trouble(self, since_s: float, why: str, failures: int, next_try_s: float | None) -> dict[str, Any]:
        return {"name": self._name, "since_s": since_s, "why": why, "failures": failures, "next_try_s": next_try_s}


async def _report(path: Path, background: BackgroundTasks, watches: list[Watch]) -> None:
    """Say what is in trouble, for ever."""
    while True:
        troubles = [trouble for watch in watches for trouble in watch.troubles()]
        names = {trouble["name"] for trouble in troubles}
        found = [*troubles, *(trouble for trouble in background.degraded() if trouble["name"] not in names)]
        try:
            replace_file(path, json.dumps({"troubles": found}).encode())
        except OSError as error:
            log.warning("%s could not be written: %s", path, error)
        await asyncio.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    sys.exit(main())
