"""Requests with a `seed` whose prompt is read over several steps: their random numbers begin with their first token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from vllm.v1.worker.gpu_input_batch import InputBatch

from serve.vllm.cpu_worker import untouched


def runner(generators, unread):
    """What of vLLM's model runner is looked at."""
    mask = np.zeros(8, bool)
    mask[list(unread)] = True
    batch = SimpleNamespace(generators=generators, num_reqs=3)
    return SimpleNamespace(input_batch=batch, discard_request_mask=SimpleNamespace(np=mask))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_what_is_thrown_away_is_not_drawn_from_their_numbers():
    generators = {0: seeded(1), 2: seeded(2)}
    first, last = generators[0], generators[2]
    with untouched(runner(generators, {1, 2})):
        assert generators == {0: first}, "vLLM finds nothing to turn back, which a generator on the host cannot"
        for generator in generators.values():
            torch.rand(1, generator=generator)
    assert generators == {0: first, 2: last}
    assert torch.equal(torch.rand(3, generator=last), torch.rand(3, generator=seeded(2)))


def test_vllm_samples_from_this_very_table():
    source = InputBatch._make_sampling_metadata.__code__
    assert "generators" in source.co_names
