"""Learning rate and the order of data as pure functions of the step."""

from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from train.data.packing import Row, StepPlan, build_row, part_of, plan_packs
from train.plan.spec import FLOOR_RATIO, Schedule, learning_rate
from train.trainer.train import DataFeed


def test_learning_rate_warms_up_and_decays_to_floor():
    rates = [learning_rate(step, 100, peak=2.0, warmup_ratio=0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == 2.0 and rates[10] == 2.0
    assert all(a < b for a, b in zip(rates[:9], rates[1:10], strict=True))
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[-1] == pytest.approx(2.0 * FLOOR_RATIO)
    assert learning_rate(0, 1, peak=1.0, warmup_ratio=0) == 1.0


def test_learning_rate_schedules_reach_their_end():
    def rates(schedule):
        return [learning_rate(step, 100, peak=2.0, warmup_ratio=0.1, schedule=schedule) for step in range(100)]

    assert rates("constant")[9:] == [2.0] * 91
    assert rates("linear")[10] == 2.0 and rates("linear")[99] == pytest.approx(0.2)
    falls = np.diff(rates("linear")[10:])
    assert falls == pytest.approx(falls[0])
    assert rates("wsd")[9:80] == [2.0] * 71 and rates("wsd")[80] < 2.0 and rates("wsd")[99] == pytest.approx(0.2)
    for schedule in get_args(Schedule):
        assert rates(schedule)[:10] == rates("cosine")[:10], "the warm-up is the same"
        assert learning_rate(0, 1, peak=1.0, warmup_ratio=0, schedule=schedule) == 1.0


def test_validations_follow_epochs_or_an_interval_and_always_the_end():
    plan = StepPlan(10, 4, 1, 3, seed=0)
    assert [step for step in range(1, 9) if plan.validates(step, 0)] == [3, 5, 8]
    assert [step for step in range(1, 9) if plan.validates(step, 3)] == [3, 6, 8]


def test_packs_hold_every_example_once_and_are_nearly_full():
    lengths = np.random.default_rng(0).integers(20, 400, 3000)
    packs = plan_packs(lengths, 512)
    assert sorted(i for pack in packs for i in pack) == list(range(3000))
    assert max(lengths[pack].sum() for pack in packs) <= 512
    assert lengths.sum() / (len(packs) * 512) > 0.98
    assert [p.tolist() for p in plan_packs(lengths[:3], 512, packing=False)] == [[0], [1], [2]]


@pytest.mark.parametrize("n_packs, batch, epochs", [(10, 4, 3), (3, 8, 2), (7, 7, 1), (1, 4, 5)])
def test_steps_do_not_depend_on_the_world_size(n_packs, batch, epochs):
    plan = StepPlan(n_packs, batch, 1, epochs, seed=3)
    seen = np.concatenate([plan.packs_of_step(step) for step in range(plan.total_steps)])
    counts = np.bincount(seen[: n_packs * epochs], minlength=n_packs)
    assert (counts == epochs).all(), "every pack once per epoch"
    assert plan.epoch_end_steps()[-1] == plan.total_steps
    for step in range(plan.total_steps):
        whole = [(n, m.tolist()) for n, m in plan.micro_batches(step, 0, 1)]
        for size in (1, 2, 4):
            if batch % size == 0:
                shared = [(n, m.tolist()) for rank in range(size) for n, m in plan.micro_batches(step, rank, size)]
                assert sorted(shared) == whole


def test_a_row_restarts_positions_and_learns_nothing_across_examples():
    first = (np.array([5, 6, 7]), np.array([True, False, True]))
    second = (np.array([8, 9]), np.array([True, True]))
    row = build_row([[first, second], [second]], 8, 0, packing=True)
    assert row.input_ids.tolist() == [5, 6, 7, 8, 9, 0, 0, 0, 8, 9, 0, 0, 0, 0, 0, 0]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5]
    assert row.segments == ((0, 3), (3, 5), (5, 8), (8, 10), (10, 16))
    # The first token of an example has nothing before it, although its mask says it is learnt.
    assert row.predict_at.tolist() == [1, 3, 8] and row.labels.tolist() == [7, 9, 9] and row.n_tokens == 7
    assert len(build_row([[first]], 8, 0, packing=False).input_ids) == 32


@pytest.mark.parametrize(
    ("n_packs", "n_epochs", "batch", "micro"), [(1, 1, 2, 1), (3, 1, 4, 2), (5, 3, 8, 2), (4, 2, 4, 1)]
)
def test_an_epoch_is_each_example_once_however_large_a_step_is(n_packs, n_epochs, batch, micro):
    plan, size = StepPlan(n_packs, batch, micro, n_epochs, seed=1), 2 if batch // micro % 2 == 0 else 1
    method = SimpleNamespace(denominator=lambda _, packs: len(packs))
    laid, learnt, denominators = [], [], 0
    tokens = SimpleNamespace(row=lambda packs: laid.append(packs) or Row(*[np.zeros(0)] * 4, (), (), 0), tokens_in=len)
    for step in range(plan.total_steps):
        for rank in range(size):
            laid.clear()
            data = DataFeed(method, plan, tokens, SimpleNamespace(data_rank=rank, data_size=size)).step(step)
            assert len(data.rows) == batch // micro // size, "every rank computes equally many"
            learnt += [pack for (_, row), packs in zip(data.rows, laid, strict=True) if row.weight for pack in packs]
        assert data.denominator == data.tokens
        denominators += data.denominator
    assert sorted(learnt) == sorted([*range(n_packs)] * n_epochs) and denominators == n_packs * n_epochs


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_parts_of_a_row_have_each_token_and_each_label_once(parts):
    examples = [(np.arange(n) + 10 * n, np.arange(n) % 3 == 0) for n in (9, 4, 17)]
    row = build_row([examples], 32, 0, packing=True)
    found = [part_of(row, index, parts) for index in range(parts)]
    for name in ("input_ids", "position_ids", "labels"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in found]), getattr(row, name))
    at = [part.predict_at + index * len(part.input_ids) for index, part in enumerate(found)]
    assert np.array_equal(np.concatenate(at), row.predict_at)
    assert np.array_equal(np.sum([part.sequence_sizes for part in found], axis=0), row.sequence_sizes)
    assert {part.segments for part in found} == {row.segments}
