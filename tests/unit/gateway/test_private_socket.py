"""The box itself asks by the private socket and names a key by its id; clients of the public port cannot."""

from __future__ import annotations

import asyncio
import socket

import pytest

from weights.format.names import policy_name

from .conftest import Box, Response, Start, Wire, chat, request_bytes, salted
from .upstreams import Reply, UpstreamRequest, answer_chat

URL = "/v1/chat/completions"
BATCH = "X-Appliance-Class: batch\r\n"


async def ask_privately(box: Box, listener: socket.socket, headers: str, **fields: str) -> Response:
    wire = Wire(*await asyncio.open_unix_connection(listener.getsockname()))
    box.wires.append(wire)
    await wire.send(request_bytes("POST", URL, chat(**fields), key=None, headers=headers))
    return await wire.response()


@pytest.fixture
async def box(start_box: Start, listener: socket.socket) -> Box:
    return await start_box(private=listener, engine=answer_chat)


async def test_private_request_is_of_the_key_that_it_names(box: Box, listener: socket.socket) -> None:
    answer = await ask_privately(box, listener, f"X-Appliance-Key-Id: key_inference\r\n{BATCH}")
    assert answer.status == 200
    (row,) = box.state.spending.take_sums()
    assert (row["key"], row["requests"]) == ("key_inference", 1)
    assert salted(b"{}", "key_inference")[1:-1] in box.engines["e0"].requests[0].body


async def test_private_request_may_what_its_key_may(box: Box, listener: socket.socket) -> None:
    for headers, status in (
        ("X-Appliance-Key-Id: key_tuning\r\n", 403),
        ("X-Appliance-Key-Id: key_unknown\r\n", 401),
        ("X-Appliance-Key-Id: key_all\r\nX-Appliance-Key-Id: key_inference\r\n", 401),
        ("X-Appliance-Key-Id: \r\n", 200),
        ("", 200),
    ):
        assert (await ask_privately(box, listener, headers + BATCH)).status == status


async def test_private_request_ends_with_its_key_and_that_of_the_box_does_not(
    box: Box, listener: socket.socket
) -> None:
    began, end = asyncio.Semaphore(0), asyncio.Event()

    async def waits(request: UpstreamRequest, reply: Reply) -> None:
        began.release()
        await end.wait()
        await answer_chat(request, reply)

    box.engines["e0"].script = waits
    asking = [
        asyncio.create_task(ask_privately(box, listener, f"X-Appliance-Key-Id: {name}\r\n{BATCH}"))
        for name in ("key_all", "")
    ]
    for _ in asking:
        await began.acquire()
    box.limit(secret="f" * 64)
    await asyncio.sleep(0)
    assert not asking[0].done(), "a key that is rotated goes on"
    box.keys.clear()
    box.apply()
    assert (await asking[0]).status == 401
    end.set()
    assert (await asking[1]).status == 200


@pytest.mark.parametrize("key", [None, "sk-test-tuning"])
async def test_public_request_is_of_no_key_that_it_names(start_box: Start, key: str | None) -> None:
    box = await start_box(engine=answer_chat)
    for name in ("X-Appliance-Key-Id", "x_appliance_key_id", "X-Appliance-Key-ID"):
        for value in ("key_all", ""):
            answer = await box.ask("POST", URL, chat(), key=key, headers=f"{name}: {value}\r\n{BATCH}")
            assert answer.status == (401 if key is None else 403)


@pytest.fixture
def policy(box: Box) -> str:
    """A model in training on the engines of `m`."""
    return train(box)


def train(box: Box) -> str:
    name = policy_name("ftjob-1")
    box.serve(name, "e0", host="m", trained_from="m", owners=[])
    return name


async def test_box_asks_a_model_in_training_by_its_version_and_it_is_usage_of_the_base(
    box: Box, listener: socket.socket, policy: str
) -> None:
    headers = f"X-Appliance-Key-Id: key_inference\r\n{BATCH}"
    answer = await ask_privately(box, listener, headers, model=f"{policy}@step-3.ab")
    assert answer.status == 200 and box.engines["e0"].requests[0].json["model"] == f"{policy}@step-3.ab"
    (row,) = box.state.spending.take_sums()
    assert (row["key"], row["model"], row["requests"]) == ("key_inference", "m", 1)
    box.limit("sk-test-inference", models=["other"])
    assert (await ask_privately(box, listener, headers, model=f"{policy}@step-3.ab")).status == 404


async def test_model_in_training_may_be_silent_for_long(start_box: Start, listener: socket.socket) -> None:
    async def slow(request: UpstreamRequest, reply: Reply) -> None:
        await asyncio.sleep(0.2)
        await answer_chat(request, reply)

    box = await start_box(private=listener, limits={"upstream_silence_s": 0.05}, engine=slow)
    name = train(box)
    assert (await ask_privately(box, listener, BATCH, model=f"{name}@step-3.ab")).status == 200
    assert (await ask_privately(box, listener, BATCH)).status == 504


@pytest.mark.parametrize("version", ["", "@step-3.ab"])
@pytest.mark.parametrize("key", ["sk-test-admin", "sk-test-all"])
async def test_client_meets_no_model_in_training(box: Box, policy: str, key: str, version: str) -> None:
    assert (await box.ask("POST", URL, chat(model=policy + version), key=key)).status == 404
