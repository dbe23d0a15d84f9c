"""What people wait for at the control plane: lists, creating a job, an upload, an evaluation; each beside other work.

    python benchmarks/control_plane.py [--jobs 1000] [--items 1000] [--upload-mb 512] [--json FILE]

A box of 4 logical devices with the small model of the tests. Times are those of an HTTP client on the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._claims import at_least, at_most, record  # noqa: E402 - the path comes first
from tests.e2e.box_support import WholeBox, wait_for  # noqa: E402

MODEL = "starter"
ROWS = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}] * 64
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "Who are you?"}], "max_completion_tokens": 16}
STREAMS, ASKERS, MIB = 32, 32, 1 << 20


def times_ms(act: Callable[[], Any], number: int) -> list[float]:
    found = []
    for _ in range(number):
        began_s = time.perf_counter()
        act()
        found.append((time.perf_counter() - began_s) * 1e3)
    return found


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


class Control:
    def __init__(self, box: WholeBox):
        self.box = box
        self.http = self.client()
        content = "\n".join(map(json.dumps, ROWS)).encode()
        self.file = self.upload(content, "fine-tune")

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.box.url, headers={"Authorization": f"Bearer {self.box.key}"}, timeout=600)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def upload(self, content: bytes | Iterator[bytes], purpose: str) -> str:
        file = ("rows.jsonl", content)
        answer = self.http.post("files", files={"file": file}, data={"purpose": purpose})  # type: ignore[arg-type]
        assert answer.status_code < 300, answer.text
        return answer.json()["id"]

    def create(self, **more: Any) -> str:
        return self.post("fine_tuning/jobs", {"model": MODEL, "training_file": self.file, "held": True, **more})["id"]

    def list_jobs(self) -> int:
        """All jobs, as the SDK reads them: pages of 100. Returns their number."""
        number, after = 0, {}
        while True:
            page = self.http.get("fine_tuning/jobs", params={"limit": 100, **after}).json()
            number += len(page["data"])
            if not page["has_more"]:
                return number
            after = {"after": page["data"][-1]["id"]}

    def gaps_ms(self, until: threading.Event) -> list[float]:
        """Milliseconds between chunks of streams, one after the other, until the event."""
        found = []
        with self.client() as http:
            while not until.is_set():
                body = {**QUESTION, "max_completion_tokens": 200, "stream": True, "ignore_eos": True}
                with http.stream("POST", "chat/completions", json=body) as answer:
                    last_s = 0.0
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            now_s = time.perf_counter()
                            if last_s:
                                found.append((now_s - last_s) * 1e3)
                            last_s = now_s
        return found

    @contextlib.contextmanager
    def streams(self, number: int) -> Iterator[list[list[float]]]:
        """Neighbours that read streams meanwhile; the gaps of each are in the list at the end."""
        until, gaps = threading.Event(), list[list[float]]()
        with ThreadPoolExecutor(number) as pool:
            running = [pool.submit(self.gaps_ms, until) for _ in range(number)]
            time.sleep(3)
            try:
                yield gaps
            finally:
                until.set()
                gaps += [one.result() for one in running]

    def direct_per_s(self, number: int) -> float:
        def ask(_: int) -> None:
            with self.client() as http:
                http.post("chat/completions", json=QUESTION).raise_for_status()

        began_s = time.perf_counter()
        with ThreadPoolExecutor(ASKERS) as pool:
            list(pool.map(ask, range(number)))
        return number / (time.perf_counter() - began_s)

    def evaluated_per_s(self, number: int) -> float:
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
        began_s = time.perf_counter()
        run = self.post(f"evals/{made['id']}/runs", {"data_source": source})
        path = f"evals/{made['id']}/runs/{run['id']}"
        wait_for(lambda: self.http.get(path).json()["status"] == "completed", "the evaluation", timeout_s=1800)
        return number / (time.perf_counter() - began_s)


def disk_mb_s(folder: Path, mb: int) -> float:
    """Rate at which one writer fills a file and syncs it."""
    block = os.urandom(MIB)
    began_s = time.perf_counter()
    with (folder / "block").open("wb") as file:
        for _ in range(mb):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    took_s = time.perf_counter() - began_s
    (folder / "block").unlink()
    return mb / took_s


class Found(dict[str, float]):
    """Figures by name; prints each as it comes."""

    def __setitem__(self, name: str, value: float) -> None:
        print(f"{name:28} {value:10.1f}", flush=True)
        super().__setitem__(name, value)


def measured(control: Control, folder: Path, jobs: int, items: int, upload_mb: int) -> dict[str, float]:
    found = Found()
    control.http.post("chat/completions", json=QUESTION).raise_for_status()  # the engine is awake
    for _ in range(jobs):
        control.create()
    found["list_ms"] = statistics.median(times_ms(control.list_jobs, 5))
    found["list_page_ms"] = statistics.median(times_ms(lambda: control.http.get("fine_tuning/jobs?limit=100"), 10))
    found["create_ms"] = statistics.median(times_ms(control.create, 20))
    with control.streams(STREAMS):
        found["create_beside_streams_ms"] = statistics.median(times_ms(control.create, 20))
    found["direct_per_s"] = control.direct_per_s(min(items, 400))
    found["evaluated_per_s"] = control.evaluated_per_s(items)
    with control.streams(1) as quiet:
        time.sleep(10)
    found["disk_mb_s"] = disk_mb_s(folder, upload_mb)
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    content = line * (upload_mb * MIB // len(line))
    with control.streams(1) as beside:
        began_s = time.perf_counter()
        control.upload(content, "user_data")
        found["upload_mb_s"] = upload_mb / (time.perf_counter() - began_s)
    found["gap_p99_ms"], found["gap_beside_upload_p99_ms"] = p99(quiet[0]), p99(beside[0])
    rows = folder / "long.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS * 20)))
    training = control.box.submit(MODEL, rows, "--full --epochs 50")
    control.box.run("mode", "set", "split", "--train", "2")
    wait_for(lambda: control.box.job(training)["status"] == "running", "a training job", timeout_s=300)
    found["create_beside_training_ms"] = max(times_ms(control.create, 10))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--upload-mb", type=int, default=512)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="control-plane-") as folder:
        box = WholeBox(Path(folder) / "box")
        try:
            box.run("up", "--detach", "--port", str(box.port), "--devices", "4")
            box.key = (box.data_dir / "first-key").read_text().strip()
            box.make_starter()
            found = measured(Control(box), Path(folder), given.jobs, given.items, given.upload_mb)
        finally:
            box.run("down")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    size = f"{given.jobs} jobs, {given.items} items, {given.upload_mb} MB"
    record(
        __file__,
        [
            at_most("list of all jobs", size, found["list_ms"], "ms", 50),
            at_most("create a job beside 32 streams", size, found["create_beside_streams_ms"], "ms", 100),
            at_most("create a job beside training, at most", size, found["create_beside_training_ms"], "ms", 1000),
            at_least("evaluation over asking", size, found["evaluated_per_s"] / found["direct_per_s"], "x", 0.9),
            at_least("upload over the disk", size, found["upload_mb_s"] / found["disk_mb_s"], "x", 0.5),
            at_most("p99 gap beside it", size, found["gap_beside_upload_p99_ms"] / found["gap_p99_ms"], "x quiet", 1.2),
        ],
    )


if __name__ == "__main__":
    main()
