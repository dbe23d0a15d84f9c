"""A file that was put in order is learnt in that order, where a job is asked to; without it every epoch is shuffled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.train_support.specs import host_spec
from tests.train_support.tiny import make_model_dir, write_chat_file
from tests.unit.train.test_deepspeed_contract import world_of_one  # noqa: F401
from train.control.progress import ControlSignals, Progress
from train.trainer.prepare import prepare


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
