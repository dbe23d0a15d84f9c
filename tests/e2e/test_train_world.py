"""Training worlds of real forked ranks: moving between sizes, publishing, dying."""

import asyncio
import json
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.process import group_pids
from tests.train_support.world import PATIENT, WarmTrain, Workshop
from train.errors import RankFailed
from train.group import Watch

# Gradients are reduced and accumulated in fp32, so only the order of fp32 sums differs between world sizes.
ACROSS_SIZES = 2e-6


@pytest.fixture(scope="module")
def warm():
    parent = WarmTrain().wait()
    yield parent
    parent.close()


@pytest.fixture
def shop(warm, tmp_path):
    made = Workshop(warm, tmp_path)
    yield made
    made.close()


def published(shop, spec):
    (stored,) = [v for v in shop.store.list("version") if v.model == spec.output_model]
    return {k: v for file in stored.path.glob("*.safetensors") for k, v in load_file(file).items()}, stored


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("zero2", {"zero_stage": 2}),
        ("zero3", {"zero_stage": 3}),
        ("lora", {"zero_stage": 1, "full": False, "lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 1e-2}),
    ],
)
async def test_suspend_and_resume_on_other_sizes_keeps_the_loss_curve(shop, kind, fields):
    unbroken = await shop.run(shop.spec("unbroken", **fields), 4)
    total = unbroken.of("metrics")[0]["total_steps"]
    assert total >= 9 and unbroken.losses()[total] < unbroken.losses()[1]

    spec, snapshot, losses = shop.spec("moved", **fields), None, {}
    for size, until in ((4, 2), (2, 5), (4, None)):
        world = await shop.launch(spec, size, snapshot=snapshot).start()
        if until is not None:
            await world.reached(until)
            pids = world.pids()
            report = await world.group.suspend()
            snapshot = report.snapshot_path
            assert report.step >= until and report.bytes > 0
            assert not any(group_pids(pid) for pid in pids), "the devices must be free"
        outcome = await world.group.wait()
        assert outcome.outcome == ("suspended" if until else "succeeded"), world.logs()
        assert not losses.keys() & world.losses().keys(), "no step is done twice"
        losses |= world.losses()
    assert losses.keys() == unbroken.losses().keys()
    worst = max(abs(losses[step] - loss) for step, loss in unbroken.losses().items())
    assert worst <= ACROSS_SIZES * 10, f"{kind}: {worst}"
    assert len([s for s in shop.store.list("snapshot") if s.model == "moved"]) <= 2


async def test_resume_at_the_same_size_is_bitwise(shop):
    spec = shop.spec("a", zero_stage=2, precision="bf16")
    unbroken = await shop.run(spec, 2)
    broken = shop.spec("b", zero_stage=2)
    first = await shop.launch(broken, 2).start()
    await first.reached(3)
    report = await first.group.suspend()
    second = await shop.run(broken, 2, snapshot=report.snapshot_path)
    assert first.losses() | second.losses() == unbroken.losses()
    assert same(published(shop, spec)[0], published(shop, broken)[0])


async def test_published_version_is_a_model_directory_with_the_trained_weights(shop):
    spec = shop.spec(zero_stage=3, model={"tied": True, "family": "qwen2"}, output_version="v7", n_epochs=1)
    world = await shop.run(spec, 2)
    (event,) = world.of("published")
    tensors, stored = published(shop, spec)
    assert stored.version == event["version"] == "v7" and str(stored.path) == event["path"] and stored.sealed
    assert "lm_head.weight" not in tensors and "model.layers.0.self_attn.q_proj.bias" in tensors
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(stored.path)
    assert model.dtype == torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight
    base = load_file(f"{spec.base_path}/model.safetensors")
    assert all(not torch.equal(tensors[k], base[k]) for k in tensors if tensors[k].ndim == 2)
    assert AutoTokenizer.from_pretrained(stored.path).chat_template
    # The weights the loss was computed with: what the last validation would see is what is served.
    assert json.loads((stored.path / "config.json").read_text())["dtype"] == "bfloat16"


async def test_a_killed_rank_fails_the_world_quickly_and_the_snapshot_continues_it(shop):
    whole = await shop.run(shop.spec("whole", batch_size=2), 2)
    spec = shop.spec("killed", batch_size=2)
    world = await shop.launch(spec, 2).start()
    await world.reached(2)
    await world.group.snapshot()
    while not world.of("snapshot"):
        await asyncio.sleep(0.01)
    pids = world.pids()
    started = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    outcome = await world.group.wait()
    assert time.monotonic() - started < 8
    assert outcome.outcome == "failed" and outcome.error["retryable"]
    assert outcome.error["message"].startswith("rank 1 died"), outcome
    assert not any(group_pids(pid) for pid in pids)

    snapshot = world.of("snapshot")[-1]
    again = await shop.run(spec, 2, snapshot=snapshot["path"])
    assert min(again.losses()) == snapshot["step"] + 1
    assert all(whole.losses()[step] == loss for step, loss in again.losses().items())


async def test_a_stopped_rank_is_noticed(shop):
    watch = Watch(ping_every_s=0.2, ping_timeout_s=3.0, phase_limit_s=120.0)
    world = await shop.launch(shop.spec(n_epochs=40), 2, watch=watch).start()
    await world.reached(1)
    os.kill(world.pids()[0], signal.SIGSTOP)
    outcome = await asyncio.wait_for(world.group.wait(), 20)
    assert outcome.error["retryable"] and "did not answer" in outcome.error["message"]
    assert not any(group_pids(pid) for pid in world.pids())


async def test_bad_input_fails_for_good_and_cancel_leaves_no_snapshot(shop, tmp_path):
    spec = shop.spec("bad")
    lines = open(spec.train_path).read().splitlines()
    hidden = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join([*lines, json.dumps(hidden)]) + "\n")
    with pytest.raises(RankFailed, match="batch_size 4") as caught:
        await shop.launch(shop.spec("wrong-size"), 3, watch=PATIENT).start()
    assert not caught.value.retryable

    world = await shop.launch(shop.spec("cancelled", n_epochs=40), 2).start()
    await world.reached(1)
    assert (await world.group.cancel()).outcome == "cancelled"
    assert shop.store.list("snapshot") == [] and shop.store.list("version") == []
