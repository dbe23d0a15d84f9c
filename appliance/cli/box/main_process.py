"""Starting the box's main process and stopping it; that process is `appliance.boot.main`, never imported here."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from appliance.cli.errors import CommandFailed, Conflict, WaitTimedOut
from appliance.cli.locate import BoxFile, data_dir_option
from appliance.paths import BoxPaths, UnsafeFolder, check_closed
from runtime.replace_file import replace_file

_LOOK_EVERY_S = 0.1
_TAIL_BYTES = 3000
_OF_A_BOX = {"appliance.db", "appliance.toml", "box.json", "logs"}
"""One of these is in a directory where a box has run, has been configured or was restored."""


class MainProcess:
    """The main process of a box that this command started."""

    def __init__(self, config_json: str, data_dir: Path, *, detach: bool):
        """Raises Conflict if a box runs on `data_dir` already, CommandFailed if others may write to it.

        The process gets a session of its own: Ctrl-C must reach the box once, from this command, and not also from the
        terminal. A box in the foreground ends in order when its command is killed; a detached one writes to
        logs/main.log.
        """
        running = BoxFile.read(data_dir)
        if running.pid is not None:
            known = f"{running.state}, {running.url}/v1, pid {running.pid}"
            raise Conflict(
                f"a box runs on {data_dir} already ({known}); `appliance down{data_dir_option(data_dir)}` stops it"
            )
        self._data_dir, self._detach = data_dir, detach
        self.log_path = data_dir / "logs" / "main.log"
        if data_dir.exists():
            inside = {path.name for path in data_dir.iterdir()}
            if inside - {"lost+found"} and not inside & _OF_A_BOX:
                raise CommandFailed(f"{data_dir} is not empty and not a box's; name an empty directory, or a new one")
            try:
                check_closed(data_dir)  # before it is closed: what others have put there would stay
            except UnsafeFolder as error:
                raise CommandFailed(str(error)) from error
        self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data_dir.chmod(0o700)
        config_file = BoxPaths.of(data_dir).config_file
        replace_file(config_file, config_json.encode())
        from runtime.processes.kernel import die_with_parent

        end_with_command = partial(die_with_parent, os.getpid(), signal.SIGTERM)
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if detach else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "appliance.boot.main", "up", "--config", str(config_file)],
                cwd=data_dir,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                preexec_fn=None if detach else end_with_command,
            )
        finally:
            if log is not None:
                os.close(log)

    def wait_until_ready(self, on_message: Callable[[str], None]) -> dict[str, Any]:
        """Returns what the process announces: {"url", "first_key_file"}. Raises CommandFailed or Conflict if it
        ends."""
        buffer = b""
        while b"\n" not in buffer:
            if select.select([self._process.stdout], [], [], _LOOK_EVERY_S)[0]:
                piece = os.read(self._process.stdout.fileno(), 65536)
                if not piece:
                    raise self._ended()
                buffer += piece
            state = BoxFile.read(self._data_dir)
            if state.fields.get("pid") == self._process.pid and state.message:
                on_message(state.message)
        return json.loads(buffer.partition(b"\n")[0])

    def stop(self) -> None:
        """Ask it to end in order; asked twice it ends at once."""
        self._process.terminate()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait()

    def _ended(self) -> CommandFailed | Conflict:
        code = self._process.wait()
        if code == Conflict.exit_code:
            down = f"appliance down{data_dir_option(self._data_dir)}"
            return Conflict(f"a box runs on {self._data_dir} already; `{down}` stops it")
        box = BoxFile.read(self._data_dir)
        if box.state == "failed":
            return CommandFailed(f"the box did not start: {box.message}")
        told = f"; {self.log_path} ends with:\n{_tail(self.log_path)}" if self._detach else ""
        return CommandFailed(f"the box did not start (exit code {code}){told}")


def stop_box(box: BoxFile, *, timeout_s: float, kill: bool, on_message: Callable[[str], None]) -> bool:
    """Returns when the box of this data directory has ended: False if none ran. Raises WaitTimedOut."""
    pid = box.fields.get("pid")
    if not isinstance(pid, int):
        return False
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # The pid cannot become another process's from here on; before, it may have.
        if box.pid is None:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL if kill else signal.SIGTERM)
        deadline_s = time.monotonic() + timeout_s
        while not select.select([handle], [], [], _LOOK_EVERY_S)[0]:
            if time.monotonic() > deadline_s:
                raise WaitTimedOut(
                    f"the box on {box.data_dir} (pid {pid}) has not ended within {timeout_s:g} s and still "
                    f"stops; `appliance down{data_dir_option(box.data_dir)} --force` kills it"
                )
            on_message(BoxFile.read(box.data_dir).message)
        return True
    except ProcessLookupError:
        return True
    finally:
        os.close(handle)


def _tail(path: Path) -> str:
    with open(path, "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return log.read().decode(errors="replace").strip()
