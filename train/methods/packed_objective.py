"""The objective of all methods: a model over packed rows, whose output head runs only where something is learnt, and
the method's loss of the log-probabilities there.

Often a tenth of a row of thousands of tokens is learnt. The hidden states of those positions are gathered before the
output head, so the head's matrix product and the vocabulary-wide softmax are paid for them alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from runtime.devices.kinds import in_host_memory
from train.data.packing import Row
from train.methods.method import Method
from train.plan.estimate import logits_rows

# What some architectures do to logits or hidden states around the head; they go through their own forward.
_HEAD_EXTRAS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class PackedObjective(nn.Module):
    """Holds the model as `model`; `forward` is what the training engine calls with `to_batch`."""

    def __init__(self, model: PreTrainedModel, method: Method, options: Mapping[str, Any]):
        """The class of a plain output head is replaced, to compute more than logits in its forward: under ZeRO-3 the
        weight is only there inside the module's own forward."""
        super().__init__()
        self.model = model
        self._loss, self._sequences = partial(method.loss, options=options), method.sequences
        self._by_token = method.wide
        self._counts_hits = "mean_token_accuracy" in method.measured
        config = model.config.get_text_config()
        output = model.get_output_embeddings()
        plain = type(output) is nn.Linear and output.bias is None
        self._fused = plain and not any(getattr(config, name, None) for name in _HEAD_EXTRAS)
        if self._fused:
            output.__class__, output.wide, output.alike = LogProbHead, method.wide, method.sums
        self._hits: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """The row's loss times batch["scale"], a float32 scalar. For a batch `as_reference`, the log-probability of
        what is learnt of each sequence, (sequences,) float32."""
        log_probs, right = self._log_probs(batch)
        sizes = list(batch["sequence_sizes"])
        if not self._by_token:
            # Not index_add, whose order of addition differs from run to run on a GPU.
            log_probs = torch.stack([part.sum() for part in log_probs.split(sizes)])
        if batch.get("as_reference"):
            return log_probs
        loss, sums = self._loss(log_probs, batch)
        scale = batch["scale"]
        with torch.no_grad():
            if self._counts_hits and scale:
                # Count only an example's first sequence, the desired answer.
                right = torch.cat(right.split(sizes)[:: self._sequences])
                # `new_full`: `new_tensor` copies from the host, which waits for the whole forward pass.
                self._hits.append(torch.stack([right.sum(), right.new_full((), len(right), dtype=torch.int64)]))
            if sums:
                self._sums.append(torch.stack([each.sum() for each in sums]) * scale)
        return loss * scale

    def take_metrics(self) -> list[float]:
        """Sums over the forward passes since the last call: correct tokens, trained tokens, and the method's own, which
        are left out if there were none."""
        hits, sums = self._hits, self._sums
        self._hits, self._sums = [], []
        counts = torch.stack(hits).sum(0).tolist() if hits else [0, 0]
        return counts + (torch.stack(sums).sum(0).tolist() if sums else [])

    def _log_probs(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(n,) float32: the log-probability of each learnt token; and (n,) bool: whether it is the likeliest one."""
        row = {name: batch[name] for name in ("input_ids", "position_ids", "segments")} | {"use_cache": False}
        labels, predict_at, allowed = batch["labels"], batch["predict_at"], batch.get("allowed")
        if self._fused:
            learnt = self.model.get_decoder()(**row).last_hidden_state[0].index_select(0, predict_at)
            head = self.model.get_output_embeddings()
            return head(learnt, labels, allowed), head.right
        logits = self.model(**row, logits_to_keep=predict_at).logits[0].float()
        if allowed is not None:
            logits = only(logits.clone(), allowed)
        log_probs = -functional.cross_entropy(logits, labels, reduction="none")
        return log_probs, logits.detach().argmax(-1) == labels


class LogProbHead(nn.Linear):
    """The output head; called with labels it returns their log-probabilities in place of logits. wide: computed in
    float32: rounded to bfloat16, log-probabilities of a trainer and of the engine that sampled differ by more than a
    step changes them. alike: the loss has one gradient for all of them, as their sum has. right: (n,) bool, which
    labels of the last call were the likeliest tokens."""

    wide = alike = False
    right: torch.Tensor

    def forward(
        self, hidden: torch.Tensor, labels: torch.Tensor | None = None, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """hidden (n, width), labels (n,) int64 -> (n,) float32, in the distribution over the tokens that `allowed`, as
        `only` has it, leaves of the vocabulary; without labels the usual logits (..., vocabulary)."""
        if labels is None:
            return functional.linear(hidden.float(), self.weight.float()) if self.wide else super().forward(hidden)
        early = self.alike and torch.is_grad_enabled()
        log_probs, self.right = _LinearLogProbs.apply(hidden, self.weight, labels, self.wide, allowed, early)
        return log_probs


class _LinearLogProbs(torch.autograd.Function):
    """log_softmax(hidden @ weight.T)[labels], by chunks. What each token's gradient is multiplied by is known only when
    all are there, so the backward computes the logits of each chunk again instead of keeping any. Where it is one
    number for all (`early`), the gradients are made of the forward's logits, and multiplied in the end."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, wide, allowed, early):
        ctx.early, ctx.wide, ctx.allowed = early, wide, allowed
        needs = ctx.needs_input_grad[:2] if early else (False, False)
        log_probs, right, *gradients = _by_chunks(hidden, weight, labels, wide, allowed, needs)
        ctx.save_for_backward(*(gradients if early else (hidden, weight, labels)))
        ctx.mark_non_differentiable(right)
        return log_probs, right

    @staticmethod
    def backward(ctx, upstream, _):
        if ctx.early:
            gradients = [None if each is None else each.mul_(upstream[:1].sum()) for each in ctx.saved_tensors]
        else:
            _, _, *gradients = _by_chunks(
                *ctx.saved_tensors, ctx.wide, ctx.allowed, ctx.needs_input_grad[:2], upstream[:, None]
            )
        return *gradients, None, None, None, None


def _by_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    wide: bool,
    allowed: torch.Tensor | None,
    needs: tuple[bool, ...],
    upstream: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Log-probabilities of the labels (n,) float32, which of them are the likeliest tokens (n,) bool, and the gradients
    that are needed of (hidden, weight), for the upstream gradient (n, 1) or, without one, of the sum."""
    dtypes = hidden.dtype, weight.dtype
    if wide:
        hidden, weight = hidden.float(), weight.float()
    n, (vocabulary, _) = len(labels), weight.shape
    rows = logits_rows(n, vocabulary, on_host=in_host_memory(hidden.device), full=needs[1])
    log_probs = torch.empty(n, dtype=torch.float32, device=hidden.device)
    right = torch.empty(n, dtype=torch.bool, device=hidden.device)
    of_hidden = torch.empty_like(hidden) if needs[0] else None
    of_weight = None
    if needs[1] and n != rows:  # several products are added in float32, or small late ones would be rounded away
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        target = labels[part, None]
        logits = (hidden[part] @ weight.t()).float()
        if allowed is not None:
            logits = only(logits, allowed[part])
        right[part] = logits.argmax(-1) == labels[part]
        logits = logits.log_softmax(-1)
        log_probs[part] = logits.gather(1, target)[:, 0]
        if not any(needs):
            continue
        gradient = logits.exp_().neg_()
        gradient.scatter_add_(1, target, torch.ones_like(target, dtype=gradient.dtype))
        gradient = (gradient if upstream is None else gradient.mul_(upstream[part])).to(hidden.dtype)
        if of_hidden is not None:
            torch.mm(gradient, weight, out=of_hidden[part])
        if needs[1]:
            product = gradient.t() @ hidden[part]
            of_weight = product if of_weight is None else of_weight.add_(product)
    gradients = (of_hidden, dtypes[0]), (of_weight, dtypes[1])
    return log_probs, right, *(None if each is None else each.to(dtype) for each, dtype in gradients)


def only(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Logits (n, vocabulary), minus infinity in place where `allowed` forbids: (n, words) int32, a bit for each token,
    the lowest first."""
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (allowed.view(torch.uint8)[..., None] >> places) & 1
    return logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -math.inf)


def to_batch(row: Row, scale: float, device: torch.device | str) -> dict[str, Any]:
    """The tensors of a row that an objective takes, on `device`. scale: 1 / `Method.denominator` of the whole step, 0
    for a row that only fills it.

    sequence_sizes: the number of labels of each sequence. reference: (sequences,) float32, or None. Who adds
    `as_reference` asks for that, not for the loss (train.trainer.train).
    """

    def tensor(array: np.ndarray | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(array).to(device, non_blocking=True)

    return {
        "input_ids": tensor(row.input_ids[None]),
        "position_ids": tensor(row.position_ids[None]),
        "predict_at": tensor(row.predict_at),
        "labels": tensor(row.labels),
        "segments": row.segments,
        "sequence_sizes": row.sequence_sizes,
        "marks": row.marks,
        "reference": tensor(row.reference),
        "advantages": tensor(row.advantages),
        "sampled": tensor(row.sampled),
        "allowed": tensor(row.allowed()) if row.allowed else None,
        "scale": scale,
    }
