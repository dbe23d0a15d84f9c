"""A pipeline on a whole box whose trigger is a bucket: a new object, a job, a gate, a version that answers, and never
anything twice, with kill -9 of the controller while it reads, while the store is away, while it trains, while it judges
and in the canary. The store is an S3 server on loopback that can be told to stand still or to refuse."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from appliance.controller.interfaces.config import Bucket
from tests.e2e.box_support import WholeBox, wait_for, whole_box
from tests.e2e.test_pipeline_soak import GRADER, THINGS, asked, step_of, ten_lines, versions_by_job
from weights.tiers.locations import s3_at

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]
PIPELINE = "fraud-nightly"
LOOKS_S = 5


class Store:
    """An S3 server. Of what a box asks it counts lists, and reads by their keys; `go_on` cleared, reads stand still;
    `refuses`, they are answered with 503."""

    def __init__(self) -> None:
        self.lists, self.reads = 0, dict[str, int]()
        self.go_on, self.refuses = threading.Event(), False
        self.go_on.set()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, True, request_handler=MotoRequestHandler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "GET":
            key = environ["PATH_INFO"].strip("/").partition("/")[2]
            if not key:
                self.lists += 1
            else:
                self.reads[key] = self.reads.get(key, 0) + 1
                self.go_on.wait(120)
                if self.refuses:
                    start("503 Service Unavailable", [("Content-Type", "application/xml")])
                    return [b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"]
        return self._moto(environ, start)

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def store() -> Iterator[Store]:
    one = Store()
    yield one
    one.close()


@pytest.fixture
def settings(store: Store, tmp_path: Path) -> Bucket:
    credentials = tmp_path / "credentials"
    credentials.write_text("[box]\naws_access_key_id = AKIAIOSFODNN7EXAMPLE\naws_secret_access_key = secret\n")
    return Bucket(
        url="s3://fraud/chats", endpoint=store.url, credentials_file=str(credentials), credentials_profile="box"
    )


@pytest.fixture
def box(settings: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeBox]:
    told = [f"{name} = {json.dumps(value)}" for name, value in settings.model_dump(exclude_none=True).items()]
    text = "\n".join(["[box]", "devices = 2", "[controller.buckets.chats]", *told, ""])
    with whole_box(tmp_path_factory.mktemp("box"), text) as one:
        yield one


def day(colour: str) -> bytes:
    rows = [{"messages": [asked(thing), {"role": "assistant", "content": colour}]} for thing in THINGS] * 4
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def from_the_bucket(eval_id: str) -> str:
    """The ten documented lines with the bucket in place of the folder, looked at every few seconds, and a canary that
    is long enough to be killed in."""
    text = ten_lines(Path("unused"), eval_id, canary="{share = 0.1, watch_s = 20, min_requests = 0}")
    for pattern, line in (
        (r"data\.folder = .*", 'data.bucket = "chats"'),
        (r"schedule\.cron = .*", "schedule.on_new_data = true"),
        (r"schedule\.tz = .*", f"schedule.every_s = {LOOKS_S}"),
    ):
        text, found = re.subn(f"^{pattern}$", line, text, flags=re.M)
        assert found == 1, pattern
    return text


def test_a_new_object_becomes_a_version_that_answers_once_whatever_kills_the_controller(
    box: WholeBox, store: Store, settings: Bucket, tmp_path: Path
):
    began_s = time.monotonic()
    objects = s3_at(settings)
    objects._client.create_bucket(Bucket="fraud")
    assert box.ask("model", "starter", "--minutes", "0.05")["state"] == "succeeded"
    suite, grader, file = tmp_path / "colours.jsonl", tmp_path / "grader.json", tmp_path / "nightly.toml"
    suite.write_text("".join(json.dumps({"messages": [asked(thing)]}) + "\n" for thing in THINGS))
    grader.write_text(json.dumps(GRADER))
    options = ["--suite", str(suite), "--grader", str(grader), "--max-tokens", "8", "--wait"]
    file.write_text(from_the_bucket(box.ask("eval", "run", "starter", *options, timeout_s=600)["id"]))
    assert "when there is new data" in box.run("pipeline", "schedule", str(file))

    def runs() -> list[dict[str, Any]]:
        """The newest first; none until a killed controller has a successor."""
        answer = box._get(f"v1/pipelines/{PIPELINE}/runs?limit=20", timeout=60)
        return answer.json()["data"] if answer.status_code == 200 else []

    def at(number: int, step: str, part: str) -> bool:
        found = runs()
        told = len(found) == number and found[0]["state"] == "running" and step_of(found[0], step)["says"]
        return bool(told) and part in told

    def killed(where: str) -> None:
        box.kill_controller()
        print(f"{time.monotonic() - began_s:4.0f} s: killed {where}", flush=True)

    def ended(number: int) -> dict[str, Any]:
        def one() -> dict[str, Any] | None:
            oldest_first = runs()[::-1]
            found = oldest_first[number - 1] if len(oldest_first) >= number else None
            return found if found is not None and found["state"] != "running" else None

        run = wait_for(one, f"the end of run {number}", 900)
        print(f"{time.monotonic() - began_s:4.0f} s: run {number} {run['state']}: {run['reason']}", flush=True)
        return run

    def looked_again() -> None:
        seen = store.lists
        wait_for(lambda: store.lists >= seen + 2, "two looks at the bucket", 120)

    # An empty bucket begins nothing. Its first object does; the controller dies while it reads it, and in the training.
    looked_again()
    assert runs() == []
    store.go_on.clear()
    objects.put("monday/1.jsonl", day("blue"))
    wait_for(lambda: store.reads, "the object to be read", 120)
    killed("in the midst of an object")
    store.go_on.set()
    wait_for(lambda: at(1, "train", "step "), "a run that trains", 300)
    killed("while it trained")
    first = ended(1)
    assert (first["trigger"], first["outcome"]) == ("data", "answers"), first
    v1 = box.ask("model", "show", "fraud")["active_version"]
    objects.put("monday/1.jsonl", day("blue"))  # the same bytes once more
    looked_again()
    assert len(runs()) == 1, "what was taken is not taken again"

    # The second: the store is away when it is read, and the controller dies while it waits, while the version is
    # judged, and in its canary. What comes meanwhile is the next run's.
    store.refuses, store.reads = True, {}
    objects.put("tuesday/2.jsonl", day("red"))
    wait_for(lambda: at(2, "data", "tried again"), "a run that waits for the store", 120)
    killed("while the store was away")
    wait_for(lambda: at(2, "data", "tried again"), "the next controller to wait too", 120)
    killed("while the store was away still")
    store.refuses = False
    wait_for(lambda: at(2, "train", "step "), "a run that trains", 300)
    objects.put("wednesday/3.jsonl", day("green"))
    wait_for(lambda: at(2, "evaluate", "is asked"), "a version that is judged", 600)
    killed("while it was judged")
    wait_for(lambda: at(2, "canary", "is compared"), "a version that has a share of the requests", 600)
    killed("in the canary")
    second = ended(2)
    assert second["outcome"] == "answers" and step_of(second, "canary")["says"] == "promoted", second
    assert step_of(second, "data")["says"] == f"1 file, {len(day('red')):,} bytes", "no file of another run"
    gate = box.ask("gate", "show", second["gate_id"])
    v2 = box.ask("model", "show", "fraud")["active_version"]
    assert v2 == gate["version"] != v1 == gate["before"]
    question = {"model": "fraud@champion", "messages": [asked("door")], "max_tokens": 8, "temperature": 0}
    answer = box.client(max_retries=5).chat.completions.create(**question)
    assert "red" in answer.choices[0].message.content.lower()

    # The third, begun by what came meanwhile, is no better, and does not answer.
    third = ended(3)
    assert (third["trigger"], third["outcome"]) == ("data", "left"), third
    assert step_of(third, "data")["says"].startswith("1 file") and "not shown to be better" in third["reason"]
    looked_again()

    # Nothing was made twice, and nothing is left.
    shown = box.ask("model", "show", "fraud")
    assert shown["active_version"] == v2
    made = [len(runs()), len(box.ask("job", "list")["data"]), len(shown["gates"])]
    assert made == [3, 3, 3], "each object made one run, one job and one gate"
    assert versions_by_job(shown) == [3, 3, 3], "each job made a version, and keeps those of its last three epochs"
    names = [one["filename"] for one in box.ask("file", "list")["data"]]
    assert not [name for name in names if name.startswith("piperun_")], "what was read goes with its run"
    print(f"{time.monotonic() - began_s:4.0f} s; lists {store.lists}, reads of the last two objects {store.reads}")
