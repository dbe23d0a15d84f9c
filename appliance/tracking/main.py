"""The exporter: a thread for each tracker of the configuration, which follows the store.

    python -m appliance.tracking.main --settings JSON

The box's main process starts it, and again when it ends (appliance/boot/tracking.py). `status.json` in its folder says
which trackers fail.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from appliance.cli.client import Address, Client
from appliance.cli.errors import CliError, NotFound
from appliance.tracking.follower import Failing, Follower, Tracker
from appliance.tracking.jobs import Jobs
from runtime.logs import configure_logging
from runtime.replace_file import replace_file

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
Settings = dict[str, Any]
"""database, folder, controller_socket: paths of the box; the others as [tracking] has them."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.tracking.main", description=__doc__)
    parser.add_argument("--settings", required=True, help="JSON")
    settings: Settings = json.loads(parser.parse_args(argv).settings)
    configure_logging("tracking")
    makers = {"mlflow": _mlflow} if settings["mlflow_uri"] else {}
    makers |= {"wandb": _wandb} if settings["wandb_mode"] else {}
    troubles: dict[str, Failing | None] = dict.fromkeys(makers)
    for name, make in makers.items():
        threading.Thread(target=_export, args=(name, make, settings, troubles), daemon=True).start()
    while True:
        found = [
            {
                "name": f"tracking: {name}",
                "since_s": trouble.since_s,
                "why": trouble.why,
                "failures": trouble.failures,
                "next_try_s": trouble.again_s,
            }
            for name, trouble in troubles.items()
            if trouble is not None
        ]
        replace_file(Path(settings["folder"]) / "status.json", json.dumps({"troubles": found}).encode())
        time.sleep(LOOK_EVERY_S)


def _export(
    name: str, make: Callable[[Settings], Tracker], settings: Settings, troubles: dict[str, Failing | None]
) -> None:
    """Follows the store for one tracker, for ever; a round that fails is tried again."""
    box = Client(Address(socket_path=settings["controller_socket"]))
    follower: Follower | None = None
    while True:
        try:
            if follower is None:
                tracker = make(settings)
                path = Path(settings["folder"]) / f"{name}.json"
                follower = Follower(tracker, Jobs(Path(settings["database"])), path, partial(_tell, box, tracker.name))
            follower.round()
            troubles[name] = min(follower.failing.values(), key=lambda one: one.since_s, default=None)
        except Exception as error:  # noqa: BLE001 - anything of a library
            log.warning("%s: %r", name, error)
            trouble = troubles[name] or Failing(time.time())
            troubles[name] = Failing(trouble.since_s, trouble.failures + 1, time.time() + LOOK_EVERY_S, str(error))
        time.sleep(LOOK_EVERY_S)


def _tell(box: Client, tracker: str, job_id: str, text: dict[str, str]) -> bool:
    try:
        box.post(f"/admin/v1/jobs/{job_id}/tracked", {"tracker": tracker, **text})
    except NotFound:
        return True  # the job was deleted meanwhile
    except CliError as error:
        log.warning("the box could not be told of a run: %s", error, extra={"job_id": job_id})
        return False
    return True


def _mlflow(settings: Settings) -> Tracker:
    try:
        from appliance.tracking.mlflow_tracker import MlflowTracker
    except ModuleNotFoundError as error:
        raise _not_installed("mlflow-skinny", error) from error
    return MlflowTracker(settings["mlflow_uri"], settings["mlflow_experiment"])


def _wandb(settings: Settings) -> Tracker:
    try:
        from appliance.tracking.wandb_tracker import WandbTracker
    except ModuleNotFoundError as error:
        raise _not_installed("wandb", error) from error
    return WandbTracker(settings["wandb_mode"], Path(settings["wandb_dir"]), settings["wandb_url"])


def _not_installed(package: str, error: ModuleNotFoundError) -> RuntimeError:
    return RuntimeError(
        f"{package} is not installed for {sys.executable} ({error}); docs/tracking.md says how to install it, and "
        "[tracking] python where"
    )


if __name__ == "__main__":
    sys.exit(main())
