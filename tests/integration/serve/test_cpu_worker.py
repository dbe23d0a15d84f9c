"""vLLM's CPU worker with our patches: adapters in one batch, and random numbers of requests with a seed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu_input_batch import InputBatch

from serve.vllm.cpu_worker import untouched

SLOTS, RANK, WIDE, OUT = 3, 4, 16, (8, 6)
IDS = [11, 12, 13]  # ids of the adapters in the slots


@pytest.fixture(scope="module")
def lora():
    """Import vLLM here, not at collection: the import takes ten seconds."""
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
def test_grouped_lora_applies_each_tokens_adapter(lora, stacked, ids_of_tokens):
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
    """A stand-in for vLLM's model runner with the attributes that `untouched` reads."""
    mask = np.zeros(8, bool)
    mask[list(unread)] = True
    batch = SimpleNamespace(generators=generators, num_reqs=3)
    return SimpleNamespace(input_batch=batch, discard_request_mask=SimpleNamespace(np=mask))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_untouched_keeps_generators_of_discarded_samples():
    generators = {0: seeded(1), 2: seeded(2)}
    first, last = generators[0], generators[2]
    with untouched(runner(generators, {1, 2})):
        assert generators == {0: first}, "vLLM has no generator to rewind"
        for generator in generators.values():
            torch.rand(1, generator=generator)
    assert generators == {0: first, 2: last}
    assert torch.equal(torch.rand(3, generator=last), torch.rand(3, generator=seeded(2)))


def test_vllm_sampling_reads_batch_generators():
    source = InputBatch._make_sampling_metadata.__code__
    assert "generators" in source.co_names
