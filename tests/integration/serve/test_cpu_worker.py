"""vLLM's worker for CPUs as we patch it: adapters in one batch, and random numbers of requests with a seed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu_input_batch import InputBatch

from serve.vllm.cpu_worker import untouched

SLOTS, RANK, WIDE, OUT = 3, 4, 16, (8, 6)
IDS = [11, 12, 13]  # of the adapters in the slots


@pytest.fixture(scope="module")
def lora():
    """Imports vLLM, which takes ten seconds: not for every process that collects this file."""
    from vllm.lora.layers import LoRAMapping

    from serve.vllm.patches import GroupedLoRA

    return SimpleNamespace(LoRAMapping=LoRAMapping, GroupedLoRA=GroupedLoRA)


@pytest.fixture
def stacked():
    torch.manual_seed(0)
    down = tuple(torch.randn(SLOTS, 1, RANK, WIDE) for _ in OUT)
    up = tuple(torch.randn(SLOTS, 1, width, RANK) for width in OUT)
    return down, up


@pytest.mark.parametrize(
    "ids_of_tokens",
    [[11, 11, 12], [0, 13, 0, 11], [11, 12, 11, 12], [0, 0], [13]],
    ids=["together", "with base", "interleaved", "base only", "one"],
)
def test_each_token_gets_its_own_adapter(lora, stacked, ids_of_tokens):
    down, up = stacked
    wrapper = lora.GroupedLoRA(max_num_batched_tokens=64, max_batches=8, device="cpu", max_loras=SLOTS)
    mapping = lora.LoRAMapping(tuple(ids_of_tokens), tuple(ids_of_tokens), is_prefill=True)
    wrapper.update_metadata(mapping, IDS, SLOTS, 100)
    x, y = torch.randn(len(ids_of_tokens), WIDE), torch.randn(len(ids_of_tokens), sum(OUT))
    expected = y.clone()
    for row, adapter in enumerate(ids_of_tokens):
        if adapter:
            slot = IDS.index(adapter)
            expected[row] += torch.cat([up[i][slot, 0] @ (down[i][slot, 0] @ x[row]) for i in range(2)]) * 0.5
    wrapper.add_lora_linear(y, x, down, up, 0.5, OUT)
    assert torch.allclose(y, expected, atol=1e-5)


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
