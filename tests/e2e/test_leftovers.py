"""What a box leaves when all of its processes are killed at once, none of which could clean up: gone after the next
`up` and `down`."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from appliance.paths import BoxPaths
from tests.e2e.box_support import WholeBox, gsm8k, wait_for
from tests.train_support.tiny import make_model_dir

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def test_nothing_is_left_after_everything_was_killed(tmp_path):
    box = OwnFolders(tmp_path / "box")
    for folder in (box.data_dir, box.temporary):
        folder.mkdir()
    (box.data_dir / "appliance.toml").write_text("[box]\ndevices = 4\n")
    try:
        box.up()
        tiny = make_model_dir(box.data_dir / "tiny", hidden_size=128, intermediate_size=256)
        assert box.ask("model", "import", str(tiny), "--name", "tiny")["state"] == "succeeded"
        box.run("model", "deploy", "tiny", "--tensor-parallel", "2", "--min-replicas", "1", "--max-replicas", "1")
        (box.data_dir / "train.jsonl").write_bytes(gsm8k("train", 500))
        box.run("mode", "set", "split", "--train", "2", "--wait")
        job = box.submit("tiny", box.data_dir / "train.jsonl", "--epochs 50 --batch-size 4 --set max_length=256")
        wait_for(lambda: box.losses(job), "a step of the job", 300)
        wait_for(lambda: any(is_wide(replica) for replica in box.admin("status")["replicas"]), "an engine", 200)
        main = psutil.Process(box.main_pid())
        pids = [main.pid, *box.running()]
        send(signal.SIGSTOP, pids)  # none sees another die
        box.note_segments()
        used = {path for path in paths_of(pids) - paths_of([os.getpid()]) if str(box.data_dir) not in path}
        send(signal.SIGKILL, pids)
        # The kernel takes their memory back before they are gone: seconds on a machine that has other work.
        wait_for(lambda: not box.running() and not main.is_running(), "the killed to be gone", 120)
        print(f"\nleft by the kill: {[*box.left(), *sorted(box.segments_left() | there(used)), *box.made()]}")
        assert box.paths.shm_root.exists(), "a box that was killed leaves its versions"

        box.up()
        wait_for(lambda: box.admin("status")["devices"], "the devices", 60)
        box.run("down")
        assert box.left() == []
        assert (there(used), box.segments_left(), box.made()) == (set(), set(), [])
    finally:
        box.destroy()


def is_wide(replica) -> bool:
    return replica["state"] == "open" and len(replica["devices"]) == 2


class OwnFolders(WholeBox):
    """A box whose temporary files are in a folder of its own."""

    def __init__(self, data_dir: Path):
        super().__init__(data_dir)
        self.temporary = data_dir.with_name("temporary")
        self.paths = BoxPaths.of(data_dir)

    def environment(self) -> dict[str, str]:
        return super().environment() | {"TMPDIR": str(self.temporary)}

    def made(self) -> list[str]:
        """Its temporary files, but for torch's own cache of compiled code, which all programs of a user share."""
        return sorted(path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_"))


def send(sig: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, sig)


def paths_of(pids: list[int]) -> set[str]:
    """What these processes have open or map, and the sockets that they listen on, in shared memory and in /tmp: there
    somebody has to remove it."""
    used = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            process = psutil.Process(pid)
            used |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
            used |= {mapped.path for mapped in process.memory_maps()}
            used |= {one.laddr for one in process.net_connections("unix") if one.laddr}
    return {path for path in used if path.startswith(("/dev/shm/", "/tmp/"))}


def there(used: set[str]) -> set[str]:
    """Of these paths those that exist."""
    return {path for path in used if Path(path).exists()}
