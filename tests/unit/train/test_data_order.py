"""A file that was put in order is learnt in that order, where a job is asked to, or by the loss that the starting model
has on each example: without it every epoch is shuffled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.train_support.specs import host_spec
from tests.train_support.tiny import make_model_dir, write_chat_file, write_pair_file
from tests.unit.train.test_deepspeed_contract import world_of_one  # noqa: F401
from train.control.progress import ControlSignals, Progress
from train.methods.methods import method_of
from train.model.model import load_model
from train.plan import auto
from train.plan.errors import InvalidHyperparameter
from train.trainer.prepare import prepare
from train.trainer.reference import Reference


def lengths_of(run):
    """The lengths of the examples, in the order in which the run learns from them."""
    packs = [pack for step in range(run.plan.total_steps) for pack in run.plan.packs_of_step(step)]
    return [len(run.train.tokens_of(index)) for pack in packs for index in run.train.packs[pack]]


@pytest.mark.parametrize("packing", [True, False])
def test_short_examples_first_is_what_a_run_does_with_a_file_in_that_order(tmp_path, packing):
    lines = write_chat_file(tmp_path / "chats.jsonl", 40).read_text().splitlines(keepends=True)
    (tmp_path / "ordered.jsonl").write_text("".join(sorted(lines, key=len)))
    base = make_model_dir(tmp_path / "base", dtype=torch.float32)

    def run_of(data_order):
        told = []
        spec = host_spec(
            base,
            train_path=str(tmp_path / "ordered.jsonl"),
            run_dir=str(tmp_path / data_order),
            shm_root=str(tmp_path / "store"),
            data_order=data_order,
            packing=packing,
            batch_size=4,
            max_length=128,
            precision="fp32",
        )
        run = prepare(spec, lambda event, **data: told.append((event, data)), ControlSignals(), Progress())
        assert run.run()["outcome"] == "succeeded"
        run.close()
        return lengths_of(run), [data["loss"] for event, data in told if event == "metrics"]

    (given, losses), (shuffled, others) = run_of("given"), run_of("shuffled")
    # What prepare measures are estimates: neighbours may differ by a token or two.
    assert np.all(np.diff(given[:40]) > -8) and given[0] < given[39] - 10
    assert sorted(shuffled[:40]) == sorted(given[:40]) and not np.all(np.diff(shuffled[:40]) > -8)
    assert losses[0] != others[0]


def by_loss(tmp_path, **fields):
    base = tmp_path / "base"
    return host_spec(
        base if base.exists() else make_model_dir(base, dtype=torch.float32),
        train_path=str(tmp_path / "chats.jsonl"),
        run_dir=str(tmp_path / "run"),
        shm_root=str(tmp_path / "store"),
        **{
            "data_order": "loss",
            "batch_size": 2,
            "max_length": 128,
            "n_epochs": 2,
            "precision": "fp32",
            "base_model": "base",
            "base_version": "v1",
        }
        | fields,
    )


def order_of(run):
    """The examples, in the order in which the run learns from them."""
    packs = [pack for step in range(run.plan.total_steps) for pack in run.plan.packs_of_step(step)]
    return [int(index) for pack in packs[: 2 * len(run.train.packs)] for index in run.train.packs[pack]]


def losses_of(spec, run):
    """By the starting model, of each example: per learnt token."""
    model, found = load_model(spec), []
    objective = method_of(spec.method).objective(model, spec.options).eval()
    for index in range(run.train.n_examples):
        ((ids, learnt),) = run.train._example(index)
        row = method_of(spec.method).row([[(ids, learnt)]], 128, 0, packing=False)
        with torch.no_grad():
            found.append(objective(method_of(spec.method).batch(row, 1.0 / len(row.labels), "cpu")).item())
    return np.array(found)


@pytest.mark.parametrize("packing", [True, False])
def test_by_loss_a_run_learns_first_what_the_starting_model_finds_least_hard(tmp_path, packing):
    write_chat_file(tmp_path / "chats.jsonl", 30)
    told, spec = [], by_loss(tmp_path, packing=packing)
    run = prepare(spec, lambda event, **data: told.append((event, data)), ControlSignals(), Progress())
    assert run.run()["outcome"] == "succeeded"
    run.close()
    order, losses = order_of(run), losses_of(spec, run)
    n = run.train.n_examples
    assert sorted(order[:n]) == list(range(n)) and order[:n] == order[n : 2 * n], "the same in every epoch"
    assert np.all(np.diff(losses[order[:n]]) > -1e-5) and not np.all(np.diff(losses) > 0)
    steps = [data for event, data in told if event == "metrics"]
    assert len(steps) == steps[0]["total_steps"] == run.plan.total_steps
    assert [data["text"] for event, data in told if event == "message" and "starting model" in data["text"]]


def test_the_order_by_loss_is_computed_once(tmp_path, monkeypatch):
    """By a run that is suspended and goes on, elsewhere too, and by the next one that has what this one kept."""
    write_chat_file(tmp_path / "chats.jsonl", 30)
    rounds, whole = [], Reference._one_round

    def one_round(reference, values):
        rounds.append(values.done)
        whole(reference, values)

    monkeypatch.setattr(Reference, "_one_round", one_round)
    spec, signals, told = by_loss(tmp_path), ControlSignals(), []

    def emit(event, **data):
        told.append((event, data))
        if event == "metrics" and data["step"] == 2:
            signals.ask("suspend")

    def steps():
        return [(data["step"], data["loss"]) for event, data in told if event == "metrics"]

    def silent(event, **data):
        pass

    run = prepare(spec, emit, signals, Progress())
    left = run.run()
    run.close()
    n, before = len(rounds), order_of(run)
    (file,) = (tmp_path / "run" / "reference").iterdir()
    kept = file.read_bytes()
    file.unlink()  # a machine without the folder's files: they come from the snapshot
    again = prepare(spec, emit, ControlSignals(), Progress(), left["snapshot_path"])
    assert again.run()["outcome"] == "succeeded"
    again.close()
    assert order_of(again) == before and len(rounds) == n
    moved = steps()
    assert [step for step, _ in moved] == list(range(1, again.plan.total_steps + 1))

    other = replace(spec, job_id="other", run_dir=str(tmp_path / "other"), shm_root=str(tmp_path / "others"))
    (tmp_path / "other" / "reference").mkdir(parents=True)
    (tmp_path / "other" / "reference" / file.name).write_bytes(kept)
    told.clear()
    unbroken = prepare(other, lambda event, **data: told.append((event, data)), ControlSignals(), Progress())
    assert unbroken.run()["outcome"] == "succeeded"
    unbroken.close()
    assert len(rounds) == n and [loss for _, loss in steps()] == pytest.approx([loss for _, loss in moved], rel=1e-5)
    changed = prepare(replace(other, base_version="v2"), silent, ControlSignals(), Progress())
    assert not changed.reference.complete, "another version of the base is asked anew"
    changed.close()


def test_pairs_are_ordered_by_what_their_reference_says(tmp_path):
    write_pair_file(tmp_path / "chats.jsonl", 12)
    spec = by_loss(tmp_path, method="dpo", options={"beta": 0.1}, max_length=64)
    run = prepare(spec, lambda event, **data: None, ControlSignals(), Progress())
    assert run.run()["outcome"] == "succeeded"
    run.close()
    labels = [sum(int(learnt[1:].sum()) for _, learnt in run.train._example(index)) for index in range(12)]
    hardness = -run.train.reference.sum(axis=1) / labels
    assert np.all(np.diff(hardness[order_of(run)[:12]]) >= 0)


@pytest.mark.parametrize("method", ["reinforcement", "distillation"])
def test_prompts_have_no_loss_to_be_ordered_by(method):
    dataset = auto.DatasetStats(n_examples=9, n_tokens=90, longest_example_tokens=10, lengths=(10,) * 9)
    model = auto.ModelStats(n_parameters=1000, max_position_embeddings=512, device_kind="cpu")
    with pytest.raises(InvalidHyperparameter, match="nothing of a prompt is learnt"):
        method_of(method).resolve({"data_order": "loss"}, dataset, model, 1)
