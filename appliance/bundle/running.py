"""Finds the running box of a data directory, ends it and starts it again, by commands of its releases.

Only a release's commands stay the same between releases, so nothing else of a release is called here.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.bundle.carried.errors import BundleError, Refused
from appliance.cli.locate import BoxFile

PROC = Path("/proc")
_LOOK_EVERY_S = 1.0
_PREFIX = "APPLIANCE_"


class NotUp(BundleError):
    """A release did not come up in time, or at all."""


@dataclass(frozen=True)
class Running:
    """How a running box was started. options: of `up`. environment: variables that configure the box. detached: `up
    --detach` started it, so somebody has to start it again; otherwise its supervisor does."""

    data_dir: Path
    user: int
    options: tuple[str, ...]
    environment: dict[str, str]
    detached: bool

    @classmethod
    def on(cls, data_dir: Path) -> Running | None:
        """Returns None if no box runs there. Raises Refused if nobody would start the box again."""
        pid = BoxFile.read(data_dir).pid
        if pid is None:
            return None
        process = PROC / str(pid)
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            box: dict[str, Any] = json.loads(arguments[arguments.index(b"--config-json") + 1])["box"]
            variables = [one.decode().partition("=") for one in (process / "environ").read_bytes().split(b"\0") if one]
            errors = os.readlink(process / "fd" / "2")
            groups, user = (process / "cgroup").read_text(), process.stat().st_uid
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise Refused(f"the box on {data_dir} (pid {pid}) cannot be looked at: {error}; is it yours?") from error
        detached = Path(errors) == data_dir / "logs" / "main.log"
        # The box's own service counts, not one that contains a whole session (user@1000.service).
        supervised = any(line.endswith(".service") for line in groups.splitlines())
        if not detached and not supervised:
            raise Refused(
                f"the box on {data_dir} runs in the foreground, and nobody would start it again: end it (Ctrl-C), call "
                "this again, then start it"
            )
        options = [item for name in ("host", "port", "devices") for item in (f"--{name}", str(box[name]))]
        environment = {name: value for name, _, value in variables if name.startswith(_PREFIX)}
        return cls(data_dir, user, tuple(options), environment, detached)

    def stop(self, command: Path, timeout_s: float) -> None:
        """Stops the box: requests finish, jobs are suspended. Raises NotUp if it does not end."""
        self._call(command, "down", "--timeout", str(timeout_s))

    def start(self, command: Path, version: str, timeout_s: float) -> None:
        """Returns when the box of this release answers. Raises NotUp."""
        if self.detached:
            self._call(command, "up", "--detach", *self.options)
        deadline_s = time.monotonic() + timeout_s
        last = ""
        while True:
            try:
                found = json.loads(self._call(command, "status", "-o", "json"))["box"]["version"]
                if found == version:
                    return
                last = f"release {found} answers"
            except (NotUp, ValueError, KeyError) as error:
                last = str(error)
            if self.detached or time.monotonic() > deadline_s:
                raise NotUp(f"release {version} does not answer: {last}")
            time.sleep(_LOOK_EVERY_S)

    def _call(self, command: Path, name: str, *options: str) -> str:
        """Runs a command as the user of the box, who then owns what it makes in the box's folders."""
        user: dict[str, Any] = {}
        if self.user != os.geteuid():
            user = {"user": self.user, "group": self.data_dir.stat().st_gid, "extra_groups": []}
        done = subprocess.run(
            [str(command), name, "--data-dir", str(self.data_dir), *options],
            capture_output=True,
            text=True,
            # A PYTHONPATH that somebody set for another Python must not hide the release's own modules.
            env={**os.environ, **self.environment, "PYTHONPATH": ""},
            cwd="/",
            **user,
        )
        if done.returncode != 0:
            raise NotUp((done.stderr or done.stdout).strip() or f"`appliance {name}` ended with {done.returncode}")
        return done.stdout
