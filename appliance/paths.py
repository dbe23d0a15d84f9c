"""Where a box keeps what: one data directory on disk, one root in shared memory."""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

SHM_MOUNT = Path("/dev/shm")
UNIX_PATH_LIMIT_BYTES = 107


@dataclass(frozen=True)
class BoxPaths:
    """All paths of one box. Sockets live in shared memory because a Unix socket's path may have 107 bytes only,
    and a data directory can lie arbitrarily deep."""

    data_dir: Path
    shm_root: Path

    @classmethod
    def of(cls, data_dir: Path, shm_mount: Path = SHM_MOUNT) -> BoxPaths:
        """The same data directory always gets the same shared-memory root, so a restart finds its versions."""
        resolved = data_dir.expanduser().resolve()
        return cls(resolved, shm_mount / f"appliance-{hashlib.sha256(bytes(resolved)).hexdigest()[:8]}")

    @property
    def box_id(self) -> str:
        return self.shm_root.name.removeprefix("appliance-")

    @property
    def state_file(self) -> Path:
        return self.data_dir / "box.json"

    @property
    def lock_file(self) -> Path:
        return self.data_dir / "box.lock"

    @property
    def database(self) -> Path:
        return self.data_dir / "appliance.db"

    @property
    def ray_token(self) -> Path:
        return self.data_dir / "ray.token"

    @property
    def files(self) -> Path:
        return self.data_dir / "files"

    @property
    def models(self) -> Path:
        return self.data_dir / "models"

    @property
    def packed(self) -> Path:
        return self.data_dir / "packed"

    @property
    def jobs(self) -> Path:
        return self.data_dir / "jobs"

    @property
    def away_jobs(self) -> Path:
        """Folders of a box's jobs on a node that joined it; what is in them is at the box too, or of no more use."""
        return self.data_dir / "away-jobs"

    @property
    def batches(self) -> Path:
        return self.data_dir / "batches"

    @property
    def uploads(self) -> Path:
        return self.data_dir / "uploads"

    @property
    def logs(self) -> Path:
        return self.data_dir / "logs"

    @property
    def caches(self) -> Path:
        """What engines and ranks compiled for their GPUs, to be found again by the next ones; safe to delete."""
        return self.data_dir / "cache"

    @property
    def run(self) -> Path:
        return self.shm_root / "run"

    @property
    def controller_socket(self) -> Path:
        """For people of this machine who own the box, and for its main process."""
        return self.run / "controller.sock"

    @property
    def gateway_socket(self) -> Path:
        """For gateways: the controller's too, where nobody is anybody without saying so."""
        return self.run / "gateway.sock"

    @property
    def gateway_token(self) -> Path:
        """What proves to the controller that a gateway wrote the head of a request; new in each run of the box."""
        return self.run / "gateway.token"

    @property
    def bus_socket(self) -> Path:
        return self.run / "bus.sock"

    @property
    def adapter_socket(self) -> Path:
        return self.run / "adapters.sock"

    @property
    def warm_serve_socket(self) -> Path:
        return self.run / "warm-serve.sock"

    @property
    def warm_train_socket(self) -> Path:
        return self.run / "warm-train.sock"

    @property
    def replica_sockets(self) -> Path:
        return self.run / "r"

    def replica_socket(self, replica_id: str) -> Path:
        return self.replica_sockets / f"{replica_id}.sock"

    def create(self) -> None:
        """Make every directory, 0700, and the Ray token, 0600."""
        for folder in (self.data_dir, self.files, self.models, self.jobs, self.batches, self.uploads, self.logs,
                       self.shm_root, self.run, self.replica_sockets):  # fmt: skip
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.shm_root.chmod(0o700)
        if not self.ray_token.exists():
            write_secret(self.ray_token, secrets.token_hex(32))

    def renew_gateway_token(self) -> None:
        """Before the controller and the gateways of this run begin."""
        self.gateway_token.unlink(missing_ok=True)
        write_secret(self.gateway_token, secrets.token_hex(32))


def write_secret(path: Path, text: str) -> None:
    """A new file of mode 0600, on disk when this returns. Raises FileExistsError: nobody's file is written into."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(handle)
