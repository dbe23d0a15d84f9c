"""A second machine for tests: a node with its own data directory, address and, as root, network.

Both run on one machine. `Wire` gives the node a network namespace and a cable that can be cut.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.box_support import COMMAND, WholeBox, wait_for
from tests.train_support.tiny import make_model_dir

NOWHERE = "02:00:00:00:00:01"


class Wire:
    """A cable between this machine (address `home`) and a network namespace (address `away`). Needs root (OSError)."""

    def __init__(self) -> None:
        pid = os.getpid()
        self.name, self._here, self._there = f"ap-{pid}", f"ap{pid}h", f"ap{pid}a"
        self.home, self.away = f"10.213.{pid % 250}.1", f"10.213.{pid % 250}.2"
        self._ip("netns", "add", self.name)
        try:
            self._ip("link", "add", self._here, "type", "veth", "peer", "name", self._there, "netns", self.name)
            self._ip("addr", "add", f"{self.home}/30", "dev", self._here)
            self._ip("link", "set", self._here, "up")
            for command in (
                ("addr", "add", f"{self.away}/30", "dev", self._there),
                ("link", "set", self._there, "up"),
                ("link", "set", "lo", "up"),
                ("route", "add", "default", "via", self.home),
            ):
                self._ip("-n", self.name, *command)
        except OSError:
            self.remove()
            raise

    @property
    def inside(self) -> tuple[str, ...]:
        """Prefix of a command that runs in the namespace."""
        return "nsenter", f"--net=/var/run/netns/{self.name}", "--"

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Drop the packets of both sides silently, as behind a failed switch."""
        ends = ((("neigh",), self.away, self._here), (("-n", self.name, "neigh"), self.home, self._there))
        for where, other, device in ends:
            self._ip(*where, "replace", other, "lladdr", NOWHERE, "dev", device, "nud", "permanent")
        try:
            yield
        finally:
            for where, other, device in ends:
                self._ip(*where, "del", other, "dev", device)

    def remove(self) -> None:
        with suppress(OSError):
            self._ip("link", "del", self._here)
        with suppress(OSError):
            self._ip("netns", "del", self.name)

    @staticmethod
    def _ip(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class OtherMachine(WholeBox):
    """A node that joins a box, without an endpoint, but with its own logs, processes and files."""

    process: subprocess.Popen | None = None

    def __init__(self, data_dir: Path, address: str, wire: Wire | None = None):
        super().__init__(data_dir)
        self.address = address
        self._inside = () if wire is None else wire.inside

    def main_pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def die(self) -> None:
        """Kill all processes at once, as in a power loss, so that none can report it."""
        assert self.process is not None
        self.note_segments()
        pids = list(self.running())
        for sig in (signal.SIGSTOP, signal.SIGKILL):
            for pid in {self.process.pid, *pids}:
                with suppress(ProcessLookupError):
                    os.kill(pid, sig)
        self.process.wait(60)

    def join(self, invitation: Path, *, devices: int = 2) -> None:
        # Run it in a folder that has a package with the name of one of ours, as users may.
        (self.data_dir / "cwd" / "train").mkdir(parents=True, exist_ok=True)
        (self.data_dir / "cwd" / "train" / "__init__.py").write_text("raise ImportError('the wrong one')")
        with open(self.data_dir / "join.log", "ab") as log:
            self.process = subprocess.Popen(
                [*self._inside, COMMAND, "join", str(invitation), "--devices", str(devices)],
                stdout=log,
                stderr=log,
                env=self.environment(),
                cwd=self.data_dir / "cwd",
                start_new_session=True,
            )


@contextmanager
def two_machines(
    folder: Path, home_address: str, away_address: str, wire: Wire | None = None
) -> Iterator[tuple[WholeBox, OtherMachine]]:
    """A running box with one device at `home_address`, and a machine that may join. Both are stopped at the end."""
    home, away = WholeBox(folder / "home"), OtherMachine(folder / "away", away_address, wire)
    with socket.socket() as probe:
        probe.bind((home_address, 0))
        port = probe.getsockname()[1]
    for machine in (home, away):
        machine.data_dir.mkdir()
    (home.data_dir / "appliance.toml").write_text(
        f'[box]\nnode_address = "{home_address}"\nnode_port = {port}\ndevices = 1\nstart_timeout_s = 300\n'
        "[serve]\nmax_replicas = 4\nstart_timeout_s = 400\n"
    )
    try:
        home.up()
        yield home, away
        home.run("down")
        assert home.left() == []
        if away.process is not None:
            wait_for(lambda: away.process.poll() is not None, "the other node to end with its box", 60)
        assert away.left() == []
        for machine in (home, away):
            wait_for(lambda one=machine: not one.segments_left(), "segments without a process to be gone", 10)
    finally:
        away.destroy()
        home.destroy()


def deploy_tiny(home: WholeBox) -> None:
    tiny = make_model_dir(home.data_dir / "tiny", hidden_size=128, intermediate_size=256)
    assert home.ask("model", "import", str(tiny), "--name", "tiny")["state"] == "succeeded"
    home.run("model", "deploy", "tiny", "--min-replicas", "1")
    wait_for(lambda: places(home), "an engine at home", 600)


def invited(home: WholeBox, address: str, name: str = "n1") -> Path:
    """Create an invitation for a machine at this address."""
    file = home.data_dir.parent / f"{name}.json"
    file.write_text(home.run("node", "invite", name, address))
    return file


def devices(home: WholeBox) -> list[str]:
    """Ids of the devices that are not lost."""
    return sorted(device["id"] for device in home.admin("status")["devices"] if device["health"] != "lost")


def holder_of(home: WholeBox, device_id: str) -> str | None:
    (holder,) = [d["holder"] for d in home.admin("status")["devices"] if d["id"] == device_id] or [None]
    return holder["id"] if holder else None


def places(home: WholeBox) -> list[str]:
    """Devices of the engines that take requests."""
    replicas = home.admin("status")["replicas"]
    return sorted(device for one in replicas if one["state"] == "open" for device in one["devices"])
