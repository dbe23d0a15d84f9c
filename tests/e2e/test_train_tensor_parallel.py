"""Tensor parallelism: a model split over ranks trains, moves and publishes like a model that is whole on each rank."""

from dataclasses import replace

import pytest

from tests.train_support.tiny import write_text_file
from tests.train_support.world import ACROSS_SIZES, JUDGED, METHODS, losses_of, same, worst
from train.methods.methods import method_of

ADAPTER = {"full": False, "lora_rank": 4, "learning_rate": 1e-2}
QLORA = {"form": "int4", "model": {"hidden_size": 128, "intermediate_size": 256}, **ADAPTER, "lora_publish": "adapter"}
AGAIN = {"activation_checkpointing": True}
FAR = {"zero_stage": 3, "offload": "parameters"}
TEXT = {"write": write_text_file}


@pytest.mark.parametrize(
    "fields",
    [
        *({"method": name} for name in METHODS if not method_of(name).rolls_out),
        ADAPTER,
        {"zero_stage": 3},
        {**ADAPTER, "zero_stage": 3},
        pytest.param({"zero_stage": 2, "offload": "optimizer"}, marks=pytest.mark.soak),
        pytest.param({"zero_stage": 3, "offload": "parameters"}, marks=pytest.mark.soak),
        pytest.param({**ADAPTER, "zero_stage": 3, "offload": "parameters"}, marks=pytest.mark.soak),
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
async def test_shared_model_keeps_losses_between_sizes(shop, fields):
    reference = shop.spec("whole", n_epochs=1, **fields)
    whole = (await shop.run(reference, 2)).losses()
    spec = shop.spec("shared", n_epochs=1, tensor_parallel=2, **fields)
    losses = losses_of(await shop.moved(spec, 4, 2))
    assert losses.keys() == whole.keys() and len(losses) > 4 and losses[max(losses)] < losses[1]
    print(f"worst difference of a step's loss, shared by two against whole: {worst(losses, whole):.1e}")
    assert worst(losses, whole) <= ACROSS_SIZES
    shop.compare_published(reference, spec)


@pytest.mark.parametrize(
    "fields", [{"zero_stage": 2}, {**ADAPTER, "zero_stage": 3}], ids=lambda fields: "-".join(map(str, fields.values()))
)
async def test_shared_row_keeps_losses_between_sizes(shop, fields):
    fields = {"n_epochs": 1, "valid_path": str(shop.folder / "write_chat_file-64.jsonl"), **fields}
    reference, spec = shop.spec("whole", **fields), shop.spec("shared", sequence_parallel=2, **fields)
    whole = (await shop.run(reference, 2)).losses()
    losses = losses_of(await shop.moved(spec, 4, 2))
    print(f"worst difference of a step's loss, shared by two against whole: {worst(losses, whole):.1e}")
    assert losses.keys() == whole.keys() and worst(losses, whole) <= ACROSS_SIZES


@pytest.mark.parametrize(
    "task, layout",
    [
        (ADAPTER, {**FAR, **AGAIN, "micro_batch": 2}),
        (TEXT, {"sequence_parallel": 2, **AGAIN}),
        ({"method": "dpo"}, {"zero_stage": 3, **AGAIN}),
        ({**TEXT, **ADAPTER}, {"zero_stage": 2, "micro_batch": 2}),
        *(
            pytest.param(task, layout, marks=pytest.mark.soak)
            for task in ({}, ADAPTER, QLORA, {"method": "dpo"}, {"method": "kto"}, {"method": "orpo"}, TEXT)
            for layout in (
                {"zero_stage": 1, "offload": "optimizer", **AGAIN},
                {"zero_stage": 2, "offload": "optimizer", "micro_batch": 2},
                {"zero_stage": 3, "offload": "optimizer"},
                {**FAR, **AGAIN},
                {**FAR, "micro_batch": 2},
                {"zero_stage": 3, **AGAIN, "micro_batch": 2},
                {"zero_stage": 3, "sequence_parallel": 2, **AGAIN},
                {**FAR, "sequence_parallel": 2},
                {"zero_stage": 2, "sequence_parallel": 2, "micro_batch": 2},
            )
            if not ("method" in task and "sequence_parallel" in layout)
        ),
    ],
    ids=lambda fields: "-".join(f"{name}={getattr(value, '__name__', value)}" for name, value in fields.items()),
)
async def test_layout_has_losses_and_result_of_one_rank(shop, task, layout):
    fields = {"n_epochs": 1, **task}
    plain, spec = shop.spec("plain", zero_stage=1, **fields), shop.spec("layout", **{**fields, **layout})
    expected, losses = [(await shop.run(one, size)).losses() for one, size in ((plain, 1), (spec, 2))]
    print(f"worst difference of a step's loss from one plain rank's: {worst(losses, expected):.1e}")
    assert losses.keys() == expected.keys() and losses[max(losses)] < losses[1]
    assert worst(losses, expected) <= ACROSS_SIZES
    shop.compare_published(plain, spec)


async def test_run_with_shared_rows_resumes_on_one_rank(shop):
    plain, shared, alone = (shop.spec(name, n_epochs=1) for name in ("plain", "shared", "alone"))
    expected = (await shop.run(plain, 1)).losses()
    first = await shop.launch(replace(shared, sequence_parallel=2), 2).start()
    await first.reached(3)
    report = await first.group.suspend()
    second = await shop.run(alone, 1, snapshot=report.snapshot_path)
    assert min(second.losses()) == report.step + 1
    losses = losses_of([first, second])
    assert losses.keys() == expected.keys() and worst(losses, expected) <= ACROSS_SIZES
    shop.compare_published(plain, alone)


@pytest.mark.parametrize("method", ["reinforcement", pytest.param("distillation", marks=pytest.mark.soak)])
async def test_ranks_sharing_model_sample_same_answers(shop, method):
    fields = {"method": method, "examples": 16, "packing": False, "n_epochs": 1}
    whole = await shop.run(shop.spec("sampled-whole", **fields), 2)
    shared = await shop.run(shop.spec("sampled-shared", tensor_parallel=2, **fields), 2)
    verdicts, expected = (
        {event["step"]: event[JUDGED[method]] for event in world.of("metrics")} for world in (shared, whole)
    )
    assert verdicts.keys() == expected.keys() == {1, 2, 3, 4} and min(expected.values()) > 0
    # Rounding may change single tokens.
    assert all(abs(verdicts[step] - one) < 0.05 for step, one in expected.items()), (verdicts, expected)


@pytest.mark.parametrize(
    "fields",
    [
        # Biases after column splits, tied embeddings, half as many key-value heads as heads.
        {"zero_stage": 1, "model": {"family": "qwen2", "tied": True}},
        {"zero_stage": 2, "model": {"family": "qwen2"}, **ADAPTER, "lora_publish": "adapter"},
        {"zero_stage": 1, "model": {"family": "qwen2"}, **ADAPTER},
        {"zero_stage": 3, "model": {"family": "qwen2", "tied": True}},
        pytest.param({"zero_stage": 2, "model": {"family": "llama"}}, marks=pytest.mark.soak),
        pytest.param({"zero_stage": 1, "model": {"family": "mistral"}, "weight_decay": 0.1}, marks=pytest.mark.soak),
        pytest.param({"zero_stage": 2, "model": {"family": "qwen3", "tied": True}}, marks=pytest.mark.soak),
        pytest.param({"zero_stage": 1, "precision": "bf16"}, marks=pytest.mark.soak),
        pytest.param(
            {"zero_stage": 1, "model": {"num_key_value_heads": 4}, "tensor_parallel": 4}, marks=pytest.mark.soak
        ),
    ],
    ids=["qwen2-tied", "adapter", "merged", "zero3", "llama", "mistral", "qwen3-tied", "llama-bf16", "llama-4"],
)
async def test_publish_by_slices_equals_gathered_model(shop, fields):
    told = await shop.compare_publish(shop.spec(**({"tensor_parallel": 2} | fields)), 4)
    for event in told:
        assert event["names"] == event["expected"] and not event["worst"]
        assert event["written_elements"] < 0.35 * event["elements"]
    assert sum(event["written_elements"] for event in told) == told[0]["elements"]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "fields",
    [
        {"zero_stage": 1, "model": {"family": "qwen2", "tied": True}},
        {"zero_stage": 2, "model": {"family": "qwen3"}, "weight_decay": 0.1},
        {"zero_stage": 1, "model": {"family": "mistral"}, "activation_checkpointing": True},
        {"zero_stage": 1, "precision": "bf16"},
        {"zero_stage": 2, "micro_batch": 2, "batch_size": 8},
    ],
    ids=["qwen2-tied", "qwen3", "mistral", "llama-bf16", "micro-batches"],
)
async def test_shared_model_of_each_kind_moves_between_sizes(shop, fields):
    fields = {"batch_size": 4, "tensor_parallel": 2, "examples": 96} | fields
    unbroken = (await shop.run(shop.spec("unbroken", **fields), 4)).losses()
    losses = losses_of(await shop.moved(shop.spec("moved", **fields), 4, 8, 2))
    assert losses.keys() == unbroken.keys() and worst(losses, unbroken) <= ACROSS_SIZES
    if fields.get("precision") != "bf16":  # partial sums are rounded to bf16 too
        whole = (await shop.run(shop.spec("whole", **{**fields, "tensor_parallel": 1}), 2)).losses()
        print(f"worst difference of a step's loss, shared by two against whole: {worst(unbroken, whole):.1e}")
        assert worst(unbroken, whole) <= ACROSS_SIZES


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_resume_gives_equal_bits_at_same_layout_else_close_losses(shop):
    fields = {"n_epochs": 1, "model": {"num_key_value_heads": 4}, "zero_stage": 1}
    spec, broken = shop.spec("unbroken", tensor_parallel=2, **fields), shop.spec("broken", tensor_parallel=2, **fields)
    unbroken = await shop.run(spec, 4)
    first = await shop.launch(broken, 4).start()
    await first.reached(2)
    report = await first.group.suspend()
    second = await shop.run(broken, 4, snapshot=report.snapshot_path)
    assert first.losses() | second.losses() == unbroken.losses()
    assert same(shop.published(spec)[0], shop.published(broken)[0])
    # A snapshot holds whole parameters, so any layout can read it.
    for size, shared in ((4, 2), (4, 4), (2, 1)):
        other = shop.spec(f"other-{size}-{shared}", tensor_parallel=shared, **fields)
        again = await shop.run(other, size, snapshot=report.snapshot_path)
        reference = {step: unbroken.losses()[step] for step in again.losses()}
        assert min(reference) == report.step + 1
        assert worst(again.losses(), reference) <= (0 if shared == 2 else ACROSS_SIZES)
