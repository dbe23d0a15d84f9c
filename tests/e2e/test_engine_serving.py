"""A forked engine serves vLLM's OpenAI surface to the unchanged SDK, on a private socket."""

import asyncio
import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from appliance.gateway.core.router import BATCH_BEHIND
from appliance.gateway.requests.normalize import normalize
from runtime.processes.kernel import group_pids
from serve.core.config import EngineConfig
from serve.core.errors import EngineStartFailed, WrongState
from serve.core.spec import segment_prefix_of
from tests.e2e import dying_engine
from tests.e2e.engine_support import greedy, rewrite
from tests.front.collector import attributes, running_collector

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# Tokens of an answer that a test interrupts: it lasts seconds even on a fast engine with a delayed client.
ENDLESS = 4000


def endless(engine_box) -> Path:
    """A version with a context for ENDLESS tokens."""
    return engine_box.version("long", seed=1, max_position_embeddings=4096)


async def test_openai_api_is_served_without_control_routes(start, a):
    _, sdk, spec, _ = await start("surface", a)
    assert stat.S_IMODE(os.stat(spec.socket_path).st_mode) == 0o600

    assert [model.id async for model in sdk.models.list()] == ["starter"]
    asked = [{"role": "user", "content": "weather?"}]
    chat = await sdk.chat.completions.create(
        model="starter", messages=asked, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    assert chat.usage.completion_tokens == len(chat.choices[0].logprobs.content) <= 6
    assert all(len(token.top_logprobs) == 3 for token in chat.choices[0].logprobs.content)
    assert chat.system_fingerprint == spec.version

    # Without the penalty the starter generates endless whitespace, which JSON allows.
    common = {"model": "starter", "temperature": 0, "frequency_penalty": 2}
    forced = {**common, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 200}
    # The gateway marks tools of forced calls as strict.
    forced |= {"tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]}
    (choice,) = (await sdk.chat.completions.create(messages=asked, **forced)).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather" and not choice.message.content
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    arguments = ""
    async for part in await sdk.chat.completions.create(messages=asked, stream=True, **forced):
        assert not part.choices[0].delta.content
        for piece in part.choices[0].delta.tool_calls or []:
            arguments += piece.function.arguments or ""
    assert json.loads(arguments) == {"city": "Bern"}
    flat = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    given = {"model": "starter", "temperature": 0, "input": "weather?", "tools": flat}
    given |= {"tool_choice": {"type": "function", "name": "weather"}}
    told = await sdk.responses.create(**given, max_output_tokens=200, extra_body={"frequency_penalty": 2})
    assert [json.loads(item.arguments) for item in told.output if item.type == "function_call"] == [{"city": "Bern"}]
    cut = await sdk.responses.create(**given, max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    await check_deprecated_functions(sdk)

    with pytest.raises(openai.BadRequestError):
        await sdk.completions.create(model="starter", prompt="x", n=65, max_tokens=1)
    with pytest.raises(openai.NotFoundError):
        await sdk.completions.create(model="someone-else", prompt="x", max_tokens=1)
    await check_formats_of_other_apis(spec.socket_path, sdk)
    await check_no_control_routes(spec.socket_path)


async def check_deprecated_functions(sdk):
    """Check deprecated `functions`: serve/vllm/answers.py returns one call that fits the schema, also streamed."""
    asked: dict[str, Any] = {
        "model": "starter",
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
            {"role": "function", "name": "weather", "content": "sunny"},
        ],
        "functions": [{"name": "weather", "parameters": SCHEMA}],
        "function_call": {"name": "weather"},
        "max_tokens": 200,
        "temperature": 0,
        "frequency_penalty": 2,  # otherwise endless whitespace, which JSON allows
    }
    asked, _ = normalize("chat.completions", asked)  # in the form that the gateway sends
    told = (await sdk.chat.completions.create(**asked)).choices[0]
    assert told.message.tool_calls is None and told.finish_reason in ("stop", "function_call"), told
    call = told.message.function_call
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bern"})
    pieces = [
        chunk.choices[0] async for chunk in await sdk.chat.completions.create(**asked, stream=True) if chunk.choices
    ]
    calls = [piece.delta.function_call for piece in pieces if piece.delta.function_call]
    assert not any(piece.delta.tool_calls for piece in pieces) and calls[0].name == "weather"
    assert json.loads("".join(call.arguments or "" for call in calls)) == {"city": "Bern"}


async def test_reasoning_is_separate_in_every_api(start, a):
    """The template opens `<think>`, so all text of the untrained model is reasoning."""
    opens = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% if enable_thinking is not defined or enable_thinking %}<think>"
        "{% else %}<think></think>{% endif %}{% endif %}"
    )
    _, sdk, spec, _ = await start("thinks", a, chat_template=opens)
    asked = {"model": "starter", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}
    told = (await sdk.chat.completions.create(**asked)).choices[0].message
    assert told.reasoning and not told.content
    off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}, "min_tokens": 6}}
    told = (await sdk.chat.completions.create(**asked, **off)).choices[0].message
    assert told.content and not told.reasoning
    deltas = [
        chunk.choices[0].delta
        async for chunk in await sdk.chat.completions.create(**asked, stream=True)
        if chunk.choices
    ]
    assert "".join(delta.reasoning or "" for delta in deltas if hasattr(delta, "reasoning"))
    assert not any(delta.content for delta in deltas)
    response = await sdk.responses.create(model="starter", input="hello", max_output_tokens=6)
    assert [item.type for item in response.output] == ["reasoning"], response.output

    transport = httpx.AsyncHTTPTransport(uds=spec.socket_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as http:
        asked["thinking"] = {"type": "adaptive"}
        (block,) = (await http.post("/v1/messages", json=asked)).json()["content"]
        assert block["type"] == "thinking" and block["thinking"] and block["signature"], block
        streamed = (await http.post("/v1/messages", json={**asked, "stream": True})).text
        assert '"thinking_delta"' in streamed and '"signature_delta"' in streamed, streamed
        # The client sends the thinking block back in the next turn.
        asked["messages"] += [{"role": "assistant", "content": [block]}, {"role": "user", "content": "and?"}]
        assert (await http.post("/v1/messages", json=asked)).status_code == 200


async def check_formats_of_other_apis(socket_path, sdk):
    """Check that serve/vllm/answers.py converts vLLM's answers to the formats of their APIs."""
    cached = (await sdk.completions.create(model="starter", prompt="x", max_tokens=1)).usage.prompt_tokens_details
    assert cached is not None and cached.cached_tokens == 0
    ask = [{"role": "user", "content": "hello"}]
    begun = [*ask, {"role": "assistant", "content": "Well"}]
    transport = httpx.AsyncHTTPTransport(uds=socket_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as http:

        async def post(path="", **body):
            answer = await http.post(f"/v1/messages{path}", json={"model": "starter", **body})
            assert answer.status_code == 200, answer.text
            return answer

        counted = [(await post("/count_tokens", messages=messages)).json()["input_tokens"] for messages in (ask, begun)]
        told = (await post(messages=begun, max_tokens=3)).json()
        assert told["id"].startswith("msg_") and told["type"] == "message"
        usage = told["usage"]
        read = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert counted[1] == sum(usage[name] for name in read)
        # The begun answer continues: its turn is not closed, and no new turn is opened.
        assert counted[0] < counted[1] <= counted[0] + 4
        tool = {"name": "weather", "input_schema": SCHEMA, "strict": True}
        called = {"tools": [tool], "tool_choice": {"type": "tool", "name": "weather"}}
        called |= {"max_tokens": 200, "temperature": 0, "frequency_penalty": 2}
        (block,) = (await post(messages=ask, **called)).json()["content"]
        assert block["input"] == {"city": "Bern"}, block
        events = (await post(messages=ask, **called, stream=True)).text
        assert '"tool_use"' in events and '"input_json_delta"' in events, events
        streamed = (await post(messages=ask, max_tokens=2, stream=True)).text
        assert '"id":"msg_' in streamed and streamed.endswith('data: {"type":"message_stop"}\n\n')


async def check_no_control_routes(socket_path):
    transport = httpx.AsyncHTTPTransport(uds=socket_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        assert (await http.get("/health")).status_code == 200
        control = "pause resume sleep wake_up collective_rpc update_weights reset_prefix_cache v1/load_lora_adapter"
        for route in control.split():
            assert (await http.post(f"/{route}", json={})).status_code in (404, 405), route


async def test_engines_of_different_models_run_in_parallel(engine_box, start, a):
    other = engine_box.version("qwen3-a", "qwen3", seed=3)
    engines = await asyncio.gather(start("side-a", a, model="one"), start("side-q", other, model="two"))
    first, second = await asyncio.gather(*(greedy(one.sdk, one.spec.model) for one in engines))
    assert first != second


async def test_traced_request_has_engine_span(start, a):
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    async with running_collector() as collector:
        replica, sdk, *_ = await start("traced", a, otlp_endpoint=collector.url)
        await sdk.completions.create(
            model="starter",
            prompt=[5, 6, 7],
            max_tokens=3,
            temperature=0,
            extra_body={"ignore_eos": True},
            extra_headers={"traceparent": f"00-{trace}-{parent}-01"},
        )
        while not (spans := [span for span in collector.spans if span.trace_id.hex() == trace]):
            await asyncio.sleep(0.05)
        await replica.stop()
    (span,) = spans
    assert span.parent_span_id.hex() == parent
    assert attributes(span)["gen_ai.usage.completion_tokens"] == 3
    assert set(collector.paths) == {"/v1/traces"}


async def test_engine_serves_smallest_priority_value_first(start, a):
    _, sdk, *_ = await start("order", a, max_num_seqs=1)
    ended = []
    fields = {"model": "starter", "prompt": "the", "temperature": 0, "extra_body": {"ignore_eos": True}}

    async def ask(name: str, priority: int) -> None:
        await sdk.completions.create(**fields, max_tokens=2, extra_headers={"x-vllm-priority": str(priority)})
        ended.append(name)

    async with asyncio.timeout(120):
        running = await sdk.completions.create(**fields, max_tokens=400, stream=True)
        await anext(running)
        waiting = []
        for name, priority in (("batch", BATCH_BEHIND), ("many", 9000), ("one", 5)):
            waiting.append(asyncio.create_task(ask(name, priority)))
            await anext(running)
        assert not ended
        async for _ in running:
            pass
        await asyncio.gather(*waiting)
    assert ended == ["one", "many", "batch"]


async def test_embedding_engine_answers_and_swaps(start, a, b):
    replica, sdk, *_ = await start("embed", a, model="vectors", task="embed")
    first = (await sdk.embeddings.create(model="vectors", input="the quick")).data[0].embedding
    assert len(first) == 128
    await replica.swap("vectors", "b", str(b))
    second = (await sdk.embeddings.create(model="vectors", input="the quick")).data[0].embedding
    assert second != first
    await replica.swap("vectors", "a", str(a))
    again = (await sdk.embeddings.create(model="vectors", input="the quick")).data[0].embedding
    assert again == pytest.approx(first, abs=1e-6)


async def test_kill_9_of_core_ends_engine_and_streams(engine_box, start):
    replica, sdk, spec, pid = await start("kill-core", endless(engine_box))
    core = next(each for each in group_pids(pid) if each != pid)
    whole = {"model": "starter", "prompt": "the", "max_tokens": ENDLESS, "extra_body": {"ignore_eos": True}}
    unstreamed = asyncio.create_task(sdk.completions.create(**whole))
    stream = await sdk.completions.create(**whole, stream=True)
    received = 0
    with pytest.raises(openai.OpenAIError):
        async for _ in stream:
            received += 1
            if received == 5:
                os.kill(core, signal.SIGKILL)
    assert 5 <= received < ENDLESS
    # The gateway recognises the dead engine by this word, and tries another one.
    with pytest.raises(openai.InternalServerError, match="EngineCore"):
        await unstreamed
    async with asyncio.timeout(60):
        death = await replica.wait_dead()
    assert "exit" in death and group_pids(pid) == []
    assert (await replica.status())["state"] == "dead"
    assert not os.path.exists(spec.socket_path) and not os.path.exists(spec.scratch_path)

    await replica.start(spec)
    assert len((await greedy(sdk, "starter"))[0]) == 24


async def test_kill_9_of_api_process_ends_core(start, a):
    replica, _, _, pid = await start("kill-api", a)
    assert len(group_pids(pid)) == 2
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await replica.wait_dead()
    assert group_pids(pid) == []


async def test_hung_core_is_reported_silent_then_ended(engine_box, start):
    replica, sdk, spec, pid = await start("hung-core", endless(engine_box), EngineConfig(hung_s=9))
    core = next(each for each in group_pids(pid) if each != pid)
    assert (await replica.status())["silent"] is False
    stream = await sdk.completions.create(
        model="starter", prompt="the", max_tokens=ENDLESS, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    os.kill(core, signal.SIGSTOP)
    async with asyncio.timeout(60):
        while not (await replica.status())["silent"]:
            await asyncio.sleep(0.1)
    async with asyncio.timeout(60):
        assert "it hung" in (await replica.wait_dead())["exit"]
    with pytest.raises((openai.OpenAIError, httpx.HTTPError)):
        async for _ in stream:
            pass
    assert group_pids(pid) == []

    await replica.start(spec)
    assert (await replica.status())["silent"] is False
    await replica.sleep()
    async with asyncio.timeout(60):
        await replica._child.call("pulse")  # a sleeping engine gives signs of life too


@pytest.mark.parametrize("how", ["stop", "kill -9"])
async def test_tensor_parallel_engine_leaves_no_segments(start, a, how):
    devices = Path("/dev/shm")
    before = set(devices.iterdir())
    replica, _, spec, pid = await start("segments", a, tensor_parallel=2, devices=(0, 1))
    made = set(devices.glob(f"{segment_prefix_of(spec.socket_path)}*"))
    assert len(made) >= 4
    if how == "stop":
        await replica.stop()
    else:
        os.kill(pid, signal.SIGKILL)
        await replica.wait_dead()
    assert not any(path.exists() for path in made)
    assert not {path.name for path in set(devices.iterdir()) - before if path.name.startswith(("psm_", "vllm_"))}


async def test_failed_tensor_parallel_worker_ends_engine_in_seconds(engine_box, start, a, monkeypatch):
    """The other worker waits in a collective, which vLLM itself notices only after five minutes."""
    monkeypatch.setattr("serve.engine.replica.ENTRY", dying_engine.ENTRY)
    plan = {"phase": dying_engine.STEPS, "by": "", "rank": 1}
    (engine_box.root / dying_engine.PLAN).write_text(json.dumps(plan))
    replica, sdk, _, pid = await start("one-fails", a, tensor_parallel=2, devices=(0, 1))
    asked = sdk.completions.create(model="starter", prompt="the", max_tokens=400, extra_body={"ignore_eos": True})
    async with asyncio.timeout(60):
        with pytest.raises(openai.InternalServerError, match="EngineCore"):
            await asked
        await replica.wait_dead()
    assert group_pids(pid) == []


async def test_failed_engine_start_reports_cause(engine_box, replicas, a):
    broken = engine_box.root / "versions" / "hole"
    if not broken.exists():
        rewrite(a, broken, _without("model.layers.1.mlp.up_proj.weight"))
    spec = engine_box.spec("hole", broken)
    replica = replicas()
    with pytest.raises(EngineStartFailed, match="has no tensors for 1 parameters"):
        await replica.start(spec)
    assert not os.path.exists(spec.socket_path)
    with pytest.raises(EngineStartFailed, match="max_model_len|max_position_embeddings"):
        await replica.start(engine_box.spec("hole", a, max_model_len=1 << 20))
    with pytest.raises(WrongState, match="no engine|dead|died"):
        await replicas().swap("m", "v", "/nowhere")


def _without(name):
    def change(tensors):
        return {key: tensor for key, tensor in tensors.items() if key != name}

    return change
