"""Where a box keeps what: one data directory on disk, one root in shared memory."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from runtime.replace_file import replace_file

SHM_MOUNT = Path("/dev/shm")
QUARANTINE = "quarantine"


class UnsafeFolder(RuntimeError):
    """A folder that must be this user's alone is somebody else's; the message says what to do."""


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
    def config_file(self) -> Path:
        """The resolved configuration of the box or node, 0600: its processes read it there."""
        return self.data_dir / "config.json"

    @property
    def lock_file(self) -> Path:
        return self.data_dir / "box.lock"

    @property
    def last_backup(self) -> Path:
        """What the newest backup was and where it is, for people."""
        return self.data_dir / "last-backup.json"

    @property
    def database(self) -> Path:
        return self.data_dir / "appliance.db"

    @property
    def ray_token(self) -> Path:
        return self.data_dir / "ray.token"

    @property
    def certificates(self) -> Path:
        """This node's key and certificate; at home those of the box's authority too, and the tokens it gave out."""
        return self.data_dir / "ca"

    @property
    def join_tokens(self) -> Path:
        return self.certificates / "tokens"

    @property
    def first_key(self) -> Path:
        """The key that a box without any made for its owner."""
        return self.data_dir / "first-key"

    @property
    def files(self) -> Path:
        return self.data_dir / "files"

    @property
    def models(self) -> Path:
        return self.data_dir / "models"

    @property
    def snapshots(self) -> Path:
        return self.data_dir / "snapshots"

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
    def quarantine(self) -> Path:
        """What no row of the database named at a start; only a person deletes it."""
        return self.data_dir / QUARANTINE

    @property
    def logs(self) -> Path:
        return self.data_dir / "logs"

    @property
    def tracking(self) -> Path:
        """How far experiment trackers have heard of which jobs, and W&B's files."""
        return self.data_dir / "tracking"

    @property
    def caches(self) -> Path:
        """What engines and ranks compiled for their GPUs, to be found again by the next ones; safe to delete."""
        return self.data_dir / "cache"

    @property
    def run(self) -> Path:
        return self.shm_root / "run"

    @property
    def controller_socket(self) -> Path:
        """The controller's socket for people of this machine who own the box, and for its main process."""
        return self.run / "controller.sock"

    @property
    def gateway_socket(self) -> Path:
        """The controller's socket for gateways, where nobody is anybody without saying so."""
        return self.run / "gateway.sock"

    @property
    def asking_socket(self) -> Path:
        """The gateway's socket for the box itself, where a request names the key it is for by its id."""
        return self.run / "asking.sock"

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
    def worlds(self) -> Path:
        """Files by which the ranks of a job find each other (train.control.rank_host.WORLDS)."""
        return self.run / "worlds"

    @property
    def ray_session(self) -> Path:
        """Ray's own folder. Its agents open to everybody what they make below it: nobody else gets into this one."""
        return self.run / "ray"

    @property
    def ray_logs(self) -> Path:
        """Logs of Ray's processes: on disk, for they grow."""
        return self.logs / "ray"

    @property
    def replica_sockets(self) -> Path:
        return self.run / "r"

    def create(self) -> None:
        """Make every directory, 0700, and the Ray token, 0600. Raises UnsafeFolder."""
        for folder in (self.data_dir, self.files, self.models, self.jobs, self.batches, self.uploads, self.logs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_closed(folder)
        check_way_to(self.data_dir)
        self.shm_root.mkdir(mode=0o700, exist_ok=True)
        _check_ours(self.shm_root)
        self.shm_root.chmod(0o700)
        for folder in (self.run, self.replica_sockets):
            folder.mkdir(mode=0o700, exist_ok=True)
        if not self.ray_token.exists():
            write_secret(self.ray_token, secrets.token_hex(32))

    def renew_ray_token(self) -> None:
        """Before Ray begins, on a box that no other node may join. Raises OSError: the old one stays."""
        replace_file(self.ray_token, secrets.token_hex(32).encode())

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


def _check_ours(folder: Path) -> None:
    """Everybody may make folders where this one lies, and its name can be guessed: it may have been made for us."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise UnsafeFolder(
            f"{folder} is not a folder of user {os.geteuid()}, as which the box runs, but was made by user "
            f"{status.st_uid}; remove it, or give the box another --data-dir, which gives it another name"
        )


def check_closed(folder: Path) -> None:
    """Whoever may write here can put in place what the box trusts: its token for Ray, or what engines compiled. It may
    lie where everybody makes folders, so that somebody else made it first. Root's own are root's to give.

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


def check_way_to(folder: Path) -> None:
    """Whoever may rename a folder above this one puts another in its place, with a ray.token that he knows, whatever
    the modes of what is in it. `folder` is resolved. Raises UnsafeFolder."""
    for above in folder.parents:
        status = os.stat(above)
        if status.st_uid not in (os.geteuid(), 0) and not _is_of_nobody_here(status.st_uid):
            raise UnsafeFolder(
                f"{folder} lies in {above}, which belongs to user {status.st_uid}, not to user {os.geteuid()}, as "
                "which the box runs: that user could put another folder in its place. Give the box another --data-dir"
            )
        # In a folder with the sticky bit, as /tmp, nobody renames what is another's.
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise UnsafeFolder(
                f"{folder} lies in {above}, where every user of this machine may put another folder in its place (mode "
                f"{stat.S_IMODE(status.st_mode):o}); close it: chmod o-w {above}"
            )


def _is_of_nobody_here(user: int) -> bool:
    """In a user namespace, as of a container without root, all users of outside have one number, root too."""
    outside = int(Path("/proc/sys/kernel/overflowuid").read_text())
    return user == outside and Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
