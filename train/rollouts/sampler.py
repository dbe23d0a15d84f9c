"""Samples answers from the current model in a rank: token by token, with a cache of keys and values, at temperature 1
and from the whole vocabulary, or from the tokens that a form leaves, so that the recorded log-probabilities are the
policy's own.

The ranks sample because they have the weights of this very step, whatever is trained and however it is partitioned.
Random numbers come from outside, one for each token, so that an answer depends on nothing but them and the weights. The
number of forward passes is the same on every rank: under ZeRO-3 and tensor parallelism each is a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache

from train.methods.packed_objective import only
from train.plan.estimate import SAMPLING_BYTES, ModelShape

if TYPE_CHECKING:
    from train.rollouts.form import Form

_ATTENTION = "sdpa"  # packed rows know no cache
# Bytes of a row and a token of the vocabulary while the next token is chosen: logits and their log_softmax in float32,
# probabilities and their sums in float64.
_CHOICE_BYTES = 2 * 4 + 2 * 8


@dataclass(frozen=True)
class Answers:
    """ids (n, room) int64, 0 after the end; log_probs (n, room) float32; sizes (n,) int64, with the token that
    ends."""

    ids: torch.Tensor
    log_probs: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def empty(cls, n: int, room: int, device: torch.device | None = None) -> Answers:
        """On the host without a device."""
        return cls(
            torch.zeros(n, room, dtype=torch.int64, device=device),
            torch.zeros(n, room, dtype=torch.float32, device=device),
            torch.zeros(n, dtype=torch.int64, device=device),
        )


def sample(
    model: Any,
    prompts: Sequence[np.ndarray],
    chances: np.ndarray,
    ends: Sequence[int],
    longest: int,
    device: torch.device,
    agreed: Callable[[bool], tuple[bool, bool]],
    form: Form | None = None,
) -> Answers | None:
    """An answer to each prompt; equal ones that follow each other go through the model once.

    chances: (n, room) in [0, 1), by which the tokens are chosen. ends: tokens that end an answer. longest: the most
    tokens of a prompt with its answer, the same on every rank, as the number of prompts is. agreed: collective; given
    whether this rank has unfinished answers, it returns whether the devices are wanted, and whether any rank has
    unfinished ones. Returns None if the devices are wanted. form: restricts each answer; log-probabilities are over the
    tokens that it leaves.
    """
    n, room = chances.shape
    made = Answers.empty(n, room, device)
    with answering(model):
        wave = _together(model, longest)
        for start in range(0, n, wave):
            part = slice(start, min(n, start + wave))
            into = Answers(made.ids[part], made.log_probs[part], made.sizes[part])
            if not _wave(model, prompts[part], chances[part], ends, device, agreed, into, form):
                return None
    return made


@contextmanager
def answering(model: Any) -> Iterator[None]:
    """Inside this block a model in training answers with a cache: without dropout, gradients and packed rows."""
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation(_ATTENTION)
    try:
        with torch.no_grad():
            yield
    finally:
        model.set_attn_implementation(attention)
        model.train(training)


def _together(model: Any, tokens: int) -> int:
    """Sequences of this many tokens whose keys and values, and the choice of their next tokens, fit the memory that is
    planned for them. With short answers of a small model the choice is the larger part."""
    shape = ModelShape.from_config(model.config.to_dict(), 0)
    each = shape.kv_bytes_per_token * model.dtype.itemsize // 2 * tokens + _CHOICE_BYTES * shape.vocab
    return max(1, SAMPLING_BYTES // max(1, each))


def _wave(
    model: Any,
    prompts: Sequence[np.ndarray],
    chances: np.ndarray,
    ends: Sequence[int],
    device: torch.device,
    agreed: Callable[[bool], tuple[bool, bool]],
    made: Answers,
    form: Form | None,
) -> bool:
    """Fill `made`; False if the devices were wanted."""
    chance = torch.from_numpy(chances).to(device)
    ending = torch.tensor(list(ends), device=device)
    cache = DynamicCache(config=model.config.get_text_config())
    different, of = _different(prompts)
    ids, mask = padded(different, device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = next_logits(model, cache, ids, mask, positions)[:, -1]
    # From here on a row is an answer; `rows` says which.
    which = torch.tensor(of, device=device)
    cache.batch_select_indices(which)
    logits, mask, positions = logits[which], mask[which], positions[which][:, -1:]
    rows = torch.arange(len(prompts), device=device)
    alive = torch.ones(len(rows), dtype=torch.bool, device=device)
    held = [] if form is None else [form.begin() for _ in prompts]
    for place in range(chances.shape[1]):
        if held:
            allowed = np.stack([held[row].allowed() for row in rows.tolist()])
            logits = only(logits, torch.from_numpy(allowed).to(device))
        log_probs = logits.log_softmax(-1)
        chosen = _choose(log_probs, chance[rows, place])
        at = rows[alive]
        if held:
            for row, token in zip(at.tolist(), chosen[alive].tolist(), strict=True):
                held[row].take(token)
        made.ids[at, place] = chosen[alive]
        made.log_probs[at, place] = log_probs.gather(1, chosen[:, None])[alive, 0]
        made.sizes[at] += 1
        alive = alive & ~torch.isin(chosen, ending)
        last = place + 1 == chances.shape[1]
        wanted, going = agreed(bool(alive.any()) and not last)
        if wanted or not going:
            return not wanted
        if 2 * int(alive.sum()) <= len(rows) > 1:  # the others are computed for nothing
            kept = torch.nonzero(alive)[:, 0] if alive.any() else rows.new_zeros(1)
            cache.batch_select_indices(kept)
            rows, mask, positions, chosen, alive = (part[kept] for part in (rows, mask, positions, chosen, alive))
        positions = positions + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = next_logits(model, cache, chosen[:, None], mask, positions)[:, -1]
    return True


def next_logits(
    model: Any, cache: DynamicCache, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, keep: int = 1
) -> torch.Tensor:
    """Logits of the tokens after the last `keep` ones, (rows, keep, vocabulary) float32."""
    found: torch.Tensor = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=last(ids, keep),
    ).logits
    return found.float()


def last(ids: torch.Tensor, keep: int) -> torch.Tensor:
    """Places of the last `keep` of the tokens (rows, n), for `logits_to_keep`. Not the number: transformers then hands
    the head a slice with gaps, for which torch's bf16 product on a CPU copies the head once for each row. 8 rows took
    2.2 GB with a vocabulary of 152,000 and a hidden size of 896."""
    return torch.arange(ids.shape[1] - keep, ids.shape[1], device=ids.device)


def _choose(log_probs: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """(rows,) int64: the token at which the cumulated probability passes `chance`, in [0, 1)."""
    reached = log_probs.double().exp().cumsum(-1)
    # 1 - chance is never 0, so that no token of probability 0 is chosen.
    return (reached < (1 - chance)[:, None] * reached[:, -1:]).sum(-1).clamp(max=log_probs.shape[-1] - 1)


def _different(prompts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """Prompts that differ from the one before, and for each prompt which of them it is."""
    found: list[np.ndarray] = []
    of = []
    for prompt in prompts:
        if not found or not np.array_equal(found[-1], prompt):
            found.append(prompt)
        of.append(len(found) - 1)
    return found, of


def padded(rows: Sequence[Sequence[int] | np.ndarray], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, (rows, longest) int64, filled up on the left."""
    longest = max(map(len, rows))
    ids, mask = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), np.int64)
    for row, tokens in enumerate(rows):
        ids[row, longest - len(tokens) :], mask[row, longest - len(tokens) :] = tokens, 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
