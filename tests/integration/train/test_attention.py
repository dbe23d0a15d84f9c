"""Packed attention: exact by splits on a processor, by one kernel on a GPU, and without a row of zeros per example."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from train.model import attention
from train.model.attention import packed_attention
from train.plan.errors import UnsupportedModel

LENGTHS = (5, 1, 17, 9)
SEGMENTS = tuple((sum(LENGTHS[:i]), sum(LENGTHS[: i + 1])) for i in range(len(LENGTHS)))


def row(dim=8, value_dim=8, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    shapes = ((1, heads, sum(LENGTHS), width) for heads, width in ((4, dim), (2, dim), (2, value_dim)))
    return [torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes]


def by_mask(query, key, value, window, scale):
    """One call over the whole row, with the mask that says what may see what."""
    of = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    at = torch.arange(sum(LENGTHS))
    distance = at[:, None] - at[None, :]
    mask = (of[:, None] == of[None, :]) & (distance >= 0)
    if window is not None:
        mask &= distance < window
    found = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return found.transpose(1, 2)


@pytest.mark.parametrize("further", ["position_bias", "s_aux", "softcap", "indices", "block_indices"])
def test_packed_attention_unsupported_argument_is_refused(further):
    with pytest.raises(UnsupportedModel, match=f"Module computes its attention with {further}"):
        packed_attention(torch.nn.Module(), *row(), None, segments=SEGMENTS, **{further: torch.ones(1)})
    packed_attention(torch.nn.Module(), *row(), None, segments=SEGMENTS, position_ids=torch.ones(1), **{further: None})


def outcome(attend, **shape):
    tensors = row(**shape)
    out = attend(*tensors)
    out.square().sum().backward()
    return [out, *(tensor.grad for tensor in tensors)]


def packed(query, key, value, window, scale):
    return packed_attention(
        torch.nn.Module(), query, key, value, None, segments=SEGMENTS, scaling=scale, sliding_window=window
    )[0]


def varlen_by_hand(query, key, value, starts, keys_start, longest, longest_key, *, scale, window_size, enable_gqa):
    """What torch.nn.attention.varlen documents, one sequence at a time: (tokens, heads, dim), a window of W tokens to
    the left beside the token itself. And what the kernel checks (flash_api.cpp, mha_varlen_fwd)."""
    assert query.shape[-1] % 8 == 0 and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    assert starts.dtype == torch.int32 and torch.equal(starts, keys_start)
    assert longest == longest_key == max(LENGTHS) and query.shape[0] == starts[-1] and window_size[1] == 0
    outs = []
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        q, k, v = (tensor[first:last].transpose(0, 1)[None] for tensor in (query, key, value))
        at = torch.arange(last - first)
        distance = at[:, None] - at[None, :]
        mask = distance >= 0
        if window_size[0] >= 0:
            mask &= distance <= window_size[0]
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("window", "dim", "value_dim", "scale"),
    [(None, 8, 8, 0.3), (4, 8, 8, 0.3), (100, 8, 8, 0.3), (None, 12, 8, None), (None, 6, 6, 0.3), (None, 8, 20, None)],
    ids=["plain", "window", "wide window", "DeepSeek", "odd", "wide values"],
)
@pytest.mark.parametrize("one_kernel", [False, True], ids=["split", "varlen"])
def test_packed_attention_equals_block_diagonal_mask(monkeypatch, window, dim, value_dim, scale, one_kernel):
    if one_kernel:
        monkeypatch.setattr(attention, "in_host_memory", lambda device: False)
        monkeypatch.setattr(attention, "_VARLEN_DTYPES", (torch.float64,))
        monkeypatch.setattr(attention.varlen, "varlen_attn", varlen_by_hand)
    shape = {"dim": dim, "value_dim": value_dim}
    wanted = outcome(lambda *tensors: by_mask(*tensors, window, scale), **shape)
    found = outcome(lambda *tensors: packed(*tensors, window, scale), **shape)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)
