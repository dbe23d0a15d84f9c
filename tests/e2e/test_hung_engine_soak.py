"""The core of one of two engines of a whole box is stopped: what clients of the OpenAI SDK see until it is replaced."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from runtime.processes.kernel import group_pids
from tests.e2e.box_support import WholeBox, wait_for, whole_box
from tests.train_support.tiny import make_model_dir

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

AVOIDED_S, PROMPT_S = 45.0, 20.0  # the scheduler looks every 30 s
LONG = 400


def engines(box: WholeBox) -> dict[str, str]:
    return {one["id"]: one["state"] for one in box.admin("status")["replicas"]}


def stream(box: WholeBox, number: int, temperature: float) -> tuple[int, str | None, str]:
    """Chunks, finish reason and error of a long answer."""
    chunks, reason = 0, None
    try:
        for chunk in box.client().chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"{number} long stories"}],
            max_tokens=LONG,
            temperature=temperature,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            chunks += 1
            reason = chunk.choices[0].finish_reason or reason if chunk.choices else reason
    except openai.OpenAIError as error:
        return chunks, reason, f"{type(error).__name__}: {error}"
    return chunks, reason, ""


def question(box: WholeBox, number: int) -> float:
    began_s = time.monotonic()
    box.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": f"{number} and 3 make?"}], max_tokens=4, temperature=0
    )
    return time.monotonic() - began_s


def answered_by(box: WholeBox, since: int) -> list[str]:
    with open(box.data_dir / "logs" / "access.log", "rb") as lines:
        lines.seek(since)
        rows = [json.loads(line) for line in lines]
    return [row["replica"] for row in rows if row["path"].endswith("/chat/completions")]


def test_an_engine_that_hangs_is_avoided_ended_and_replaced(tmp_path: Path) -> None:
    data_dir = tmp_path / "box"
    data_dir.mkdir()
    settings = "[box]\ndevices = 2\nstart_timeout_s = 300\n[serve]\nmax_replicas = 2\nstart_timeout_s = 400\n"
    with whole_box(data_dir, settings) as box, ThreadPoolExecutor(32) as clients:
        tiny = make_model_dir(tmp_path / "tiny", hidden_size=128, intermediate_size=256)
        assert box.ask("model", "import", str(tiny), "--name", "tiny")["state"] == "succeeded"
        box.run("model", "deploy", "tiny", "--min-replicas", "2")
        wait_for(lambda: sorted(engines(box).values()) == ["open", "open"], "two engines", 600)
        before = set(engines(box))

        streams = [clients.submit(stream, box, number, 0.8 if number % 2 else 0.0) for number in range(12)]
        busy = wait_for(
            lambda: [one for one in box.admin("status")["replicas"] if one["inflight"] >= 3], "streams on an engine"
        )
        hung = busy[0]["id"]
        (pid,) = {os.getpgid(pid) for pid in box.pids_logging_to(f"engine-{hung}.log")}
        core = next(each for each in group_pids(pid) if each != pid)
        on_it = busy[0]["inflight"]
        os.kill(core, signal.SIGSTOP)
        stopped_s = time.monotonic()

        asked: list[tuple[float, Future[float]]] = []
        while time.monotonic() - stopped_s < AVOIDED_S:
            asked.append((time.monotonic() - stopped_s, clients.submit(question, box, len(asked))))
            time.sleep(1.5)
        time.sleep(1)  # the gateway writes the access log every half second
        mark = (box.data_dir / "logs" / "access.log").stat().st_size
        late = [question(box, 100 + number) for number in range(12)]  # one after the other: none waits for the hung one
        assert hung in engines(box), "it was not ended before they were asked"
        wait_for(lambda: len(answered_by(box, mark)) >= len(late), "the access log")
        assert max(late) < PROMPT_S and hung not in answered_by(box, mark), (late, answered_by(box, mark))

        wait_for(lambda: engines(box).get(hung, "dead") == "dead", "the engine to be ended", 400)
        ended_s = time.monotonic() - stopped_s
        wait_for(
            lambda: list(engines(box).values()).count("open") == 2 and not Path(f"/proc/{core}").exists(),
            "another engine in its place",
            300,
        )
        whole_s = time.monotonic() - stopped_s
        done = [one.result(300) for one in streams]
        waited = [(at_s, one.result(300)) for at_s, one in asked]
        broken = [one for one in done if one[2]]
        said = sorted({one[2][:200] for one in broken})
        print(
            f"{on_it} streams on it; ended after {ended_s:.0f} s, replaced after {whole_s:.0f} s; asked in the first "
            f"{AVOIDED_S:.0f} s: {[f'{at_s:.0f}: {took_s:.1f} s' for at_s, took_s in waited]}; afterwards at most "
            f"{max(late):.1f} s; streams with an error event {len(broken)}: {said}; "
            f"engines {sorted(before)} -> {engines(box)}",
            flush=True,
        )
        assert all(one[:2] == (one[0], "length") for one in done if not one[2]), done
        assert all(one[2] == "" for one in done[::2]), "greedy streams go on elsewhere"
        assert broken and all(one[2].startswith("APIError: ") for one in broken), "an error event, not silence"
