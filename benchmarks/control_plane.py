"""Measures latencies of the control plane: listing, creating a job, uploading and evaluating during other work.

    python -m benchmarks.control_plane [--jobs 1000] [--items 1000] [--upload-mb 512]

The box has 4 logical devices and the starter. An HTTP client on the same machine measures the times.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx

from benchmarks._claims import Claim, at_least, at_most, parser, record
from tests.e2e.box_support import WholeBox, wait_for, whole_box

MODEL = "starter"
ROWS = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}] * 64
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "Who are you?"}], "max_completion_tokens": 16}
STREAMS, ASKERS, UPLOADS, MIB = 32, 32, 3, 1 << 20


def seconds(act: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def times_ms(act: Callable[[], Any], number: int) -> list[float]:
    return [1e3 * seconds(act) for _ in range(number)]


def client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=600)


def read_streams(url: str, key: str, number: int, until: Path) -> list[float]:
    """Read so many streams at once, again and again until a file exists; return the milliseconds between chunks. After
    the first stream, the file `begun` exists in the same folder."""
    body = {**QUESTION, "max_completion_tokens": 200, "stream": True, "ignore_eos": True}

    def gaps_ms(_: int) -> list[float]:
        gaps = list[float]()
        with client(url, key) as http:
            while not until.exists():
                with http.stream("POST", "chat/completions", json=body) as answer:
                    at_s = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
                until.with_name("begun").touch()
                gaps += [1e3 * (end_s - start_s) for start_s, end_s in pairwise(at_s)]
        return gaps

    with ThreadPoolExecutor(number) as pool:
        return [gap for gaps in pool.map(gaps_ms, range(number)) for gap in gaps]


class Control:
    def __init__(self, box: WholeBox):
        self.box = box
        self.http = client(box.url, box.key)
        self.file = self.upload("\n".join(map(json.dumps, ROWS)).encode(), "fine-tune")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.http.post(path, json=body).raise_for_status().json()

    def upload(self, content: bytes, purpose: str) -> str:
        # A file: httpx copies what is left of bytes with each packet, which takes longer than the box.
        form: dict[str, Any] = {"files": {"file": ("rows.jsonl", io.BytesIO(content))}, "data": {"purpose": purpose}}
        return self.http.post("files", **form).raise_for_status().json()["id"]

    def create(self) -> float:
        """Create a job and pause it; return the milliseconds until it was created."""
        began_s = time.perf_counter()
        made = self.post("fine_tuning/jobs", {"model": MODEL, "training_file": self.file})
        created_ms = 1e3 * (time.perf_counter() - began_s)
        self.post(f"fine_tuning/jobs/{made['id']}/pause", {})
        return created_ms

    def list_jobs(self, limit: int) -> None:
        page = self.http.get("fine_tuning/jobs", params={"limit": limit}).raise_for_status().content
        assert b'"has_more":false' in page, "the list ended before its last job"

    @contextlib.contextmanager
    def streams(self, number: int) -> Iterator[list[float]]:
        """Read streams while the context is open; afterwards the list has the gaps of all streams."""
        # In a process of its own: reading them in this one would delay the requests that are measured.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool, tempfile.TemporaryDirectory() as folder:
            until, gaps = Path(folder) / "until", list[float]()
            reading = pool.submit(read_streams, self.box.url, self.box.key, number, until)
            wait_for(until.with_name("begun").exists, "the first stream", timeout_s=120)
            try:
                yield gaps
            finally:
                until.touch()
                gaps += reading.result()

    def ask_directly(self, number: int) -> None:
        def ask(_: int) -> None:
            with client(self.box.url, self.box.key) as http:
                http.post("chat/completions", json=QUESTION).raise_for_status()

        with ThreadPoolExecutor(ASKERS) as pool:
            list(pool.map(ask, range(number)))

    def evaluate(self, number: int) -> None:
        item = json.dumps({"item": {"messages": QUESTION["messages"]}}) + "\n"
        source = {
            "type": "completions",
            "model": MODEL,
            "source": {"type": "file_id", "id": self.upload(item.encode() * number, "user_data")},
            "input_messages": {"type": "item_reference", "item_reference": "item.messages"},
            "sampling_params": {"max_completion_tokens": 16},
        }
        check = {"type": "string_check", "name": "any", "operation": "ne", "reference": ""}
        check["input"] = "{{ sample.output_text }}"
        schema = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}
        made = self.post("evals", {"data_source_config": schema, "testing_criteria": [check]})
        run = self.post(f"evals/{made['id']}/runs", {"data_source": source})
        path = f"evals/{made['id']}/runs/{run['id']}"
        wait_for(lambda: self.http.get(path).json()["status"] == "completed", "the evaluation", timeout_s=1800)


def write_and_sync(path: Path, mb: int) -> None:
    block = os.urandom(MIB)
    with path.open("wb") as file:
        for _ in range(mb):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def measured(control: Control, folder: Path, jobs: int, items: int, upload_mb: int) -> Iterator[Claim]:
    size = f"{jobs} jobs, {items} items, {upload_mb} MB"
    control.ask_directly(1)  # the engine is awake
    for _ in range(jobs):
        control.create()
    yield at_most("list of all jobs", size, statistics.median(times_ms(lambda: control.list_jobs(jobs), 9)), "ms", 50)
    with control.streams(STREAMS):
        created_ms = statistics.median(control.create() for _ in range(20))
    yield at_most("create a job beside 32 streams", size, created_ms, "ms", 100)
    direct_s = seconds(lambda: control.ask_directly(items))
    evaluated_s = seconds(lambda: control.evaluate(items))
    yield at_least("evaluation over asking", size, direct_s / evaluated_s, "x", 0.9)
    with control.streams(1) as quiet:
        time.sleep(10)
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    content = line * ((upload_mb * MIB - 4096) // len(line))  # the form around it counts too
    disk_s, upload_s = list[float](), list[float]()
    beside = list[float]()
    for turn in range(UPLOADS):  # in turns: the first writes to a virtual disk may be much faster than the others
        disk_s.append(seconds(lambda to=folder / f"block{turn}": write_and_sync(to, upload_mb)))
        with control.streams(1) as gaps:
            upload_s.append(seconds(lambda: control.upload(content, "user_data")))
        beside += gaps
    yield at_least("upload over the disk", size, statistics.median(disk_s) / statistics.median(upload_s), "x", 0.5)
    yield at_most("p99 gap beside it", size, p99(beside) / p99(quiet), "x quiet", 1.2)
    (folder / "long.jsonl").write_text("\n".join(map(json.dumps, ROWS * 20)))
    training = control.box.submit(MODEL, folder / "long.jsonl", "--full --epochs 50")
    control.box.set_mode(policy="split", train_devices=2)
    wait_for(lambda: control.box.job(training)["status"] == "running", "a training job", timeout_s=300)
    yield at_most("create a job beside training, at most", size, max(control.create() for _ in range(10)), "ms", 1000)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=1000)
    options.add_argument("--items", type=int, default=1000)
    options.add_argument("--upload-mb", type=int, default=512)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="control-plane-") as folder:
        data_dir = Path(folder) / "box"
        data_dir.mkdir()
        with whole_box(data_dir, "[box]\ndevices = 4\n") as box:
            box.make_starter()
            for row in measured(Control(box), Path(folder), given.jobs, given.items, given.upload_mb):
                record(__file__, [row])


if __name__ == "__main__":
    main()
