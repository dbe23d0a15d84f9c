"""A plan and the job created from it choose the same settings from the same token count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.controller.access.model_access import Resolved
from appliance.controller.jobs.events import JobEvents
from appliance.controller.jobs.settings import DeviceBounds, SettingsRequest, box_facts
from appliance.controller.models import capacity
from appliance.controller.models.capacity import BoxFacts, Estimator
from appliance.store import jobs, models
from appliance.store.rows import JobMetricRow, VersionRow
from tests.train_support.tiny import tokenizer
from tests.unit.controller.conftest import ADMIN, Control, chat_lines, insert_model
from train.methods.methods import DEFAULT
from train.plan.auto import DatasetStats, ModelStats, allowed_sizes, micro_batches, ranks_of_row, resolve
from train.plan.estimate import ModelShape

pytestmark = pytest.mark.usefixtures("checked_here")


async def ask(control: Control, **job):
    return await control.http.post("/admin/v1/plan", json={"model": "starter"} | job, headers=ADMIN)


@pytest.mark.parametrize("given", [{}, {"lora_rank": 8}, {"batch_size": 4, "n_epochs": 2}])
@pytest.mark.parametrize("with_tokenizer", [False, True])
async def test_plan_and_job_choose_same_settings(control: Control, tmp_path: Path, given, with_tokenizer):
    if with_tokenizer:
        tokenizer().save_pretrained(tmp_path / "v1")
        models.update_version(control.db, "starter", "v1", disk_path=str(tmp_path / "v1"))
    file_id = await control.upload(chat_lines(40))
    told = (await ask(control, training_file=file_id, hyperparameters=given)).json()
    method = {"type": "supervised", "supervised": {"hyperparameters": given}}
    row = jobs.get(control.db, await control.job(training_file=file_id, method=method))
    assert row.resolved is not None and told["hyperparameters"].items() <= row.resolved.items()
    assert told["sizes"] == row.allowed_sizes
    assert told["data"]["counted"] and told["data"]["examples"] == 40


async def test_plan_resolves_only_files_and_models_of_owner(control: Control):
    file_id = await control.upload()
    insert_model(control.db, "ft:bobs", kind="fine-tuned", base="starter", owner="bob")
    for job, status in (
        ({"model": "starter", "training_file": file_id}, 200),
        ({"model": "starter", "training_file": "file-none"}, 404),
        ({"model": "ft:bobs"}, 404),
    ):
        assert (await control.http.post("/admin/v1/plan", json=job)).status_code == status


async def test_ended_job_reports_usage_and_corrects_next_estimate(control: Control):
    file_id = await control.upload(chat_lines(40))
    job_id = await control.job(training_file=file_id)
    estimate = jobs.get(control.db, job_id).estimate
    taken = int(1.2 * estimate["device_bytes"])
    for step in (1, 2, 3):
        row = JobMetricRow(job_id, step, float(step), tokens_per_s=100.0 * step, devices=2, memory_bytes=taken)
        jobs.upsert_metric(control.db, row)
    for _ in range(2):  # twice, as after a restart of the controller
        JobEvents(control.db, control.context.files_dir, "org").conclude(job_id)
    assert sum("it took" in text for text in await control.messages(job_id)) == 1
    measured = jobs.get(control.db, job_id).estimate["measured"]
    assert measured == {"device_bytes": taken, "tokens_per_s": 100.0 * estimate["devices"]}
    after = (await ask(control, training_file=file_id)).json()["layouts"][0]
    assert after["device_bytes"] == pytest.approx(taken, rel=1e-3)
    assert after["tokens_per_s"] == pytest.approx(measured["tokens_per_s"])


async def test_plan_with_bad_or_unknown_file_fails(control: Control):
    bad = await control.upload(b"{}\n" * 3)
    answer = await ask(control, training_file=bad)
    assert answer.status_code == 400 and "line 1" in answer.json()["error"]["message"]
    assert (await ask(control, training_file="file-none")).status_code == 404
    assumed = (await ask(control)).json()["data"]
    assert not assumed["counted"] and assumed["examples"] == 1000


async def test_plan_and_job_warn_of_truncated_examples(control: Control):
    line = {"messages": [{"role": "user", "content": "a " * 400}, {"role": "assistant", "content": "b"}]}
    file_id = await control.upload(json.dumps(line).encode() + b"\n" + chat_lines(12))
    given = {"max_length": 64}
    told = (await ask(control, training_file=file_id, hyperparameters=given)).json()["warnings"]
    assert "max_length is 64: what is beyond is cut off" in told[-1]
    method = {"type": "supervised", "supervised": {"hyperparameters": given}}
    assert told[-1] in await control.messages(await control.job(training_file=file_id, method=method))
    longer = (await ask(control, training_file=file_id, hyperparameters={"max_length": 1024})).json()["warnings"]
    assert not any("cut off" in text for text in longer)


async def test_auto_batch_size_fits_requested_devices(control: Control):
    """64 short examples give steps of four rows, or of eight rows if eight devices are requested."""
    row = jobs.get(control.db, await control.job(extra_body={"min_devices": 8}))
    assert row.phase == "queued" and row.allowed_sizes == [8] and row.resolved["batch_size"] % 8 == 0


GIB = 2**30
H100S = BoxFacts(8, "cuda", 80 * GIB, 400 * 10**9, 400 * 10**9)
LLAMA_8B = ModelShape(8_030_261_248, 4096, 32, 8, 128, 14336, 128256, 2_621_440)
LLAMA_70B = ModelShape(70_553_706_496, 8192, 80, 8, 128, 28672, 128256, 13_107_200)
SIZES = (1, 2, 4, 8)


def fields(shape=LLAMA_8B, **given):
    return resolve(given, DatasetStats(7473, 1_200_000, 480), ModelStats(shape, 8192, "cuda"), 8)


def test_verdict_of_too_large_job_has_sizes_and_alternatives():
    verdict = Estimator(LLAMA_8B, H100S).verdict(fields(full=True, zero_stage=1), (1, 2))
    assert not verdict.fits and verdict.sizes == ()
    (problem,) = verdict.problems
    assert "on each of 2 devices" in problem and "optimizer 48.18 GB" in problem and "there are 77.95 GB" in problem
    assert any("LoRA" in text for text in verdict.instead)
    smaller = Estimator(LLAMA_8B, H100S).verdict(fields(full=False, activation_checkpointing=True), (1, 2))
    assert smaller.fits


def test_verdict_rejects_result_over_store_budget():
    box = BoxFacts(8, "cuda", 80 * GIB, 100 * 10**9, 100 * 10**9)
    given = fields(LLAMA_70B, full=False) | Estimator(LLAMA_70B, box).leanest()
    verdict = Estimator(LLAMA_70B, box).verdict(given, SIZES)
    assert not verdict.fits and "The result takes 141.11 GB of shared memory" in verdict.problems[0]


def test_verdict_warns_of_large_snapshot_and_waits_for_full_store():
    given = fields(full=True, zero_stage=3)
    small, full = [BoxFacts(8, "cuda", 80 * GIB, *budget) for budget in ((50 * 10**9,) * 2, (400 * 10**9, 10**9))]
    verdict = Estimator(LLAMA_8B, small).verdict(given, SIZES)
    assert verdict.fits and len(verdict.warnings) == 1 and not verdict.waits
    assert verdict.numbers["host"]["needed_bytes"] == 2 * LLAMA_8B.n_parameters
    verdict = Estimator(LLAMA_8B, full).verdict(given, SIZES)
    assert verdict.fits and verdict.waits


def hosted(host_memory_bytes, budget_bytes=100 * 10**9):
    return BoxFacts(8, "cuda", 80 * GIB, budget_bytes, budget_bytes, host_memory_bytes=host_memory_bytes)


def test_verdict_rejects_offload_over_host_memory():
    given = fields(full=True, zero_stage=3, offload="optimizer")
    # needs 160.6 GB over all ranks, on any number of devices
    fits = Estimator(LLAMA_8B, hosted(2 * 10**12, 400 * 10**9)).verdict(given, SIZES)
    assert fits.fits and not fits.warnings
    small = hosted(128 * 10**9, 20 * 10**9)
    assert not Estimator(LLAMA_8B, small).verdict(given, SIZES).fits
    assert Estimator(LLAMA_8B, hosted(None)).verdict(given, SIZES).fits, "not known: nothing is refused for it"
    assert Estimator(LLAMA_8B, small).verdict(fields(full=True, zero_stage=3), SIZES).fits


CONFIGS = {
    "8b": (8_030_261_248, 4096, 32, 32, 14336, 128256),
    "14b": (14_770_033_664, 5120, 48, 40, 13824, 152064),
    "32b": (32_763_876_352, 5120, 64, 40, 27648, 152064),
    "70b": (70_553_706_496, 8192, 80, 64, 28672, 128256),
    "405b": (405_853_388_800, 16384, 126, 128, 53248, 128256),
}
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
H100, RTX_4090 = ("NVIDIA H100 80GB HBM3", 79 * GIB), ("NVIDIA GeForce RTX 4090", 23.5 * GIB)
CHATS = DatasetStats(20_000, 12_000_000, 3000)


def chosen_by(control, monkeypatch, tmp_path, model, store_bytes=10**13, data=CHATS, **given):
    """Settings, verdict and layouts for a job of this model on eight H100s and a 2 TB host."""
    count, *sizes = CONFIGS[model]
    config = dict(zip(NAMES, sizes, strict=True)) | {"num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, (name, memory) = control.scheduler.status(), H100
    gpu = {"kind": "cuda", "name": name, "memory_bytes": memory}
    status["devices"] = [device | gpu for device in status["devices"]]
    status["memory"] |= {"budget_bytes": store_bytes, "room_bytes": store_bytes, "host_bytes": 2 * 10**12}
    monkeypatch.setattr(control.scheduler, "status", lambda: status)
    row = replace(models.find(control.db, "starter"), params=count, max_model_len=131_072)
    base = Resolved("starter", row, VersionRow("starter", "v1", "test", 10, 0.0, disk_path=str(tmp_path)))
    return SettingsRequest(control.context, base, DEFAULT, given, data, DeviceBounds()).choose()


async def test_choice_uses_sequence_parallel_for_long_examples(control, monkeypatch, tmp_path):
    long = DatasetStats(200, 20_000_000, 131_072)
    settings, verdict, (best, *_) = chosen_by(control, monkeypatch, tmp_path, "8b", data=long, max_length=131_072)
    assert settings["sequence_parallel"] == 4 and verdict.sizes == (4, 8)
    assert best["device_bytes"] <= capacity.SAFE * best["room_bytes"] and best["offload"] == "none"
    assert chosen_by(control, monkeypatch, tmp_path, "70b")[0]["sequence_parallel"] == 1, "safe without"


@pytest.mark.parametrize("store_bytes", [5 * 10**11, 10**12, 10**13])
async def test_choice_writes_snapshot_to_disk_if_memory_is_short(control, monkeypatch, tmp_path, store_bytes):
    _, verdict, layouts = chosen_by(control, monkeypatch, tmp_path, "70b", store_bytes, full=True)
    assert verdict.fits and layouts and "snapshots go to disk" in verdict.warnings[0]
    taken = verdict.memory()
    assert taken["store_bytes"] < taken["limit_bytes"] <= min(store_bytes, 10**12)
    assert max(taken["host_bytes"].values()) < 2 * 10**12


def test_search_lists_one_zero_stage_for_unshared_ranks():
    found, _, _ = layouts_of("70b", 8, H100, tensor_parallel=8)
    assert [layout.fields["zero_stage"] for layout in found if layout.fields["offload"] == "none"] == [1]


def layouts_of(model, devices, kind, host_bytes=2 * 10**12, data=CHATS, **given):
    """Layouts that fit, the warning about changed settings, and alternatives."""
    count, *sizes = CONFIGS[model]
    config = dict(zip(NAMES, sizes, strict=True)) | {"num_key_value_heads": 8, "head_dim": 128}
    shape, (name, memory) = ModelShape.from_config(config, count), kind
    box = BoxFacts(devices, "cuda", int(memory), None, 10**13, devices, host_bytes, device_name=name)
    made = resolve(given, data, ModelStats(shape, 131072, "cuda"), devices)
    by_micro = {n: allowed_sizes(made["batch_size"], devices, n, ranks_of_row(made)) for n in micro_batches(made)}
    asked = [name for name in capacity.LAYOUT if name in given]
    estimator = Estimator(shape, box, DEFAULT, DEFAULT.load(data, made))
    found, changed = estimator.fit(made, by_micro, asked)
    verdict = estimator.verdict(made | estimator.leanest(), by_micro[made["micro_batch"]])
    return found, changed, verdict.instead


@pytest.mark.parametrize(
    "model, devices, kind, data, layout, at_least_gb",
    [
        ("70b", 8, H100, CHATS, (3, "none", True, 2), 30),
        ("14b", 1, RTX_4090, CHATS, (3, "parameters", True, 4), 12),
        ("32b", 4, RTX_4090, CHATS, (3, "parameters", True, 2), 10),
        ("8b", 8, H100, DatasetStats(200, 20_000_000, 131_072), (3, "none", True, 1), 70),
        ("405b", 8, H100, CHATS, (3, "parameters", True, 2), 40),
        ("8b", 8, H100, CHATS, (1, "none", False, 1), 40),
    ],
    ids=["70b", "14b", "32b", "131072", "405b", "8b"],
)
def test_search_picks_expert_layout(model, devices, kind, data, layout, at_least_gb):
    length = {"max_length": 131_072} if data is not CHATS else {}
    found, changed, _ = layouts_of(model, devices, kind, data=data, **length)
    best = found[0]
    assert tuple(best.fields.values()) == layout and not changed
    assert best.sizes[-1] == devices and at_least_gb * 1e9 < best.device_bytes <= best.room_bytes
    assert all(one.weighed_s >= best.weighed_s / capacity.NEAR for one in found if one.risk == best.risk)


def test_search_on_cpu_picks_simplest_fitting_layout():
    box = BoxFacts(4, "cpu", 6 * 10**9, 12 * 10**9, 12 * 10**9, host_memory_bytes=24 * 10**9)
    small = ModelShape(134_515_008, 576, 30, 3, 64, 1536, 49152, 305_280)
    found = Estimator(small, box).layouts(fields(small, full=True, max_length=128), {1: (1, 2)})
    assert found[0].fields == {"zero_stage": 1, "offload": "none", "activation_checkpointing": False, "micro_batch": 1}


def test_search_without_fitting_layout_names_alternatives():
    found, _, instead = layouts_of("405b", 8, H100, host_bytes=5 * 10**11)
    assert not found and len(instead) == 2
    assert "--form int4`) on 8 devices" in instead[0] and "the same job on 16 devices" in instead[1]
    _, _, instead = layouts_of("70b", 8, H100, host_bytes=10**11, full=True)
    assert instead and not any("the same job" in text for text in instead), "24 devices are not one machine"


def test_search_changes_as_little_as_possible_to_fit():
    found, changed, _ = layouts_of("8b", 2, H100, full=True, zero_stage=1, offload="none")
    assert found[0].fields["zero_stage"] == 1, "as much of what was asked for as fits"
    assert "offload none" in changed and "offload optimizer" in changed
    assert not layouts_of("8b", 8, H100, zero_stage=3, activation_checkpointing=True)[1]


async def test_job_that_can_never_fit_fails_before_queueing(control):
    control.scheduler.devices = [d | {"memory_bytes": 2**20} for d in control.scheduler.devices]
    job_id = await control.job(method={"type": "supervised", "supervised": {"hyperparameters": {"full": True}}})
    made = await control.sdk.fine_tuning.jobs.retrieve(job_id)
    assert made.status == "failed" and made.error.code == "insufficient_memory"
    assert "Training needs" in made.error.message and "there are" in made.error.message


def test_box_facts_ignore_devices_of_other_kinds(control):
    """Only devices of the home node's kind count; the smallest memory decides."""
    gpu = control.scheduler.devices[0] | {"kind": "cuda", "memory_bytes": 80 * GIB}
    small = gpu | {"id": "n1/0", "node": "n1", "memory_bytes": 24 * GIB}
    other = gpu | {"id": "n2/0", "node": "n2", "kind": "cpu", "memory_bytes": GIB}
    control.scheduler.devices = [gpu, gpu | {"id": "n0/1"}, small, other]
    facts = box_facts(control.context)
    assert (facts.devices, facts.device_kind, facts.device_memory_bytes) == (3, "cuda", 24 * GIB)
