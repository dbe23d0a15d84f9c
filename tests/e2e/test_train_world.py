"""Training worlds of real forked ranks: changes of size, publishing, deaths."""

import asyncio
import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.processes.kernel import group_pids
from tests.train_support.world import ACROSS_SIZES, JUDGED, METHODS, PATIENT, losses_of, same, worst
from train.control.group import Group, PingLimits
from train.plan.errors import RankFailed
from weights.tiers.copies import seal_dir, take_in

# Rows of complete groups of 128 weights, the groups of a 4-bit base.
QLORA = {
    "form": "int4",
    "model": {"hidden_size": 128, "intermediate_size": 256},
    "full": False,
    "lora_rank": 4,
    "lora_publish": "adapter",
    "learning_rate": 3e-3,
}


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("zero2", {"zero_stage": 2, "weight_decay": 0.1}),
        ("zero3", {"zero_stage": 3}),
        ("lora", {"zero_stage": 1, "full": False, "lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 1e-2}),
        ("qlora-zero3", {**QLORA, "zero_stage": 3}),
        pytest.param("qlora", {**QLORA, "form": "int8", "zero_stage": 2}, marks=pytest.mark.soak),
        pytest.param("qlora-offload", {**QLORA, "zero_stage": 3, "offload": "parameters"}, marks=pytest.mark.soak),
        pytest.param("dpo-zero3", {"method": "dpo", "zero_stage": 3, "model": {"tied": True}}, marks=pytest.mark.soak),
        ("kto-zero3", {"method": "kto", "zero_stage": 3, "learning_rate": 1e-2}),
        # At a rate of 1e-2, unmoved worlds of 4 and of 2 ranks differ by 5.5e-6.
        ("dpo-lora", {"method": "dpo", "zero_stage": 2, "full": False, "lora_rank": 4, "learning_rate": 3e-3}),
    ],
)
async def test_resume_on_other_sizes_keeps_losses(shop, kind, fields):
    unbroken = await shop.run(shop.spec("unbroken", **fields), 2)
    total = unbroken.of("metrics")[0]["total_steps"]
    assert all(len(told["rank_seconds"]) == 2 and min(told["rank_seconds"]) > 0 for told in unbroken.of("metrics"))
    assert total >= 9 and unbroken.losses()[total] < unbroken.losses()[1]

    worlds = await shop.moved(shop.spec("moved", **fields), 4, 2, 4)
    losses = losses_of(worlds)
    assert len(worlds) == 3 and losses.keys() == unbroken.losses().keys()
    norms = {event["step"]: event["grad_norm"] for world in worlds for event in world.of("metrics")}
    for event in unbroken.of("metrics"):  # summed over the ranks, not averaged: Adam would hide it in the losses
        assert norms[event["step"]] == pytest.approx(event["grad_norm"], rel=1e-2)
    print(f"{kind}: worst difference of a step's loss over sizes 4, 2, 4: {worst(losses, unbroken.losses()):.1e}")
    assert worst(losses, unbroken.losses()) <= ACROSS_SIZES
    assert len([s for s in shop.store.list("snapshot") if s.model == "moved"]) <= 2


@pytest.mark.parametrize(
    "method, fields",
    [
        ("reinforcement", {"zero_stage": 2, "full": False, "lora_rank": 4, "learning_rate": 1e-2}),
        pytest.param("reinforcement", {"zero_stage": 3}, marks=pytest.mark.soak),
        pytest.param("distillation", {"zero_stage": 2, "full": False, "lora_rank": 4}, marks=pytest.mark.soak),
        ("distillation", {"zero_stage": 3}),
    ],
    ids=["reinforcement-lora", "reinforcement-zero3", "distillation-lora", "distillation-zero3"],
)
async def test_samples_count_once_when_run_changes_size(shop, method, fields):
    fields = {"method": method, "examples": 32, "packing": False, "n_epochs": 1} | fields
    unbroken = await shop.run(shop.spec("unbroken", **fields), 2)
    total = unbroken.of("metrics")[0]["total_steps"]
    assert total == len(unbroken.sampler.drawn) == 8

    worlds = await shop.moved(shop.spec("moved", **fields), 2, 4, 1)
    verdicts = {event["step"]: event[JUDGED[method]] for world in worlds for event in world.of("metrics")}
    drawn = [file.step for world in worlds for file, _, _ in world.sampler.drawn]
    assert verdicts.keys() == set(range(1, total + 1)) and drawn == list(range(total)), "each file is drawn once"
    expected = {event["step"]: event[JUDGED[method]] for event in unbroken.of("metrics")}
    assert all(abs(verdicts[step] - one) < 1e-6 for step, one in expected.items()), (verdicts, expected)


async def test_best_version_is_result_and_worsening_run_ends(shop):
    shop.spec("other", examples=24)  # writes the validation file
    fields = {"examples": 4, "learning_rate": 2e-2, "n_epochs": 12, "batch_size": 2, "micro_batch": 1, "packing": False}
    spec = shop.spec(
        "best",
        **fields,
        valid_path=str(next(shop.folder.glob("*-24.jsonl"))),
        publish="best",
        lr_scheduler="constant",
        early_stopping_patience=2,
    )
    world = await shop.launch(spec, 2).start()
    while len(world.of("validation")) < 2:
        await asyncio.sleep(0.01)
    report = await world.group.suspend()
    assert (await world.group.wait()).outcome == "suspended"
    again = await shop.run(spec, 1, snapshot=report.snapshot_path)

    losses = {event["step"]: event["loss"] for event in (*world.of("validation"), *again.of("validation"))}
    print(losses, [(e["step"], e["version"]) for e in (*world.of("published"), *again.of("published"))])
    del losses[0]
    best = min(losses, key=losses.__getitem__)
    assert list(losses)[list(losses).index(best) + 1 :] == list(losses)[-2:], "two that were not better, and it ended"
    assert max(again.losses()) == max(losses) < again.of("metrics")[0]["total_steps"]
    told = [event["text"] for event in again.of("message")]
    assert any(f"not better than the one at step {best}" in text for text in told), told
    assert any(f"the result is the version of step {best}" in text for text in told), told
    versions = [event["step"] for event in (*world.of("published"), *again.of("published"))]
    assert versions[-1] == best and max(losses) not in versions


async def test_resume_at_same_size_is_bitwise(shop):
    tiny = {"precision": "bf16", "examples": 16, "publish": "checkpoints"}
    spec, broken = shop.spec("a", **tiny), shop.spec("b", **tiny)
    unbroken = await shop.run(spec, 2)
    worlds = await shop.moved(broken, 2, 2)
    assert len(worlds) == 2 and losses_of(worlds) == unbroken.losses()
    epochs = [(event["step"], event["epoch"]) for event in unbroken.of("published")]
    again = [(event["step"], event["epoch"]) for world in worlds for event in world.of("published")]
    assert len(epochs) == 2 and epochs == again
    assert same(shop.published(spec)[0], shop.published(broken)[0])


async def test_non_finite_loss_fails_without_retry(shop):
    world = await shop.launch(
        shop.spec("ends", learning_rate=1e30, lr_scheduler="constant", warmup_ratio=0.0), 2
    ).start()
    outcome = await world.group.wait()
    assert not outcome.error.retryable and outcome.error.code == "TrainingDiverged"
    assert not world.of("published")


async def test_published_version_has_trained_weights(shop):
    spec = shop.spec(zero_stage=3, model={"tied": True, "family": "qwen2"}, version_prefix="a1b2c3d4-", n_epochs=1)
    world = await shop.run(spec, 2)
    (event,) = world.of("published")
    tensors, stored = shop.published(spec)
    assert stored.version == event["version"] == f"a1b2c3d4-step-{event['step']}"
    assert str(stored.path) == event["path"]
    assert "lm_head.weight" not in tensors and "model.layers.0.self_attn.q_proj.bias" in tensors
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(stored.path)
    assert model.dtype == torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight
    base = load_file(f"{spec.base_path}/model.safetensors")
    assert all(not torch.equal(tensors[k], base[k]) for k in tensors if tensors[k].ndim == 2)
    assert AutoTokenizer.from_pretrained(stored.path).chat_template
    # The published weights give the loss that a last validation would measure.
    assert json.loads((stored.path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("method", ["supervised", "dpo", *JUDGED])
async def test_killed_rank_fails_world_and_snapshot_resumes(shop, method):
    fields = of_method(method) | ({"n_epochs": 1} if method in JUDGED else {"batch_size": 2})
    spec = shop.spec("killed", **fields, snapshot_every_s=0.3)
    world = await shop.launch(spec, 2).start()
    snapshot = await world.killed(1)
    again = await shop.run(spec, 2, snapshot=snapshot["path"])
    assert min(again.losses()) == snapshot["step"] + 1
    assert {*world.losses(), *again.losses()} == set(range(1, again.of("metrics")[0]["total_steps"] + 1))
    if method not in JUDGED:
        whole = (await shop.run(shop.spec("whole", **fields), 2)).losses()
        assert all(whole[step] == loss for step, loss in again.losses().items())


async def test_stopped_rank_fails_world(shop):
    limits = PingLimits(ping_every_s=0.2, ping_timeout_s=3.0, phase_limit_s=120.0)
    world = await shop.launch(shop.spec(n_epochs=40), 2, limits=limits).start()
    await world.reached(1)
    os.kill(world.pids()[0], signal.SIGSTOP)
    outcome = await asyncio.wait_for(world.group.wait(), 100)
    assert outcome.error.retryable and "did not answer" in str(outcome.error)
    assert not any(group_pids(pid) for pid in world.pids())


async def test_full_store_costs_no_progress(shop):
    # Room for the published version (about 170 kB), not for a snapshot of a MB.
    spec = shop.spec(n_epochs=4, shm_budget_bytes=600_000)
    world = await shop.launch(spec, 2).start()
    await world.reached(2)
    report = await world.group.suspend()
    assert report.snapshot_path.startswith(spec.run_dir) and shop.store.list("snapshot") == []
    assert "goes to disk" in world.of("message")[-1]["text"]
    again = await shop.run(spec, 1, snapshot=report.snapshot_path)
    assert min(again.losses()) == report.step + 1 and len(again.of("published")) == 1


async def test_too_large_result_is_kept_on_disk_until_published(shop):
    spec = shop.spec(n_epochs=1, shm_budget_bytes=100_000)
    world = await shop.launch(spec, 2).start()
    outcome = await world.group.wait()
    assert outcome.outcome == "failed", outcome
    assert outcome.error.code == "StoreFull" and outcome.error.retryable, outcome
    kept = world.of("snapshot")[-1]["path"]
    again = await shop.run(replace(spec, shm_budget_bytes=None), 1, snapshot=kept)
    assert again.losses() == {} and len(again.of("published")) == 1


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("zero1", {"zero_stage": 1, "model": {"tied": True}}),
        ("zero2", {"zero_stage": 2, "offload": "optimizer"}),
        ("zero3", {"zero_stage": 3, "model": {"tied": True, "family": "qwen2"}}),
        ("lora2", {"zero_stage": 2, "full": False, "learning_rate": 0.05}),
        ("lora3", {"zero_stage": 3, "full": False, "learning_rate": 0.05}),
        ("mixtral1", {"zero_stage": 1, "model": {"family": "mixtral"}}),
        ("mixtral3", {"zero_stage": 3, "model": {"family": "mixtral"}}),
        ("qwen3_moe2", {"zero_stage": 2, "model": {"family": "qwen3_moe", "tied": True}}),
        ("lora-mixtral3", {"zero_stage": 3, "full": False, "learning_rate": 0.05, "model": {"family": "mixtral"}}),
        ("adapter1", {"zero_stage": 1, "full": False, "lora_publish": "adapter", "learning_rate": 0.05}),
        ("adapter3", {"zero_stage": 3, "full": False, "lora_publish": "adapter", "learning_rate": 0.05}),
    ],
)
async def test_publish_by_fragments_equals_gathered_model(shop, kind, fields):
    spec = shop.spec(**fields)
    written = []
    for event in await shop.compare_publish(spec, 2):
        assert event["names"] == event["expected"]
        # peft multiplies the factors in bf16, we in fp32: one ulp of a bf16 weight of this size.
        assert max(event["worst"].values(), default=0.0) <= (4e-3 if kind.startswith("lora") else 0.0)
        # No rank writes a whole copy.
        written.append(event["written_elements"])
        assert written[-1] < 0.6 * event["elements"]
    assert sum(written) == event["elements"]


async def test_bad_input_is_final_and_kill_leaves_no_snapshot(shop):
    with pytest.raises(RankFailed, match="within max_length 2") as caught:
        await shop.launch(shop.spec("refused", max_length=2), 2).start()
    assert not caught.value.retryable and caught.value.code == "InvalidTrainingData"
    with pytest.raises(RankFailed, match="batch_size 4") as caught:
        await shop.launch(shop.spec("wrong-size"), 3, limits=PATIENT).start()
    assert not caught.value.retryable

    seal_dir(shop.base, kind="version", model="base", version="v1")
    base = take_in(shop.store, shop.base)
    world = await shop.launch(shop.spec("killed", n_epochs=40, base_path=str(base.path)), 2).start()
    await world.reached(1)
    shop.store.evict(1 << 40)
    assert shop.store.find("version", "base", "v1") is not None, "its ranks hold it"
    assert (await world.group.kill()).error.code == "killed"
    assert shop.store.list("snapshot") == []
    shop.store.evict(1 << 40)
    assert shop.store.list("version") == []


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])  # 0 runs as 1
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"model": {"tied": True}},
        {"full": False, "lora_dropout": 0.1},
        {"offload": "optimizer"},
        {"offload": "parameters"},
        {"micro_batch": 2, "batch_size": 16},
        {"weight_decay": 0.1},
        {"activation_checkpointing": True},
        {"packing": False},
        {"batch_size": 12, "sizes": (3, 4, 2)},
        {"method": "dpo"},
        {"method": "dpo", "full": False},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
async def test_each_configuration_moves_between_sizes(shop, precision, zero_stage, more):
    fields = dict(more)
    if fields.get("offload") == "parameters" and zero_stage != 3:
        pytest.skip("offloading parameters is a matter of ZeRO-3")
    sizes = fields.pop("sizes", (8, 2, 4))
    fields = {"batch_size": 8, "examples": 160} | fields | {"precision": precision, "zero_stage": zero_stage}
    unbroken = await shop.run(shop.spec("unbroken", **fields), 2)
    losses = losses_of(await shop.moved(shop.spec("moved", **fields), *sizes))
    assert losses.keys() == unbroken.losses().keys() and worst(losses, unbroken.losses()) <= ACROSS_SIZES


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed, left", [((2, 3), 2), ((0, 1, 2, 3), 1)], ids=["half", "all"])
@pytest.mark.parametrize("method", METHODS)
async def test_killed_ranks_resume_from_snapshot_on_fewer(shop, killed, left, method):
    fields = of_method(method)
    whole = await shop.run(shop.spec("whole", **fields), 4)
    spec = shop.spec("killed", **fields, snapshot_every_s=0.3)
    snapshot = await (await shop.launch(spec, 4).start()).killed(*killed)
    assert os.listdir(shop.store.root / "staging") == [], "no litter"
    again = await shop.run(spec, left, snapshot=snapshot["path"])
    assert min(again.losses()) == snapshot["step"] + 1 and max(again.losses()) == max(whole.losses())
    if method in JUDGED:  # rounding may change single tokens, never prompts
        expected = {event["step"]: event[JUDGED[method]] for event in whole.of("metrics")}
        assert all(abs(one[JUDGED[method]] - expected[one["step"]]) < 0.05 for one in again.of("metrics"))
        return
    assert worst(again.losses(), whole.losses()) <= ACROSS_SIZES


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=[pytest.mark.soak] * (one == "distillation")) for one in METHODS]
)
async def test_second_group_takes_over_running_ranks(shop, method):
    """The controller is killed while a job trains; its successor keeps processes, events and steps."""
    first = await shop.launch(shop.spec(**{"n_epochs": 3} | of_method(method)), 2).start()
    await first.reached(2)
    first.group._following.cancel()  # like the death of its process
    heard = first.events
    told = first.events = []
    second = Group(first._note)  # the samples stay the same
    await second.adopt("job", first.hosts)
    assert [await host.status() for host in first.hosts] == [
        {"job_id": "job", "rank": rank, "world_size": 2} for rank in range(2)
    ]
    assert (await second.wait()).outcome == "succeeded"
    assert "started" not in [event["event"] for event in told]
    metrics = [event for event in [*heard, *told] if event["event"] == "metrics"]
    steps, total = [event["step"] for event in metrics], metrics[0]["total_steps"]
    assert sorted(set(steps)) == list(range(1, total + 1)) and len(steps) <= total + 1
    assert [event["outcome"] for event in told if event["event"] == "finished"] == ["succeeded"]
    assert [(await host.status())["job_id"] for host in first.hosts] == ["", ""]


async def test_world_that_ended_unwatched_is_taken_over(shop):
    first = await shop.launch(shop.spec(n_epochs=1), 2).start()
    first.group._following.cancel()
    for host in first.hosts:
        await host._child.closed()
    told = []
    second = Group(told.append)
    await second.adopt("job", first.hosts)
    assert (await second.wait()).outcome == "succeeded"
    assert "published" in [event["event"] for event in told]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"zero_stage": 1, "precision": "bf16"}, id="zero1-bf16"),
        pytest.param({"zero_stage": 3}, id="zero3"),
        pytest.param(
            {"zero_stage": 2, "full": False, "lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 1e-2}, id="lora"
        ),
        pytest.param({"zero_stage": 2, "method": "dpo"}, id="dpo", marks=pytest.mark.soak),
        pytest.param({"zero_stage": 2, "offload": "optimizer"}, id="offload", marks=pytest.mark.soak),
    ],
)
async def test_aborted_step_is_repeated_bitwise(shop, fields):
    # Steps of many micro-batches: the suspension aborts a step between two of them.
    fields |= {"batch_size": 16, "examples": 96}
    unbroken = await shop.run(shop.spec("unbroken", **fields), 2)
    spec, losses, snapshot, left = shop.spec("left", **fields), {}, None, 0
    while left == 0:  # a suspension during a step's last micro-batch aborts nothing
        world = await shop.launch(spec, 2, snapshot=snapshot).start()
        await world.reached(max(losses, default=0) + 1)
        report = await world.group.suspend()
        losses |= world.losses()
        left += sum("was aborted" in message["text"] for message in world.of("message"))
        snapshot = report.snapshot_path
    last = await shop.run(spec, 2, snapshot=snapshot)
    assert losses | last.losses() == unbroken.losses() and not losses.keys() & last.losses().keys()
    assert same(shop.published(spec)[0], shop.published(unbroken.spec)[0])


def of_method(method):
    """Spec fields of a method; few prompts if answers are judged, so that sampling takes only seconds."""
    return {"method": method} | ({"examples": 24, "packing": False} if method in JUDGED else {})
