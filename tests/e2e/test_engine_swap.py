"""Swap under traffic, sleep and wake: no request is lost, each version gives its own answers, a bad version changes
nothing, and a sleeping engine frees its memory; also when vLLM schedules one step ahead, as on GPUs."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime.devices.kinds import HOST
from runtime.processes.kernel import group_pids
from serve.core.errors import EngineFailed, VersionBroken, VersionMismatch, VersionUnreadable, WrongState
from serve.engine import replica as replica_module
from tests.e2e import quantised
from tests.e2e.engine_support import edit_config, greedy, greedy_ids, rewrite, stream_ids
from tests.model_sizes import sizes
from weights.format.errors import VersionLeased
from weights.format.layout import Layout, TensorSpec
from weights.memory.store import WeightStore

TOKENS = 250
AHEAD = "a step was scheduled before the tokens of the one before it were known"  # in the log
AHEAD_ARGUMENTS = ("--async-scheduling", "--scheduler-cls", "tests.e2e.async_engine.SayingScheduler")
FEW = 40  # tokens that suffice to identify the weights


async def test_stream_continues_through_swap_in_place(start, a, b):
    replica, sdk, *_ = await start("stream", a)
    _, fresh, *_ = await start("fresh", b)
    await stream_through_swap(replica, sdk, fresh, a, b)
    assert await greedy(sdk, "tuned") == await greedy(fresh, "starter")


async def stream_through_swap(replica, sdk, fresh_sdk, a, b):
    """Swap the engine of `sdk` from version a ("starter") to b ("tuned") during a stream. `fresh_sdk` serves b.

    Retries if the stream ends before the swap begins, as on a busy machine."""
    prompt = [10, 20, 30, 40]
    old = await greedy_ids(sdk, "starter", prompt, TOKENS)
    for _ in range(5):
        seen: list[int] = []
        streaming = asyncio.create_task(stream_ids(sdk, "starter", prompt, TOKENS, seen))
        while len(seen) < 20:
            await asyncio.sleep(0.001)
        before = len(seen)
        await replica.swap("tuned", "b", str(b))
        after = len(seen)
        await streaming
        if seen != old:
            break
        await replica.swap("starter", "a", str(a))

    assert len(seen) == TOKENS
    switch = next(index for index in range(TOKENS) if seen[index] != old[index])
    assert before <= switch, "tokens of the new weights were sent before the swap was requested"
    # The first new tokens may equal those of the old model; then the switch is a little earlier.
    starts = range(max(before, switch - 4), switch + 1)
    rests = await asyncio.gather(
        *(greedy_ids(fresh_sdk, "starter", prompt + seen[:start], min(FEW, TOKENS - start)) for start in starts)
    )
    assert any(rest == seen[start : start + FEW] for start, rest in zip(starts, rests, strict=True))
    assert after - before <= TOKENS


async def test_requests_during_swap_wait_for_new_version(start, a, b):
    replica, sdk, *_ = await start("wait", a)
    swap = asyncio.create_task(replica.swap("starter", "b", str(b)))
    answers = await asyncio.gather(*(greedy(sdk, "starter", tokens=8) for _ in range(6)))
    await swap
    assert all(len(tokens) == 8 for tokens, _ in answers)
    status = await replica.status()
    assert (status["state"], status["version"], status["running"]) == ("ready", "b", 0)


async def test_swap_clears_prefix_cache(start, a, b):
    replica, sdk, *_ = await start("prefix", a)
    long_prompt = "the quick brown fox jumps over the lazy dog. " * 30
    cached = await greedy(sdk, "starter", long_prompt)
    assert await greedy(sdk, "starter", long_prompt) == cached
    await replica.swap("starter", "b", str(b))
    swapped = await greedy(sdk, "starter", long_prompt)
    _, fresh, *_ = await start("prefix-fresh", b)
    assert swapped[0] == (await greedy(fresh, "starter", long_prompt))[0] != cached[0]


def bad_versions(box):
    """(path, error, text) of versions that an engine of "a" must refuse without any change."""
    a, root = box.version("a", seed=1), box.root / "versions"
    shutil.rmtree(root / "bad", ignore_errors=True)
    (root / "bad").mkdir()

    def drop(tensors):
        del tensors["model.layers.0.mlp.up_proj.weight"]
        return tensors

    def reshape(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
        return tensors

    def add(tensors):
        return {**tensors, "model.layers.2.mlp.up_proj.weight": torch.zeros(2, 2)}

    yield rewrite(a, root / "bad" / "missing", drop), VersionMismatch, "up_proj.weight is missing"
    yield rewrite(a, root / "bad" / "shape", reshape), VersionMismatch, "lm_head.weight is"
    yield rewrite(a, root / "bad" / "extra", add), VersionMismatch, "not part of this model"
    other_rope = rewrite(a, root / "bad" / "rope", dict)
    edit_config(other_rope, rms_norm_eps=0.01)
    yield other_rope, VersionMismatch, "rms_norm_eps"
    template = rewrite(a, root / "bad" / "template", dict)
    (template / "chat_template.jinja").write_text("{{ messages }}")
    yield template, VersionMismatch, "chat_template.jinja"
    cut = rewrite(a, root / "bad" / "cut", dict)
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    yield cut, VersionUnreadable, "model.safetensors"
    yield root / "bad" / "nothing", VersionUnreadable, "nothing"


async def test_bad_version_is_refused_and_old_still_serves(engine_box, start, a):
    replica, sdk, *_ = await start("refuse", a)
    expected = await greedy(sdk, "starter")
    for path, error, text in bad_versions(engine_box):
        with pytest.raises(error, match=text):
            await replica.swap("starter", "bad", str(path))
        assert await greedy(sdk, "starter") == expected, path
    assert (await replica.status())["version"] == "a"


@pytest.mark.parametrize("fault", ["nan", "record"])
async def test_swap_with_failed_check_ends_engine(engine_box, start, a, fault):
    replica, sdk, spec, pid = await start("unfit", a)
    expected = await greedy(sdk, "starter")
    if fault == "nan":
        bad = engine_box.root / "versions" / "nan"
        rewrite(a, bad, lambda tensors: {name: torch.full_like(t, float("nan")) for name, t in tensors.items()})
    else:
        record = {"prompt": [1, 2], "token": 3, "logprob": -0.5}
        bad = stored(engine_box, "tampered", engine_box.version("c", seed=9), {"fingerprint": record}).path
    with pytest.raises(VersionBroken if fault == "nan" else EngineFailed, match="finite|as recorded"):
        await replica.swap("starter", "bad", str(bad))
    ended = await replica.wait_dead()
    assert "swap failed" in ended["exit"] and not Path(f"/proc/{pid}").exists()
    await replica.start(spec)
    assert await greedy(sdk, "starter") == expected


async def test_tensor_parallel_workers_read_only_their_slices(start, a, b):
    two = {"tensor_parallel": 2, "devices": (0, 1)}
    replica, sdk, *_ = await start("tp", a, **two)
    report = await replica.swap("starter", "b", str(b))
    assert len(report["bytes_read"]) == 2
    for slice_bytes in report["bytes_read"]:
        assert 0.49 < slice_bytes / report["bytes"] < 0.52  # half, plus the norms, which every worker needs
    await replica.sleep()
    await replica.wake("starter", "a", str(a))
    want = await greedy_ids(sdk, "starter", [10, 20, 30], 400)
    for _ in range(5):  # A busy machine can end the stream before the swap begins.
        seen: list[int] = []
        streaming = asyncio.create_task(stream_ids(sdk, "starter", [10, 20, 30], 400, seen))
        while len(seen) < 3:
            await asyncio.sleep(0.001)
        await replica.swap("starter", "b", str(b))
        answer = await greedy(sdk, "starter")
        await streaming
        if seen != want:
            break
        await replica.swap("starter", "a", str(a))
    assert len(seen) == 400 and seen != want
    await replica.stop()
    _, fresh, *_ = await start("tp-fresh", b, **two)
    assert answer == await greedy(fresh, "starter")


async def test_swap_with_duplicate_tied_head_is_refused(engine_box, start):
    """vLLM keeps only one of head and embedding if they are equal."""

    def stored_twice(name, seed):
        tied = engine_box.version(f"{name}-tied", "qwen2", seed=seed)
        embedding = "model.embed_tokens.weight"
        return rewrite(tied, tied.parent / name, lambda t: {**t, "lm_head.weight": t[embedding].clone()})

    b = stored_twice("twice-b", 2)
    replica, sdk, *_ = await start("twice", stored_twice("twice-a", 1))
    of_a = await greedy_ids(sdk, "starter", [30, 40, 50], FEW)
    with pytest.raises(VersionMismatch):
        await replica.swap("starter", b.name, str(b))
    assert await greedy_ids(sdk, "starter", [30, 40, 50], FEW) == of_a


async def test_operations_run_serially_and_check_state(start, a, b):
    replica, _, spec, _ = await start("states", a)
    with pytest.raises(WrongState, match="wake needs a asleep|wake needs"):
        await replica.wake("starter", "a", str(a))
    with pytest.raises(WrongState, match="runs an engine already"):
        await replica.start(spec)
    both = await asyncio.gather(replica.swap("starter", "b", str(b)), replica.swap("starter", "a", str(a)))
    assert [report["version"] for report in both] == ["b", "a"]
    assert (await replica.status())["version"] == "a"


def stored(box, name, source, meta):
    """Publish through the store in model order, so that q, k, v and gate, up are adjacent."""
    store = WeightStore(box.root / "store", budget_bytes=None)
    tensors = load_file(source / "model.safetensors")
    order = sorted(tensors, key=lambda key: [key.rsplit(".", 2)[0], "qkvogud".find(key.rsplit(".", 2)[1][0])])
    layout = Layout.plan([TensorSpec(key, "BF16", tuple(tensors[key].shape)) for key in order])
    aux = {file.name: file.read_bytes() for file in source.iterdir() if file.suffix in (".json", ".jinja")}
    draft = store.reserve(layout, kind="version", model="m", version=name, aux_files=aux)
    for key, tensor in tensors.items():
        draft.view(key)[:] = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return draft.commit(meta=meta, pinned=False)


async def test_store_versions_are_leased_while_served(engine_box, start, a, b):
    store = WeightStore(engine_box.root / "store", budget_bytes=None)
    first, second = (stored(engine_box, path.name, path, {}) for path in (a, b))
    replica, sdk, *_ = await start("store", first.path, version="a")
    with pytest.raises(VersionLeased):
        store.remove(first)
    await replica.swap("m", "b", str(second.path))
    _, plain, *_ = await start("store-plain", b)
    expected = await greedy(plain, "starter")
    assert await greedy(sdk, "m") == expected
    store.remove(first)
    with pytest.raises(VersionLeased):
        store.remove(second)
    await replica.sleep()
    await replica.wake("m", "b", str(second.path))
    assert await greedy(sdk, "m") == expected
    with pytest.raises(VersionLeased):
        store.remove(second)
    await replica.stop()
    store.remove(second)


@pytest.mark.soak
@pytest.mark.skipif(bool(HOST.lacks_for_quantised()), reason=HOST.lacks_for_quantised())
@pytest.mark.parametrize("form", ["w4a16", "w8a8"])
async def test_quantised_engine_keeps_version_over_sleep(engine_box, start, form):
    packed = engine_box.root / "versions" / f"{form}-a"
    quantised.write(engine_box.version("plain", seed=1), form, packed, engine_box.root / "versions" / "means")
    other = rewrite(packed, packed.parent / f"{form}-b", dict)
    replica, sdk, *_ = await start(form, packed)
    first = await greedy(sdk, "starter")
    with pytest.raises(VersionMismatch, match="quantised"):
        await replica.swap("starter", "b", str(other))
    await replica.sleep()
    with pytest.raises(VersionMismatch, match="quantised"):
        await replica.wake("starter", "b", str(other))
    assert (await replica.wake("starter", "a", str(packed)))["how"] == "kept"
    assert await greedy(sdk, "starter") == first


@pytest.mark.soak
@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe"])
async def test_swapped_family_equals_fresh_engine(engine_box, start, family, tensor_parallel):
    one, other = (engine_box.version(f"{family}-{seed}", family, seed=seed) for seed in (1, 2))
    shared = {"tensor_parallel": tensor_parallel, "devices": tuple(range(tensor_parallel))}
    reference, fresh, *_ = await start("family-fresh", other, **shared)
    want = await greedy(fresh, "starter")
    await reference.stop()
    replica, sdk, *_ = await start("family", one, **shared)
    first = await greedy(sdk, "starter")
    assert first != want
    await replica.swap("starter", "b", str(other))
    assert await greedy(sdk, "starter") == want
    await replica.swap("starter", "a", str(one))
    assert await greedy(sdk, "starter") == first
    await replica.sleep()
    await replica.wake("starter", "b", str(other))
    assert await greedy(sdk, "starter") == want


MIB = 2**20
LARGE = sizes(512, 1536, 3, 8, 4, head_dim=64, initializer_range=0.06)


async def test_sleep_frees_memory_and_wake_is_exact(engine_box, start):
    large, other = (engine_box.version(f"large-{seed}", seed=seed, **LARGE) for seed in (1, 2))
    replica, sdk, *_ = await start("sleeper", large, kv_cache_bytes=96 * MIB)
    expected = await greedy(sdk, "starter")

    awake_bytes = (await replica.status())["rss_bytes"]
    await replica.sleep()
    weights, asleep = (large / "model.safetensors").stat().st_size, await replica.status()
    assert asleep["state"] == "asleep" and awake_bytes - asleep["rss_bytes"] > 0.9 * (weights + 96 * MIB)
    for call in (replica.sleep(), replica.swap("starter", "b", str(other))):
        with pytest.raises(WrongState, match="asleep"):
            await call

    held = asyncio.create_task(greedy(sdk, "starter"))
    while (status := await replica.status())["waiting"] == 0:
        assert not held.done() and status["state"] == "asleep"
    assert (status["state"], status["running"], status["waiting"]) == ("asleep", 0, 1)
    await replica.wake("starter", "a", str(large))
    assert await held == expected == await greedy(sdk, "starter")

    await replica.sleep()
    await replica.wake("tuned", "b", str(other))
    _, fresh, *_ = await start("sleeper-fresh", other)
    assert await greedy(sdk, "tuned") == await greedy(fresh, "starter")
    await replica.swap("starter", "a", str(large))
    assert await greedy(sdk, "starter") == expected


async def test_sleep_with_running_requests_is_refused(engine_box, start):
    replica, sdk, _, pid = await start("busy", engine_box.version("long", seed=1, max_position_embeddings=4096))
    core = next(each for each in group_pids(pid) if each != pid)
    streams = [
        asyncio.create_task(
            sdk.completions.create(model="starter", prompt="x", max_tokens=1500, extra_body={"ignore_eos": True})
        )
        for _ in range(3)
    ]
    while (await replica.status())["running"] < len(streams):
        assert not any(stream.done() for stream in streams)
    # Their answers must take longer than sleep's grace of two seconds, even on a fast machine.
    os.kill(core, signal.SIGSTOP)
    try:
        with pytest.raises(WrongState, match="drain it"):
            await replica.sleep()
    finally:
        os.kill(core, signal.SIGCONT)
    answers = await asyncio.gather(*streams)
    assert all(choice.finish_reason == "length" for answer in answers for choice in answer.choices)


async def test_wake_with_refused_version_can_be_retried(engine_box, start, a):
    other = engine_box.version("mistral-a", "mistral", seed=4)
    replica, sdk, *_ = await start("refused-wake", a)
    expected = await greedy(sdk, "starter")
    await replica.sleep()
    with pytest.raises(VersionMismatch):
        await replica.wake("starter", "other", str(other))
    await replica.wake("starter", "a", str(a))
    assert await greedy(sdk, "starter") == expected


async def test_sleeping_engines_wake_with_own_versions(engine_box, start):
    paths = [engine_box.version(name, seed=seed) for name, seed in (("a", 1), ("b", 2), ("c", 3))]
    engines, expected = [], []
    for path in paths:
        engines.append(await start(f"resident-{path.name}", path, kv_cache_bytes=64 * MIB))
        expected.append(await greedy(engines[-1].sdk, "starter"))
        awake_bytes = (await engines[-1].replica.status())["rss_bytes"]
        await engines[-1].replica.sleep()
        assert awake_bytes - (await engines[-1].replica.status())["rss_bytes"] > 0.9 * 64 * MIB
    assert [(await engine.replica.status())["state"] for engine in engines] == ["asleep"] * 3
    for engine, path, answer in zip(engines, paths, expected, strict=True):
        await engine.replica.wake("starter", path.name, str(path))
        assert await greedy(engine.sdk, "starter") == answer


PROMPT = [10, 20, 30, 40]


@pytest.fixture
async def ahead(engine_box, start, a, monkeypatch):
    """Starts an engine of version a with asynchronous scheduling, checked in its log, as (replica, SDK)."""
    logs = []

    async def ahead(name, **fields):
        with monkeypatch.context() as patch:
            patch.setattr(replica_module, "ENTRY", "tests.e2e.async_engine:main")
            engine = await start(name, a, extra_args=AHEAD_ARGUMENTS, **fields)
        logs.append(engine_box.logs / f"engine-{name}.log")
        return engine.replica, engine.sdk

    yield ahead
    assert logs and all(AHEAD in log.read_text() for log in logs)


@pytest.fixture
async def fresh(start, b):
    """The SDK of a normal engine of version b."""
    return (await start("ahead-fresh", b)).sdk


async def test_async_stream_continues_through_swap(ahead, fresh, a, b):
    engine, sdk = await ahead("ahead")
    await stream_through_swap(engine, sdk, fresh, a, b)
    assert await greedy(sdk, "tuned") == await greedy(fresh, "starter")


async def test_async_full_batch_and_queue_survive_swaps(ahead, fresh, a, b):
    engine, sdk = await ahead("ahead-full", max_num_seqs=4)
    tokens = 300
    asked = [asyncio.create_task(greedy_ids(sdk, "starter", [number, *PROMPT], tokens)) for number in range(5, 17)]
    while (await engine.status())["running"] < 4:
        assert not all(task.done() for task in asked)
    for version in (b, a, b):
        await engine.swap("starter", version.name, str(version))
        later = asyncio.create_task(greedy_ids(sdk, "starter", PROMPT, 8))
        asked.append(later)
    answers = await asyncio.gather(*asked)
    assert [len(answer) for answer in answers] == [tokens] * 12 + [8] * 3
    assert await greedy_ids(sdk, "starter", PROMPT, 40) == await greedy_ids(fresh, "starter", PROMPT, 40)
    status = await engine.status()
    assert (status["state"], status["running"], status["waiting"]) == ("ready", 0, 0)


async def test_async_request_during_sleep_gets_woken_version(ahead, fresh, a, b):
    engine, sdk = await ahead("ahead-asleep")
    own = await greedy(sdk, "starter")
    for version, expected in ((b, await greedy(fresh, "starter")), (a, own)):
        await engine.sleep()
        held = asyncio.create_task(greedy(sdk, "starter"))
        while (await engine.status())["waiting"] == 0:
            assert not held.done()
        woken = await engine.wake("starter", version.name, str(version))
        assert woken["version"] == version.name
        assert await held == expected == await greedy(sdk, "starter")
