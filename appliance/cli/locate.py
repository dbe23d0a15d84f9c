"""The box of a data directory on this machine: its state and configuration, and commands that run our modules."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance import DEFAULT_DATA_DIR
from appliance.cli.errors import BadUsage, Unreachable

if TYPE_CHECKING:
    from appliance.config import BoxConfig


@dataclass(frozen=True)
class BoxFile:
    """Content of `box.json` in a data directory, as appliance.boot.main.BoxState writes it."""

    data_dir: Path
    fields: dict[str, Any]

    @classmethod
    def read(cls, data_dir: str | Path | None) -> BoxFile:
        """Read the file; an absent file means a box that never ran."""
        folder = Path(data_dir or DEFAULT_DATA_DIR).expanduser().resolve()
        try:
            fields = json.loads((folder / "box.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            fields = {}
        except PermissionError as error:
            raise Unreachable(
                f"{folder} belongs to another user; reach its box with --url and an API key instead"
            ) from error
        return cls(folder, fields)

    @property
    def state(self) -> str:
        return self.fields.get("state", "stopped")

    @property
    def message(self) -> str:
        return self.fields.get("message") or ""

    @property
    def troubles(self) -> list[dict[str, Any]]:
        """Return troubles of supervised processes, in the form of `BackgroundTasks.degraded`."""
        return list(self.fields.get("troubles", []))

    @property
    def pid(self) -> int | None:
        """The main process's pid, None if it does not run. After a reboot the stored pid may be another process's. In a
        copy of the directory, or in containers, which count from 1, it may even be another box's main process."""
        pid = self.fields.get("pid")
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            config = Path(os.fsdecode(arguments[arguments.index(b"--config") + 1]))
        except (OSError, ValueError, IndexError):
            return None
        return pid if b"appliance.boot.main" in arguments and config.parent.resolve() == self.data_dir else None

    def controller_socket(self) -> str:
        """Return the controller's socket path. Raises Unreachable with the box's state if the box does not answer."""
        if self.pid is None:
            raise Unreachable(self.why_silent())
        socket_path = str(self.fields["controller_socket"])
        if not os.path.exists(socket_path) and (why := self.why_silent()):
            raise Unreachable(why)
        return socket_path

    def why_silent(self) -> str:
        """Return why the box does not answer now; "" if it should answer."""
        now = BoxFile.read(self.data_dir)
        box, start = f"the box on {self.data_dir}", f"`appliance up{data_dir_option(self.data_dir)}` starts it"
        if now.pid is not None:
            moves = now.state in ("starting", "stopping")
            return f"{box} is {now.state}: {now.message or 'one moment'}" if moves else ""
        if not now.fields:
            return f"no box on {self.data_dir}; {start}, --url or --data-dir name another"
        return f"{box} does not run{f': {now.fault}' if now.fault else ''}; {start} and continues its work"

    @property
    def fault(self) -> str:
        """Why a stopped box ended, "" after a normal end."""
        if self.state == "failed":
            return f"it did not start: {self.message}"
        if self.state == "stopped":
            return f"it ended: {self.message}" if self.message else ""
        return f"it was killed while {self.state}"


def data_dir_option(data_dir: Path) -> str:
    """Return the option by which a command names this directory; "" for the default directory."""
    default = Path(DEFAULT_DATA_DIR).expanduser().resolve()
    return "" if data_dir == default else f" --data-dir {shlex.quote(str(data_dir))}"


def resolved(config: Path | None, devices: str | None = None, **box: Any) -> BoxConfig:
    """Load the configuration with [box] settings from the command line. devices: auto or a number. Raises BadUsage."""
    look_for_all()
    from appliance.config import ConfigError, load_config  # imported here because pydantic doubles the time of `--help`

    number = int(devices) if devices and devices.isascii() and devices.isdigit() else devices
    try:
        return load_config(config, {**box, "devices": number})
    except ConfigError as error:
        raise BadUsage(str(error)) from error


def python(module: str, *arguments: str) -> list[str]:
    """Return a command line that runs a module of this software, whose import takes long, as a process."""
    look_for_all()
    # -P: a local folder called `train` or `serve` must not hide the installed package.
    return [sys.executable, "-P", "-m", module, *arguments]


def look_for_all() -> None:
    """Raise BadUsage if only the client is installed (the extra `client`)."""
    if importlib.util.find_spec("ray") is None:
        raise BadUsage(
            "this command is for a box on this machine, but only the client is installed (appliance[client]); commands "
            "with --url can use a box elsewhere"
        )
