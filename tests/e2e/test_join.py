"""`appliance join`: a box and its second node on one machine, each with a data directory and an address of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess

import pytest

from tests.e2e.box_support import COMMAND, WholeBox, shared_memory_files, wait_for
from tests.train_support.tiny import make_model_dir

HOME, AWAY = "127.0.0.1", "127.0.0.2"
ENGINE_FILES = ("psm_", "vllm", "sem.", "torch")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


class OtherMachine(WholeBox):
    """A node that joins: no endpoint, but logs, processes and files of its own."""

    process: subprocess.Popen | None = None

    def join(self, head: str, token_file) -> None:
        # From a folder with a package called like one of ours, as a person may well be in.
        (self.data_dir / "cwd" / "train").mkdir(parents=True, exist_ok=True)
        (self.data_dir / "cwd" / "train" / "__init__.py").write_text("raise ImportError('the wrong one')")
        with open(self.data_dir / "join.log", "ab") as log:
            self.process = subprocess.Popen(
                [COMMAND, "join", head, "--name", "n1", "--address", AWAY, "--token-file", str(token_file),
                 "--devices", "2"], stdout=log, stderr=log, env=self.environment(), cwd=self.data_dir / "cwd",
                start_new_session=True,
            )  # fmt: skip


@pytest.fixture
def machines(tmp_path):
    before = shared_memory_files()
    home, away = WholeBox(tmp_path / "home"), OtherMachine(tmp_path / "away")
    with socket.socket() as probe:
        probe.bind((HOME, 0))
        port = probe.getsockname()[1]
    for machine in (home, away):
        machine.data_dir.mkdir()
    (home.data_dir / "appliance.toml").write_text(
        f'[box]\nnode_address = "{HOME}"\nnode_port = {port}\ndevices = 1\n[serve]\nmax_replicas = 3\n'
    )
    try:
        home.up()
        yield home, away, f"{HOME}:{port}"
        home.run("down")
        assert home.left() == []
        if away.process is not None:
            wait_for(lambda: away.process.poll() is not None, "the other node to end with its box", 60)
        assert away.left() == []
        assert {name for name in shared_memory_files() - before if name.startswith(ENGINE_FILES)} == set()
    finally:
        away.destroy()
        home.destroy()


def test_engines_on_another_node_and_the_loss_of_it(machines):
    home, away, head = machines
    tiny = make_model_dir(home.data_dir / "tiny", hidden_size=128, intermediate_size=256)
    assert home.ask("model", "import", str(tiny), "--name", "tiny")["state"] == "succeeded"
    home.run("model", "deploy", "tiny", "--min-replicas", "1")
    wait_for(lambda: places(home) == ["n0/0"], "an engine at home", 400)

    away.join(head, home.data_dir / "ray.token")
    wait_for(lambda: devices(home) == ["n0/0", "n1/0", "n1/1"], "the other node's devices", 300)
    refused = subprocess.run(
        [COMMAND, "join", head, "--name", "n2", "--address", AWAY, "--token-file", str(home.data_dir / "ray.token")],
        env=away.environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 5 and "already" in refused.stderr, refused

    home.run("model", "deploy", "tiny", "--min-replicas", "3")
    wait_for(lambda: places(home) == ["n0/0", "n1/0", "n1/1"], "engines on both nodes", 400)
    assert len(away.pids_logging_to("engine-*.log")) >= 2
    answers = {ask(home) for _ in range(12)}
    assert len(answers) == 1, "every engine says the same"
    served = [log for log in (away.data_dir / "logs").glob("engine-*.log") if "/v1/" in log.read_text()]
    print(f"\nengines of n1 that logged requests: {len(served)}")

    for pid in [int(line.split()[1]) for line in away.left() if line.startswith("process")]:
        os.kill(pid, signal.SIGKILL)  # the machine loses power
    away.process.wait(10)
    wait_for(lambda: devices(home) == ["n0/0"], "its devices to vanish", 60)
    wait_for(lambda: places(home) == ["n0/0"], "its engines to vanish", 60)
    assert {ask(home) for _ in range(4)} == answers

    away.join(head, home.data_dir / "ray.token")
    wait_for(lambda: places(home) == ["n0/0", "n1/0", "n1/1"], "engines on both nodes again", 400)
    assert {ask(home) for _ in range(6)} == answers
    away.process.send_signal(signal.SIGINT)
    assert away.process.wait(60) == 0
    assert away.left() == []
    wait_for(lambda: devices(home) == ["n0/0"], "its devices to vanish", 60)
    assert {ask(home) for _ in range(4)} == answers

    away.join(head, home.data_dir / "ray.token")
    wait_for(lambda: len(devices(home)) == 3, "the other node's devices", 300)


def devices(home) -> list[str]:
    return sorted(device["id"] for device in home.admin("status")["devices"])


def places(home) -> list[str]:
    """Devices of the engines that take requests."""
    replicas = home.admin("status")["replicas"]
    return sorted(device for one in replicas if one["state"] == "open" for device in one["devices"])


def ask(home) -> str:
    answer = home.client(max_retries=3).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "how many are 2 and 3"}], max_tokens=8, temperature=0
    )
    return answer.choices[0].message.content
