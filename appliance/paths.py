"""All paths of a box: one data directory on disk, one root in shared memory."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

from weights.format.names import replace_file

SHM_MOUNT = Path("/dev/shm")


class UnsafeFolder(RuntimeError):
    """A folder that other users must not write belongs to them or is open to them; the message says what to do."""


class BoxPaths:
    """All paths of one box. Sockets are in shared memory because a Unix socket's path has at most 107 bytes, and a data
    directory may have a longer path."""

    def __init__(self, data_dir: Path, shm_root: Path):
        self.data_dir, self.shm_root = data_dir, shm_root
        self.box_id = shm_root.name.removeprefix("appliance-")

        self.state_file = data_dir / "box.json"
        self.config_file = data_dir / "config.json"  # resolved, mode 0600; all processes of the box or node read it
        self.lock_file = data_dir / "box.lock"
        self.last_backup = data_dir / "last-backup.json"  # record of the newest backup, for people to read
        self.database = data_dir / "appliance.db"
        self.ray_token = data_dir / "ray.token"
        self.certificates = data_dir / "ca"  # this node's certificate; on the box also the authority's
        self.first_key = data_dir / "first-key"  # the first API key, created for the owner of a new box
        self.files = data_dir / "files"
        self.models = data_dir / "models"
        self.snapshots = data_dir / "snapshots"
        self.jobs = data_dir / "jobs"
        self.away_jobs = data_dir / "away-jobs"  # on a joined node: temporary folders of jobs
        self.batches = data_dir / "batches"
        self.uploads = data_dir / "uploads"
        self.logs = data_dir / "logs"
        self.ray_logs = self.logs / "ray"
        self.tracking = data_dir / "tracking"
        self.caches = data_dir / "cache"  # kernels that engines and ranks compiled for GPUs; safe to delete

        self.run = shm_root / "run"
        self.controller_socket = self.run / "controller.sock"  # of the controller, for the box's owner
        self.gateway_socket = self.run / "gateway.sock"  # of the controller, for gateways, which name the caller
        self.asking_socket = self.run / "asking.sock"  # of the gateway, for the box itself, which sends a key's id
        self.gateway_token = self.run / "gateway.token"  # its token authenticates the gateway to the controller
        self.bus_socket = self.run / "bus.sock"
        self.adapter_socket = self.run / "adapters.sock"
        self.warm_serve_socket = self.run / "warm-serve.sock"
        self.warm_train_socket = self.run / "warm-train.sock"
        self.worlds = self.run / "worlds"  # rendezvous files of a job's ranks (train.control.group)
        self.ray_session = self.run / "ray"  # private, because Ray's agents create files that all users can read
        self.replica_sockets = self.run / "r"

    @classmethod
    def of(cls, data_dir: Path, shm_mount: Path = SHM_MOUNT) -> BoxPaths:
        """Return a box's paths; the shared-memory root depends only on `data_dir`, so a restart finds its versions."""
        resolved = data_dir.expanduser().resolve()
        return cls(resolved, shm_mount / f"appliance-{hashlib.sha256(bytes(resolved)).hexdigest()[:8]}")

    def create(self) -> None:
        """Create every directory (0700) and the Ray token (0600). Raises UnsafeFolder."""
        for folder in (self.data_dir, self.files, self.models, self.jobs, self.batches, self.uploads, self.logs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_closed(folder)
        self.shm_root.mkdir(mode=0o700, exist_ok=True)
        check_closed(self.shm_root)
        self.shm_root.chmod(0o700)
        for folder in (self.run, self.replica_sockets):
            folder.mkdir(mode=0o700, exist_ok=True)
        if not self.ray_token.exists():
            replace_file(self.ray_token, secrets.token_hex(32).encode(), durable=True)  # later runs reuse the token


def check_closed(folder: Path) -> None:
    """Refuse a folder that other users own or can write. They could plant files that the box trusts, such as its Ray
    token or compiled kernels, and may have created the folder first, in a place like /tmp. Folders of root are
    accepted. Raises UnsafeFolder."""
    status = os.stat(folder)
    if status.st_uid not in (os.geteuid(), 0):
        raise UnsafeFolder(
            f"{folder} belongs to user {status.st_uid}, but the box runs as user {os.geteuid()}; remove it, "
            "or give the box another --data-dir"
        )
    if status.st_mode & stat.S_IWOTH:
        raise UnsafeFolder(
            f"{folder} is writable by every user of this machine (mode {stat.S_IMODE(status.st_mode):o}); see what is "
            f"in it, then close it: chmod o-w {folder}"
        )
