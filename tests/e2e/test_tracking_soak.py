"""Exports a job to a real MLflow server and to W&B's run file. MLflow's server and the trackers' libraries (pinned by
images/requirements/tracking.txt) come from the package registry, each in a temporary virtual environment. Prints the
time of the installation and the result of the job.
"""

import json
import os
import signal
import subprocess
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.box_support import WholeBox, free_port, gsm8k, wait_for, whole_box

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
PINS = ROOT / "images" / "requirements" / "tracking.txt"
WANDB = {"type": "wandb", "wandb": {"project": "sums", "name": "first", "tags": ["night"]}}
# Prints the records of a run file as JSON. W&B's library has the message types, but no reader: the file is a LevelDB
# log in blocks of 32 KiB, after a header of 7 bytes.
READ = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2

def records(content):
    at, whole = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<4xHB", content, at)
        whole += content[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""

for data in records(open(sys.argv[1], "rb").read()):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    kind = record.WhichOneof("record_type")
    if kind == "history":
        items = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        print(json.dumps({"history": items}))
    elif kind == "run":
        config = {u.key: json.loads(u.value_json) for u in record.run.config.update}
        print(json.dumps({"run": {"project": record.run.project, "name": record.run.display_name, "config": config,
                                  "tags": list(record.run.tags), "host": record.run.host}}))
    elif kind == "summary":
        items = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.summary.update}
        print(json.dumps({"summary": items}))
    elif kind == "exit":
        print(json.dumps({"exit": record.exit.exit_code}))
"""


def environment(folder: Path, *packages: str) -> Path:
    """Create a virtual environment with these packages; return its interpreter."""
    began_s = time.monotonic()
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, timeout=900)
    print(f"{' '.join(packages)} installed in {time.monotonic() - began_s:.0f} s")
    return python


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of the trackers' environment, created as in docs/tracking.md."""
    return environment(tmp_path_factory.mktemp("trackers") / "venv", "--require-hashes", "--no-deps", "-r", str(PINS))


@contextmanager
def mlflow_server(python: Path, folder: Path, port: int) -> Iterator[None]:
    """Run a real MLflow server with its database in `folder`."""
    command = [python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    where = [f"--backend-store-uri=sqlite:///{folder}/mlflow.db", f"--artifacts-destination={folder / 'artifacts'}"]
    clean = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    clean["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # its jobs leave files in shared memory
    with open(folder / "mlflow.log", "ab") as log:
        process = subprocess.Popen([*command, *where], stdout=log, stderr=log, env=clean, start_new_session=True)
    try:
        wait_for(lambda: _answers(port), "the MLflow server", 180)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


class Mlflow:
    """Reads the server by its REST API."""

    def __init__(self, port: int):
        self._url = f"http://127.0.0.1:{port}/api/2.0/mlflow"

    def runs(self) -> list[dict[str, Any]]:
        named = httpx.get(f"{self._url}/experiments/get-by-name", params={"experiment_name": "appliance"})
        if named.status_code == 404:
            return []
        number = named.json()["experiment"]["experiment_id"]
        found = httpx.post(f"{self._url}/runs/search", json={"experiment_ids": [number]}).json()
        return found.get("runs", [])

    def points(self, run: dict[str, Any], name: str) -> list[tuple[int, float]]:
        query = {"run_id": run["info"]["run_id"], "metric_key": name, "max_results": "10000"}
        found = httpx.get(f"{self._url}/metrics/get-history", params=query).json()
        return [(int(one["step"]), one["value"]) for one in found.get("metrics", [])]


def told(run: dict[str, Any], kind: str) -> dict[str, str]:
    return {one["key"]: one["value"] for one in run["data"].get(kind, [])}


def wandb_file(python: Path, folder: Path) -> list[dict[str, Any]]:
    """The records of the only run below `folder`."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    done = subprocess.run([python, "-I", "-c", READ, file], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def exporters(box: WholeBox) -> list[psutil.Process]:
    """Exporter processes of this box."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if any(one.endswith("appliance/tracking.py") for one in command) and str(box.data_dir) in command[-1]:
            found.append(process)
    return found


def troubles(box: WholeBox) -> set[str]:
    """Problems that the exporter and its trackers report."""
    return {one["name"] for one in box.admin("status")["degraded"] if one["name"].startswith("tracking")}


def test_job_is_complete_in_mlflow_and_wandb(tmp_path, python):
    """The server is down twice and the exporter is killed: no row is lost or duplicated."""
    server = environment(tmp_path / "server", "mlflow>=3.17,<4")
    port = free_port()
    settings = (
        f'[tracking]\nmlflow_uri = "http://127.0.0.1:{port}"\nwandb_mode = "offline"\npython = "{python}"\n'
        "[box]\ndevices = 2\nstart_timeout_s = 600\n[serve]\nstart_timeout_s = 600\n"
    )
    mlflow = Mlflow(port)
    (tmp_path / "box").mkdir()
    with whole_box(tmp_path / "box", settings) as box:
        box.make_starter()
        box.set_mode(policy="train")
        file = box.upload(gsm8k("train", 48))
        request = {"validation_file": box.upload(gsm8k("test", 8), "valid.jsonl"), "integrations": [WANDB]}
        job = box.tune("starter", file, request=request, n_epochs=20, batch_size=4)
        wait_for(lambda: len(box.losses(job)) >= 3, "the first steps", 300)
        box.run("job", "pause", job)  # until the exporter was killed
        wait_for(lambda: "tracking: mlflow" in troubles(box), "a word about the server that is away", 120)
        with mlflow_server(server, tmp_path, port):
            wait_for(lambda: mlflow.runs() and mlflow.points(mlflow.runs()[0], "train/loss"), "the first points", 120)
            (exporter,) = exporters(box)
            exporter.kill()
            wait_for(lambda: [one.pid for one in exporters(box)] not in ([], [exporter.pid]), "a new exporter", 60)
            before = len(mlflow.points(mlflow.runs()[0], "train/loss"))
            box.run("job", "resume", job)
            box.tuned(job)
            wait_for(lambda: mlflow.runs()[0]["info"]["status"] == "FINISHED", "the end of the run", 120)
            (run,) = mlflow.runs()
            losses = box.losses(job)
            points = mlflow.points(run, "train/loss")
            assert [step for step, _ in points] == sorted(losses), "each step once"
            assert dict(points) == pytest.approx(losses)
            assert len(losses) > before
            assert len(mlflow.points(run, "validation/loss")) == len(box.validation_losses(job)) > 0
            params, tags = told(run, "params"), told(run, "tags")
            assert (params["model"], params["training_file"]) == ("starter", file)
            assert len(params["training_file_sha256"]) == 64
            assert tags["appliance.state"] == "succeeded" and tags["appliance.version"].startswith("step-")
        wait_for(lambda: not troubles(box), "no tracker to be degraded", 120)

        records = wandb_file(python, box.data_dir / "tracking")
        history = [one["history"] for one in records if "history" in one]
        found = [(one["train/global_step"], one["train/loss"]) for one in history if "train/loss" in one]
        assert [step for step, _ in found] == sorted(losses) and dict(found) == pytest.approx(losses)
        made = next(one["run"] for one in records if "run" in one)
        assert (made["project"], made["name"], made["tags"]) == ("sums", "first", ["night", job])
        assert made["config"]["model"] == "starter" and made["host"] == "appliance"
        assert [one["exit"] for one in records if "exit" in one] == [0]
        print(f"{len(losses)} steps, {len(history)} rows of W&B, MLflow away for the first {before}")
    assert exporters(box) == []
