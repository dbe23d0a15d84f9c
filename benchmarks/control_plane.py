"""Measures latencies of the control plane: listing, creating a job, uploading and evaluating during other work.

    python -m benchmarks.control_plane [--jobs 1000] [--items 1000] [--upload-mb 512]

The box has 4 logical devices and the starter. An HTTP client on the same machine measures the times.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks._claims import Claim, at_least, at_most, parser, record
from tests.e2e.box_support import WholeBox, wait_for, whole_box

MODEL = "starter"
ROWS = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}] * 64
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "Who are you?"}], "max_completion_tokens": 16}
STREAMS, ASKERS, MIB = 32, 32, 1 << 20


def seconds(act: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def times_ms(act: Callable[[], Any], number: int) -> list[float]:
    return [1e3 * seconds(act) for _ in range(number)]


class Control:
    def __init__(self, box: WholeBox):
        self.box = box
        self.http = self.client()
        self.file = self.upload("\n".join(map(json.dumps, ROWS)).encode(), "fine-tune")

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.box.url, headers={"Authorization": f"Bearer {self.box.key}"}, timeout=600)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.http.post(path, json=body).raise_for_status().json()

    def upload(self, content: bytes, purpose: str) -> str:
        answer = self.http.post("files", files={"file": ("rows.jsonl", content)}, data={"purpose": purpose})
        return answer.raise_for_status().json()["id"]

    def create(self) -> None:
        made = self.post("fine_tuning/jobs", {"model": MODEL, "training_file": self.file})
        self.post(f"fine_tuning/jobs/{made['id']}/pause", {})

    def list_jobs(self) -> None:
        """Read all jobs like the SDK, in pages of 100."""
        after: dict[str, str] = {}
        while (page := self.http.get("fine_tuning/jobs", params={"limit": 100, **after}).json())["has_more"]:
            after = {"after": page["data"][-1]["id"]}

    def gaps_ms(self, until: threading.Event) -> list[float]:
        """Read streams one after the other until the event is set; return the milliseconds between chunks."""
        found, body = [], {**QUESTION, "max_completion_tokens": 200, "stream": True, "ignore_eos": True}
        with self.client() as http:
            while not until.is_set():
                with http.stream("POST", "chat/completions", json=body) as answer:
                    at_s = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
                    found += [1e3 * (end_s - start_s) for start_s, end_s in zip(at_s, at_s[1:], strict=False)]
        return found

    @contextlib.contextmanager
    def streams(self, number: int) -> Iterator[list[float]]:
        """Read streams in other threads while the context is open; afterwards the list has the gaps of all streams."""
        until, gaps = threading.Event(), list[float]()
        with ThreadPoolExecutor(number) as pool:
            running = [pool.submit(self.gaps_ms, until) for _ in range(number)]
            time.sleep(3)
            try:
                yield gaps
            finally:
                until.set()
                gaps += [gap for one in running for gap in one.result()]

    def ask_directly(self, number: int) -> None:
        def ask(_: int) -> None:
            with self.client() as http:
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
    yield at_most("list of all jobs", size, statistics.median(times_ms(control.list_jobs, 5)), "ms", 50)
    with control.streams(STREAMS):
        created_ms = statistics.median(times_ms(control.create, 20))
    yield at_most("create a job beside 32 streams", size, created_ms, "ms", 100)
    direct_s = seconds(lambda: control.ask_directly(items))
    evaluated_s = seconds(lambda: control.evaluate(items))
    yield at_least("evaluation over asking", size, direct_s / evaluated_s, "x", 0.9)
    with control.streams(1) as quiet:
        time.sleep(10)
    disk_s = seconds(lambda: write_and_sync(folder / "block", upload_mb))
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    content = line * ((upload_mb * MIB - 4096) // len(line))  # the form around it counts too
    with control.streams(1) as beside:
        upload_s = seconds(lambda: control.upload(content, "user_data"))
    yield at_least("upload over the disk", size, disk_s / upload_s, "x", 0.5)
    yield at_most("p99 gap beside it", size, p99(beside) / p99(quiet), "x quiet", 1.2)
    (folder / "long.jsonl").write_text("\n".join(map(json.dumps, ROWS * 20)))
    training = control.box.submit(MODEL, folder / "long.jsonl", "--full --epochs 50")
    control.box.set_mode(policy="split", train_devices=2)
    wait_for(lambda: control.box.job(training)["status"] == "running", "a training job", timeout_s=300)
    yield at_most("create a job beside training, at most", size, max(times_ms(control.create, 10)), "ms", 1000)


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
