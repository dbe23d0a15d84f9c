"""Where a box keeps what: one data directory on disk, one root in shared memory."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

from weights.format.names import replace_file

SHM_MOUNT = Path("/dev/shm")


class UnsafeFolder(RuntimeError):
    """A folder that must be this user's alone is somebody else's; the message says what to do."""


class BoxPaths:
    """All paths of one box. Sockets live in shared memory because a Unix socket's path may have 107 bytes only,
    and a data directory can lie arbitrarily deep."""

    def __init__(self, data_dir: Path, shm_root: Path):
        self.data_dir, self.shm_root = data_dir, shm_root
        self.box_id = shm_root.name.removeprefix("appliance-")

        self.state_file = data_dir / "box.json"
        self.config_file = data_dir / "config.json"  # resolved, 0600: processes of the box or node read it there
        self.lock_file = data_dir / "box.lock"
        self.last_backup = data_dir / "last-backup.json"  # what the newest one was and where it is, for people
        self.database = data_dir / "appliance.db"
        self.ray_token = data_dir / "ray.token"
        self.certificates = data_dir / "ca"  # this node's; at home those of the box's authority too
        self.first_key = data_dir / "first-key"  # the key that a box without any made for its owner
        self.files = data_dir / "files"
        self.models = data_dir / "models"
        self.snapshots = data_dir / "snapshots"
        self.jobs = data_dir / "jobs"
        self.away_jobs = data_dir / "away-jobs"  # of a box, on a node that joined it; the box has what is needed
        self.batches = data_dir / "batches"
        self.uploads = data_dir / "uploads"
        self.logs = data_dir / "logs"
        self.ray_logs = self.logs / "ray"
        self.tracking = data_dir / "tracking"
        self.caches = data_dir / "cache"  # what engines and ranks compiled for their GPUs; safe to delete

        self.run = shm_root / "run"
        self.controller_socket = self.run / "controller.sock"  # for people of this machine who own the box
        self.gateway_socket = self.run / "gateway.sock"  # the controller's for gateways: everybody says who they are
        self.asking_socket = self.run / "asking.sock"  # the gateway's for the box: a request names its key by the id
        self.gateway_token = self.run / "gateway.token"  # proves that a gateway wrote the head of a request
        self.bus_socket = self.run / "bus.sock"
        self.adapter_socket = self.run / "adapters.sock"
        self.warm_serve_socket = self.run / "warm-serve.sock"
        self.warm_train_socket = self.run / "warm-train.sock"
        self.worlds = self.run / "worlds"  # by which the ranks of a job find each other (train.control.group)
        self.ray_session = self.run / "ray"  # Ray's agents open to everybody what they make: nobody else gets in here
        self.replica_sockets = self.run / "r"

    @classmethod
    def of(cls, data_dir: Path, shm_mount: Path = SHM_MOUNT) -> BoxPaths:
        """The same data directory always gets the same shared-memory root, so a restart finds its versions."""
        resolved = data_dir.expanduser().resolve()
        return cls(resolved, shm_mount / f"appliance-{hashlib.sha256(bytes(resolved)).hexdigest()[:8]}")

    def create(self) -> None:
        """Make every directory, 0700, and the Ray token, 0600. Raises UnsafeFolder."""
        for folder in (self.data_dir, self.files, self.models, self.jobs, self.batches, self.uploads, self.logs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_closed(folder)
        self.shm_root.mkdir(mode=0o700, exist_ok=True)
        check_closed(self.shm_root)
        self.shm_root.chmod(0o700)
        for folder in (self.run, self.replica_sockets):
            folder.mkdir(mode=0o700, exist_ok=True)
        if not self.ray_token.exists():
            replace_file(self.ray_token, secrets.token_hex(32).encode(), durable=True)  # each later run reads it


def check_closed(folder: Path) -> None:
    """Whoever may write here can put in place what the box trusts: its token for Ray, or what engines compiled. It may
    be where everybody makes folders, so that somebody else made it first. Root's own are root's to give.

    Raises UnsafeFolder."""
    status = os.stat(folder)
    if status.st_uid not in (os.geteuid(), 0):
        raise UnsafeFolder(
            f"{folder} was made by user {status.st_uid}, not by user {os.geteuid()}, as which the box runs; remove it, "
            "or give the box another --data-dir"
        )
    if status.st_mode & stat.S_IWOTH:
        raise UnsafeFolder(
            f"{folder} is open to every user of this machine (mode {stat.S_IMODE(status.st_mode):o}); look at what is "
            f"in it, then close it: chmod o-w {folder}"
        )
