"""images/slurm/appliance.sbatch on Debian's Slurm, with a controller, node daemon and munge that this test starts.

It needs root and `apt-get install slurmctld slurmd slurm-client munge`. Slurm only counts the eight GPUs that the
script requests; the box has two logical CPU devices.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from appliance.cli.locate import BoxFile
from tests.e2e.box_support import WholeBox, free_port, gsm8k, wait_for

SCRIPT = Path(__file__).parents[2] / "images" / "slurm" / "appliance.sbatch"
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")
SBIN = "/usr/sbin"
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not all(shutil.which(tool, path=f"{os.environ.get('PATH', '')}:{SBIN}") for tool in TOOLS),
        reason="no Slurm here (Debian: apt-get install slurmctld slurmd slurm-client munge)",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may start Slurm's daemons so"),
]
SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster of only this machine."""

    def __init__(self, folder: Path):
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment = {name: text for name, text in self.environment.items() if not name.startswith("APPLIANCE_")}

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=self.environment)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, log: Path, *options: str, **exported: str) -> str:
        names = ",".join(["ALL", *(f"{name}={text}" for name, text in exported.items())])
        return self.ask("sbatch", "--parsable", f"--output={log}", f"--export={names}", *options, str(SCRIPT)).strip()

    def state(self, job: str) -> tuple[str, str]:
        """The job's state and its exit code, "CODE:SIGNAL"."""
        told = dict(word.split("=", 1) for word in self.ask("scontrol", "show", "job", job).split() if "=" in word)
        return told["JobState"], told["ExitCode"]

    def ended(self, job: str, timeout_s: float = 240) -> tuple[str, str]:
        return wait_for(
            lambda: (now := self.state(job))[0] not in ("PENDING", "RUNNING", "COMPLETING") and now,
            "its end",
            timeout_s,
        )


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    folder.mkdir(mode=0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    ports = {"controller_port": free_port(), "node_port": free_port()}
    (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder, host=host, cpus=os.cpu_count(), **ports))
    for number in range(8):
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))  # in place of a device file
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-7]\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(128))
    one = Slurm(folder)
    sockets = [f"--socket={folder}/munge.socket", f"--key-file={key}", f"--seed-file={folder}/munge.seed"]
    files = [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log"]
    commands = (
        [f"{SBIN}/munged", "--foreground", "--force", *sockets, *files],
        [f"{SBIN}/slurmctld", "-D"],
        [f"{SBIN}/slurmd", "-D"],
    )
    daemons = []
    try:
        for command in commands:
            with open(folder / f"{Path(command[0]).name}.out", "wb") as out:
                daemons.append(subprocess.Popen(command, stdout=out, stderr=out, env=one.environment))
            if len(daemons) == 1:
                wait_for((folder / "munge.socket").exists, "munge", 20)
        wait_for(lambda: one.ask("sinfo", "--noheader", "--format=%T").strip() == "idle", "an idle node", 60)
        yield one
    finally:
        subprocess.run(["scancel", "--user=root"], capture_output=True, env=one.environment, timeout=60)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def answers(box: WholeBox) -> bool:
    key = box.data_dir / "first-key"
    if not box.key and key.exists():
        box.key = key.read_text().strip()
    return bool(box.key) and box.answers() and box.tried("status") is not None


def test_box_continues_in_next_slurm_job(tmp_path: Path) -> None:
    box = WholeBox(tmp_path / "box")
    box.data_dir.mkdir()
    (box.data_dir / "appliance.toml").write_text("[box]\ndevices = 2\nstart_timeout_s = 300\n")
    exported = {"DATA": str(box.data_dir), "PORT": str(box.port), "VENV": str(Path(sys.executable).parents[1])}
    log = tmp_path / "job.log"
    try:
        with slurm(tmp_path / "slurm") as cluster:
            began_s = time.monotonic()
            first = cluster.submit(log, **exported)
            wait_for(lambda: answers(box), "the box of the first job", 300)
            print(f"answers {time.monotonic() - began_s:.0f} s after sbatch")
            assert cluster.state(first)[0] == "RUNNING" and f"http://127.0.0.1:{box.port}/v1" in log.read_text()
            # The box has the machine exclusively.
            waiting = cluster.submit(tmp_path / "other.log", **exported | {"DATA": str(tmp_path / "other")})
            assert cluster.state(waiting)[0] == "PENDING"
            cluster.ask("scancel", waiting)
            # The batch script has exec'ed the box's command: no process is between Slurm and it.
            command = ["up", "--data-dir", str(box.data_dir)]
            (batch,) = [one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [])[2:5] == command]
            assert batch.environ()["SLURM_JOB_ID"] == first
            status = [f"{exported['VENV']}/bin/appliance", "status", "--data-dir", str(box.data_dir), "-o", "json"]
            told = cluster.ask("srun", "--overlap", f"--jobid={first}", *status)
            assert len(json.loads(told)["devices"]) == 2
            box.make_starter()
            box.set_mode(policy="train")
            job = box.submit("starter", box.upload(gsm8k("train", 48)), "--epochs 10 --batch-size 4")
            wait_for(lambda: len(box.losses(job)) >= 3, "the first steps", 300)
            box.note_segments()
            cluster.ask("scancel", "--batch", "--signal=TERM", first)
            assert cluster.ended(first) == ("COMPLETED", "0:0"), log.read_text()
            assert BoxFile.read(box.data_dir).state == "stopped" and not box.left(), box.left()

            # The next job ends by its time limit: the box gets a signal two minutes after the start.
            second = cluster.submit(log, "--time=5", **exported)
            wait_for(lambda: answers(box), "the box of the second job", 300)
            now = box.job(job)
            assert now["phase"] != "failed" and "starter" in {one.id for one in box.client().models.list().data}
            box.note_segments()
            assert cluster.ended(second) == ("COMPLETED", "0:0"), log.read_text()
            assert BoxFile.read(box.data_dir).state == "stopped" and not box.left(), box.left()

            third = cluster.submit(log, **exported)
            wait_for(lambda: answers(box), "the box of the third job", 300)
            wait_for(lambda: box.job(job)["phase"] == "succeeded", "the end of the training job", 600)
            steps = box.job(job)["total_steps"]
            assert sorted(box.losses(job)) == list(range(1, steps + 1)), "a step is missing"
            cluster.ask("scancel", "--batch", "--signal=TERM", third)
            assert cluster.ended(third) == ("COMPLETED", "0:0")
            assert not box.left(), box.left()
    finally:
        box.destroy()
