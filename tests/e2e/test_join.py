"""`appliance join`: a box and its second node on one machine, each with its own data directory and address."""

import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.box_support import COMMAND, answers_to_strangers, gsm8k, wait_for
from tests.e2e.machines_support import deploy_tiny, devices, holder_of, invited, places, two_machines

# Neither is 127.0.0.1, where Ray would listen only locally: like on a network.
HOME, AWAY = "127.0.0.2", "127.0.0.3"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000)]


@pytest.fixture
def machines(tmp_path):
    with two_machines(tmp_path, HOME, AWAY) as both:
        yield both


ALL = ["n0/0", "n1/0", "n1/1"]
NUMBERS, LONG = range(24), 400


def test_engines_on_second_node_survive_its_loss(machines):
    home, away = machines
    controller = home.pids_logging_to("controller.log")
    deploy_tiny(home)
    said = answers(home)
    join(home, away)
    listed = {device["id"]: device["health"] for device in home.ask("gpu", "list")["data"]}
    assert listed == dict.fromkeys(ALL, "ok")
    refused = subprocess.run(
        [COMMAND, "join", str(invited(home, AWAY, "n2"))],
        env=away.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert refused.returncode == 5 and "already" in refused.stderr, refused

    home.run("model", "deploy", "tiny", "--min-replicas", "3")
    wait_for(lambda: places(home) == ALL, "engines on both nodes", 600)
    assert len(away.pids_logging_to("engine-*.log")) >= 2
    assert answers(home, of_engines=3) == said, "every engine gives the same answers"
    assert listening_for_strangers(home, away) == {}

    # Only the agent of the home node dies: requests do not pass through it.
    agents = [pid for pid, command in home.running().items() if "ray::Node" in command]
    assert len(agents) == 1, home.left()
    os.kill(agents[0], signal.SIGKILL)
    assert answers(home, of_engines=3) == said
    assert places(home) == ALL

    # Its engines die during streams: other engines send the rest of each.
    with ThreadPoolExecutor(8) as clients:
        streams = [clients.submit(stream, home, number) for number in range(8)]
        wait_for(lambda: busy_elsewhere(home), "streams of the other node's engines", 60)
        away.die()
        assert [one.result(300) for one in streams] == [(LONG, "length")] * 8
    wait_for(lambda: devices(home) == ["n0/0"], "its devices to be lost", 120)
    shown = {device["id"]: device for device in home.ask("gpu", "list")["data"]}
    assert [shown[name]["health"] for name in ALL] == ["ok", "lost", "lost"]
    assert shown["n1/1"]["lost"]["reason"] and shown["n1/1"]["holder"] is None
    wait_for(lambda: places(home) == ["n0/0"], "its engines to vanish", 120)
    assert answers(home) == said
    assert home.pids_logging_to("controller.log") == controller, "the loss of a node ended the controller"
    told = [(entry["action"], entry["target"]) for entry in home.admin("audit")["data"]]
    assert ("node.joined", "n1") in told and ("node.lost", "n1") in told

    join(home, away)
    wait_for(lambda: places(home) == ALL, "engines on both nodes again", 600)
    assert answers(home, of_engines=3) == said
    away.process.send_signal(signal.SIGINT)
    assert away.process.wait(120) == 0
    assert away.left() == []
    wait_for(lambda: devices(home) == ["n0/0"], "its devices to vanish", 120)
    assert len(home.ask("gpu", "list")["data"]) == 1, "a node that left in order is not missed"
    assert answers(home) == said


def test_job_on_second_node_survives_its_loss(machines):
    """The home node has one device, so jobs with two devices run on the other node."""
    home, away = machines
    deploy_tiny(home)
    join(home, away)
    (home.data_dir / "train.jsonl").write_bytes(gsm8k("train", 400))
    home.run("mode", "set", "split", "--train", "2")

    def submit(*more):
        return home.submit("tiny", home.data_dir / "train.jsonl", "--batch-size 4 --max-length 256", *more)

    # The job ends there: its published version is copied home and served.
    first = submit("--epochs", "1", "--full", "--min-devices", "2")
    home.run("job", "wait", first, "--timeout", "900", timeout_s=1000)
    done = home.ask("job", "get", first)
    assert done["status"] == "succeeded", done
    assert sorted(home.losses(first)) == list(range(1, done["total_steps"] + 1))
    assert ask(home, done["fine_tuned_model"])

    job = submit("--epochs", "4", "--lora-rank", "4", "--max-devices", "2")
    wait_for(lambda: holder_of(home, "n1/0") == holder_of(home, "n1/1") == job, "the job on the other node", 300)
    wait_for(lambda: home.losses(job), "a step of it", 300)
    steps = max(home.losses(job))
    for pid in home.pids_logging_to("controller.log"):
        os.kill(pid, signal.SIGKILL)  # the next controller adopts the same ranks
    wait_for(lambda: home.tried("status"), "the next controller", 200)
    wait_for(lambda: max(home.losses(job)) > steps, "steps after the controller's death", 300)
    assert sum("started on" in text for text in messages(home, job)) == 1, "nothing was started again"
    home.run("mode", "set", "serve", "--wait", timeout_s=600)
    suspended = home.ask("job", "get", job)
    assert suspended["phase"] == "suspended" and suspended["step"] > 0
    assert home.ask("tier", "list")["data"][0]["snapshots"] >= 1, "its snapshot is at home"
    home.run("mode", "set", "split", "--train", "2")
    wait_for(lambda: max(home.losses(job)) > suspended["step"], "steps after it", 300)
    away.die()
    # It continues at home from its copied snapshot.
    wait_for(lambda: holder_of(home, "n0/0") == job, "the job at home", 300)
    home.run("job", "wait", job, "--timeout", "900", timeout_s=1000)
    done = home.ask("job", "get", job)
    assert done["status"] == "succeeded", done
    assert sorted(home.losses(job)) == list(range(1, done["total_steps"] + 1))

    # An adapter trained at home, requested from engines that have never loaded it.
    home.run("mode", "set", "serve", "--wait", timeout_s=600)
    adapter = done["fine_tuned_model"]
    said = answers(home, adapter)
    join(home, away)

    home.run("model", "deploy", "tiny", "--min-replicas", "3")
    wait_for(lambda: places(home) == ALL, "engines on both nodes", 600)
    assert answers(home, adapter, of_engines=3) == said != answers(home)
    # The other node is still joined when the box stops, and stops with it.


def messages(home, job: str) -> list[str]:
    return [event.message for event in home.client().fine_tuning.jobs.list_events(job, limit=100).data]


def join(home, away) -> None:
    away.join(invited(home, AWAY))
    wait_for(lambda: devices(home) == ALL, "the other node's devices", 400)


def listening_for_strangers(home, away) -> dict[str, str]:
    """Answers of ports that other machines reach, to clients without token and certificate."""
    open_to_network, said = {}, {}
    for machine, address in ((home, HOME), (away, AWAY)):
        for where, who in machine.listening().items():
            host, _, port = where.rpartition(":")
            if host not in ("127.0.0.1", "::1"):
                open_to_network[where] = who
                if heard := answers_to_strangers(host if host in (HOME, AWAY) else address, int(port)):
                    said[f"{where} {who}"] = heard
    assert any("raylet" in who for who in open_to_network.values()), open_to_network
    engines = {str(pid) for pid in away.pids_logging_to("engine-*.log")}
    assert sum(who.split()[0] in engines for who in open_to_network.values()) >= 2, open_to_network
    return said


def busy_elsewhere(home) -> list[str]:
    return [one["id"] for one in home.admin("status")["replicas"] if one["inflight"] and one["devices"] != ["n0/0"]]


def ask(home, model: str = "tiny", number: int = 2) -> str:
    answer = home.client(max_retries=3).chat.completions.create(
        model=model, messages=[{"role": "user", "content": f"{number} and 3 make?"}], max_tokens=8, temperature=0
    )
    return answer.choices[0].message.content


def answers(home, model: str = "tiny", of_engines: int = 1) -> list[str]:
    """Answers to many prompts, until `of_engines` engines have answered some: requests with a common prefix go to one
    engine. Sent one by one, because greedy tokens of a random model depend on the batch."""
    return wait_for(lambda: answers_of(home, model, of_engines), f"answers of {of_engines} engines", 240)


def answers_of(home, model: str, engines: int) -> list[str] | None:
    log = home.data_dir / "logs" / "access.log"
    time.sleep(1)  # the gateway writes the access log every half second
    before = log.stat().st_size
    said = [ask(home, model, number) for number in NUMBERS]

    def answered() -> list[str]:
        with open(log, "rb") as lines:
            lines.seek(before)
            rows = [json.loads(line) for line in lines]
        return [row["replica"] for row in rows if row["path"].endswith("/chat/completions")]

    wait_for(lambda: len(answered()) >= len(NUMBERS), "the access log")
    return said if len(set(answered())) >= engines else None


def stream(home, number: int) -> tuple[int, str | None]:
    """Number of tokens and finish reason of a long streamed answer."""
    chunks = list(
        home.client(max_retries=3).chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"{number} long stories"}],
            max_tokens=LONG,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    return chunks[-1].usage.completion_tokens, next(c.choices[0].finish_reason for c in reversed(chunks) if c.choices)
