"""Finds the box of a data directory on this machine."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance import DEFAULT_DATA_DIR
from appliance.cli.errors import Unreachable


@dataclass(frozen=True)
class BoxFile:
    """What `box.json` of a data directory says of the box there; see appliance.boot.box_state for the fields."""

    data_dir: Path
    fields: dict[str, Any]

    @classmethod
    def read(cls, data_dir: str | Path | None) -> BoxFile:
        """An absent file reads as a box that never ran."""
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
    def pid(self) -> int | None:
        """The main process's pid, None if it does not run. A pid from before a reboot may be another process's now. It
        may even be another box's main process: in a copy of the directory, or in containers, which count from 1."""
        pid = self.fields.get("pid")
        return pid if isinstance(pid, int) and is_main_process(pid, self.data_dir) else None

    @property
    def url(self) -> str:
        """The gateway's URL as this machine reaches it, without /v1."""
        url = str(self.fields.get("url", "")).removesuffix("/v1").rstrip("/")
        return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:").replace("//:::", "//[::1]:")

    def controller_socket(self) -> str:
        """Raises Unreachable, saying what the box is doing instead, when no box runs there."""
        if self.pid is None:
            raise Unreachable(self._why_not_running())
        socket_path = str(self.fields["controller_socket"])
        if not os.path.exists(socket_path) and self.state in ("starting", "stopping"):
            raise Unreachable(self._moving())
        return socket_path

    def asking_socket(self) -> str:
        """Where the gateway takes what the box itself asks. Raises Unreachable."""
        return str(Path(self.controller_socket()).with_name("asking.sock"))

    def why_silent(self) -> str:
        """Why a box that runs answers nothing at the moment, "" if it should answer."""
        now = BoxFile.read(self.data_dir)
        if now.pid is None:
            return now._why_not_running()
        return now._moving() if now.state in ("starting", "stopping") else ""

    def _moving(self) -> str:
        return f"the box on {self.data_dir} is {self.state}: {self.message or 'one moment'}"

    def _why_not_running(self) -> str:
        start = f"`appliance up{data_dir_option(self.data_dir)}` starts it"
        if not self.fields:
            return f"no box on {self.data_dir}; {start}, --url or --data-dir name another"
        if self.state == "failed":
            return f"the box on {self.data_dir} did not start: {self.message}"
        if self.state == "stopped":
            why = f", not in order: {self.message}" if self.message else ""
            return f"the box on {self.data_dir} is stopped{why}; {start}"
        return f"the box on {self.data_dir} was killed while {self.state}; {start} and continues its work"


def is_main_process(pid: int, data_dir: Path) -> bool:
    """Whether this living process is the main process of the box on this data directory."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"appliance.boot.main" not in arguments:
            return False
        return Path(os.fsdecode(arguments[arguments.index(b"--config") + 1])).parent.resolve() == data_dir
    except (OSError, ValueError, IndexError):
        return False


def data_dir_option(data_dir: Path) -> str:
    """What a command for the box on this directory has to be given; "" for the default one."""
    default = Path(DEFAULT_DATA_DIR).expanduser().resolve()
    return "" if data_dir == default else f" --data-dir {shlex.quote(str(data_dir))}"
