"""Work without a client on one real box: batches, background responses and evaluations go through the box's own gateway
for the key that asked, and survive the death of the controller and of the gateway.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any, Literal

import openai
import psutil
import pytest

from tests.e2e.box_support import WholeBox, wait_for, whole_box

pytestmark = pytest.mark.timeout(900)
CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
LINES = 60


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    with whole_box(tmp_path_factory.mktemp("box")) as one:
        one.make_starter()
        yield one


def client_of(box: WholeBox, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=box.url, api_key=box.ask("key", "create", "--name", name)["key"], max_retries=5)


def begun(client: openai.OpenAI, count: int, tokens: int) -> Any:
    rows = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": CHAT,
            "body": {
                "model": "starter",
                "max_tokens": tokens,
                "messages": [{"role": "user", "content": f"{number}+1?"}],
            },
        }
        for number in range(count)
    ]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def answered(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts is not None else 0


def more_answers(client: openai.OpenAI, batch_id: str) -> None:
    before = answered(client, batch_id)
    wait_for(lambda: answered(client, batch_id) > before, "an answer", 300)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    def look() -> Any:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None

    return wait_for(look, f"the end of {batch_id}", 400)


def spent(box: WholeBox, name: str) -> int:
    """Requests of a key."""
    return sum(row["requests"] for row in box.admin("usage?by=key")["data"] if row["name"] == name)


def killed(box: WholeBox, module: str) -> None:
    found = [one for one in psutil.Process(box.main_pid()).children(recursive=True) if module in one.cmdline()]
    os.kill(found[0].pid, signal.SIGKILL)


def test_batch_wakes_its_model_and_answers_each_line_once_across_deaths(box: WholeBox) -> None:
    client = client_of(box, "ann")
    batch = begun(client, LINES, 24)
    for module in ("appliance.controller.main", "appliance.gateway.main"):
        more_answers(client, batch.id)
        killed(box, module)
        wait_for(lambda: box.answers() and box.tried("status"), "the box is back", 300)
    found = ended(client, batch.id)
    assert (found.status, found.request_counts.completed) == ("completed", LINES), found
    rows = [json.loads(row) for row in client.files.content(found.output_file_id).text.splitlines()]
    assert sorted(row["custom_id"] for row in rows) == sorted(f"r{number}" for number in range(LINES))
    assert spent(box, "ann") >= LINES // 2, "what a gateway had not reported yet died with it"


def test_background_response_and_evaluation_are_asked_for_their_key(box: WholeBox) -> None:
    client = client_of(box, "ben")
    made = client.responses.create(model="starter", input="1+1?", background=True, max_output_tokens=8)
    config = {"type": "custom", "item_schema": {"type": "object", "properties": {"q": {"type": "string"}}}}
    judge: Any = {
        "type": "score_model",
        "name": "judge",
        "model": "starter",
        "input": [{"role": "user", "content": "{{item.q}}"}],
    }
    grader: Any = {"type": "string_check", "name": "any", "operation": "ne", "input": "{{item.q}}", "reference": ""}
    of = client.evals.create(data_source_config=config, testing_criteria=[judge, grader])  # type: ignore[arg-type]
    source = {
        "type": "completions",
        "model": "starter",
        "input_messages": {"type": "template", "template": [{"role": "user", "content": "{{item.q}}"}]},
        "sampling_params": {"max_completion_tokens": 8},
        "source": {"type": "file_content", "content": [{"item": {"q": f"{number}+1?"}} for number in range(5)]},
    }
    run = client.evals.runs.create(of.id, data_source=source)  # type: ignore[arg-type]
    response = wait_for(
        lambda: one if (one := client.responses.retrieve(made.id)).status not in ("queued", "in_progress") else None,
        "the response",
        300,
    )
    assert response.status in ("completed", "incomplete"), response
    done = wait_for(
        lambda: (
            one
            if (one := client.evals.runs.retrieve(run.id, eval_id=of.id)).status not in ("queued", "in_progress")
            else None
        ),
        "the run",
        300,
    )
    assert done.status == "completed" and done.result_counts.total == 5, done
    assert len(done.per_testing_criteria_results) == 2 and done.per_model_usage
    wait_for(lambda: spent(box, "ben") >= 1 + 5, "the usage of the key")


def test_revoked_key_ends_its_batch_in_words(box: WholeBox) -> None:
    client = client_of(box, "cyd")
    batch = begun(client, 20 * LINES, 64)
    wait_for(lambda: answered(client, batch.id), "an answer", 300)
    box.run("key", "revoke", "cyd")
    admin = box.client()
    found = ended(admin, batch.id)
    assert (found.status, found.errors.data[0].code) == ("failed", "invalid_api_key")
