"""The objective of all methods: a model over packed rows, whose output head runs only at trained positions, and the
method's loss, computed from the log-probabilities there.

Often only a tenth of a row's tokens is trained. The hidden states of those positions are gathered before the
output head, so the head's matrix product and the vocabulary-wide softmax run for them alone.
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
from train.plan.estimate import DEVICE_LOGITS_BYTES, HOST_LOGITS_BYTES, held_rows

# Settings that change logits or hidden states around the head; models with such a setting run their own head.
_HEAD_EXTRAS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class PackedObjective(nn.Module):
    """Wraps the model, as attribute `model`; the training engine calls `forward` with the result of `to_batch`."""

    def __init__(self, model: PreTrainedModel, method: Method, options: Mapping[str, Any]):
        """Replace the class of a linear output head by LogProbHead, which also computes log-probabilities in its
        forward: under ZeRO-3 the weight exists only during the module's own forward."""
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
        """Return the row's loss times batch["scale"], a float32 scalar. If the batch has `as_reference`, return each
        sequence's log-probability, summed over trained tokens: (sequences,) float32."""
        log_probs, right = self._log_probs(batch)
        sizes = list(batch["sequence_sizes"])
        if not self._by_token:
            # Not index_add: on a GPU it would add in a different order in each run.
            log_probs = torch.stack([part.sum() for part in log_probs.split(sizes)])
        if batch.get("as_reference"):
            return log_probs
        loss, sums = self._loss(log_probs, batch)
        scale = batch["scale"]
        with torch.no_grad():
            if self._counts_hits and scale:
                # Count only an example's first sequence, the desired answer.
                right = torch.cat(right.split(sizes)[:: self._sequences])
                # `new_full`, because `new_tensor` copies from the host, which waits for the whole forward pass.
                self._hits.append(torch.stack([right.sum(), right.new_full((), len(right), dtype=torch.int64)]))
            if sums:
                self._sums.append(torch.stack([each.sum() for each in sums]) * scale)
        return loss * scale

    def take_metrics(self) -> list[float]:
        """Return sums over all forward passes since the last call: correct tokens, trained tokens, and the method's own
        values, if any."""
        hits, sums = self._hits, self._sums
        self._hits, self._sums = [], []
        counts = torch.stack(hits).sum(0).tolist() if hits else [0, 0]
        return counts + (torch.stack(sums).sum(0).tolist() if sums else [])

    def _log_probs(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Each trained token's log-probability, (n,) float32, and whether the token is the likeliest, (n,) bool."""
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
    """The output head; called with labels, it returns the labels' log-probabilities in place of logits.

    wide: compute in float32; in bfloat16, rounding would make the log-probabilities of trainer and sampling engine
    differ by more than a step changes them. alike: all log-probabilities have the same gradient, as in a sum. right:
    (n,) bool, whether each label of the last call was the likeliest token."""

    wide = alike = False
    right: torch.Tensor

    def forward(
        self, hidden: torch.Tensor, labels: torch.Tensor | None = None, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """hidden (n, width), labels (n,) int64 -> log-probabilities (n,) float32, in the distribution over the
        `allowed` tokens (as in `only`); without labels the usual logits (..., vocabulary)."""
        if labels is None:
            return functional.linear(hidden.float(), self.weight.float()) if self.wide else super().forward(hidden)
        early = self.alike and torch.is_grad_enabled()
        log_probs, self.right = _LinearLogProbs.apply(hidden, self.weight, labels, self.wide, allowed, early)
        return log_probs


class _LinearLogProbs(torch.autograd.Function):
    """Computes log_softmax(hidden @ weight.T)[labels] in chunks. Each token's upstream gradient is known only after the
    forward pass, so the backward pass recomputes the logits of each chunk instead of storing them. If all tokens have
    the same upstream gradient (`early`), the forward pass computes the gradients, and the backward pass scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, wide, allowed, early):
        ctx.save_for_backward(*(() if early else (hidden, weight, labels)))
        ctx.dtypes, ctx.wide, ctx.allowed = (hidden.dtype, weight.dtype), wide, allowed
        if wide:
            hidden, weight = hidden.float(), weight.float()
        log_probs = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty_like(log_probs)
        right = torch.empty(len(labels), dtype=torch.bool, device=hidden.device)
        gradients = _Gradients(hidden, weight, labels, *ctx.needs_input_grad[:2]) if early else None
        for part in _chunks(hidden, weight):
            logits, target = _logits(hidden[part], weight, allowed, part), labels[part, None]
            log_sum, likeliest = log_sum_exp(logits)
            log_sums[part], right[part] = log_sum[:, 0], (likeliest == target)[:, 0]
            log_probs[part] = logits.gather(1, target)[:, 0] - log_sums[part]
            if gradients is not None:
                gradients.add(part, logits, log_sums)
        ctx.log_sums, ctx.early = log_sums, None if gradients is None else gradients.totals()
        ctx.mark_non_differentiable(right)
        return log_probs, right

    @staticmethod
    def backward(ctx, upstream, _):
        if ctx.early is not None:
            sums = [None if each is None else each.mul_(upstream[:1].sum()) for each in ctx.early]
        else:
            hidden, weight, labels = ctx.saved_tensors
            if ctx.wide:
                hidden, weight = hidden.float(), weight.float()
            gradients = _Gradients(hidden, weight, labels, *ctx.needs_input_grad[:2])
            for part in _chunks(hidden, weight):
                gradients.add(part, _logits(hidden[part], weight, ctx.allowed, part), ctx.log_sums, upstream)
            sums = gradients.totals()
        cast = (None if each is None else each.to(kind) for each, kind in zip(sums, ctx.dtypes, strict=True))
        return *cast, None, None, None, None


class _Gradients:
    """Accumulates gradients of the labels' log-probabilities for hidden states and weight, in chunks of rows.

    Gradients of logits are buffered, in no more memory than a float32 copy of the weight, and multiplied at once when
    the buffer is full. One product per chunk, added in float32, would move 6 bytes per weight element each time: 2 ms
    for 131 rows (vocabulary 128k, width 4096), twice the time of the arithmetic.
    """

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, need_hidden: bool, need_weight: bool
    ):
        self._hidden, self._weight, self._labels, self._need_weight = hidden, weight, labels, need_weight
        chunk = chunk_rows(hidden, weight.shape[0])
        rows = held_rows(len(hidden), chunk, hidden.shape[1], hidden.element_size()) if need_weight else chunk
        self._held = hidden.new_empty((rows, weight.shape[0]))
        self._first = self._end = 0
        self._of_hidden = torch.empty_like(hidden) if need_hidden else None
        self._of_weight: torch.Tensor | None = None

    def add(
        self, part: slice, logits: torch.Tensor, log_sums: torch.Tensor, upstream: torch.Tensor | None = None
    ) -> None:
        """Add the next rows. logits: (rows, vocabulary) float32, overwritten. log_sums, upstream: (n,) for all rows."""
        grad = logits.sub_(log_sums[part, None]).exp_().neg_()  # becomes minus the softmax
        target = self._labels[part, None]
        grad.scatter_add_(1, target, torch.ones_like(target, dtype=grad.dtype))
        if upstream is not None:
            grad = grad.mul_(upstream[part, None])
        if part.stop - self._first > len(self._held):
            self._multiply()
        held = self._held[part.start - self._first : part.stop - self._first].copy_(grad)
        self._end = part.stop
        if self._of_hidden is not None:
            torch.mm(held, self._weight, out=self._of_hidden[part])

    def totals(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gradients (n, width) and (vocabulary, width) in hidden's dtype; None for a gradient that is not needed."""
        self._multiply()
        if self._need_weight and self._of_weight is None:  # this part of a row has no trained token
            self._of_weight = torch.zeros_like(self._weight)
        return self._of_hidden, None if self._of_weight is None else self._of_weight.to(self._hidden.dtype)

    def _multiply(self) -> None:
        first, self._first = self._first, self._end
        if not self._need_weight or first == self._end:
            return
        part = self._held[: self._end - first].t() @ self._hidden[first : self._end]
        if self._of_weight is not None:
            self._of_weight.add_(part)
        else:  # add several parts in float32, or rounding would lose late small parts
            self._of_weight = part if len(self._hidden) <= len(self._held) else part.float()


def chunk_rows(hidden: torch.Tensor, vocabulary: int) -> int:
    """Return rows of `hidden` per chunk: 64 MB of float32 logits on a CPU, 256 MB on a GPU. A chunk reads the head's
    weight twice; on a GPU, with 64 MB (131 rows, vocabulary 128k), that would take longer than the arithmetic."""
    chunk_bytes = HOST_LOGITS_BYTES if in_host_memory(hidden.device) else DEVICE_LOGITS_BYTES
    return max(1, min(hidden.shape[0], chunk_bytes // (4 * vocabulary)))


def log_sum_exp(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exactly torch.logsumexp over the vocabulary, and the token with the largest logit, (n, 1) each. The sum
    needs the maximum anyway, so finding this token takes almost no time (docs/performance.md)."""
    top, likeliest = logits.max(dim=-1, keepdim=True)
    return (logits - top).exp_().sum(dim=-1, keepdim=True).log_().add_(top), likeliest


def only(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Set the logits (n, vocabulary) of tokens that are not allowed to minus infinity, in place. allowed: (n, words)
    int32, a bit per token, lowest bit first."""
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (allowed.view(torch.uint8)[..., None] >> places) & 1
    return logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -math.inf)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, allowed: torch.Tensor | None, part: slice) -> torch.Tensor:
    logits = (hidden @ weight.t()).float()
    return logits if allowed is None else only(logits, allowed[part])


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    n, rows = hidden.shape[0], chunk_rows(hidden, weight.shape[0])
    return [slice(start, min(n, start + rows)) for start in range(0, n, rows)]


def to_batch(row: Row, scale: float, device: torch.device | str) -> dict[str, Any]:
    """Return a row's tensors for the objective, on `device`. scale: 1 / `Method.denominator` of the whole step, 0 for a
    row that only fills up the step. With `as_reference` added to the batch, the objective returns log-probabilities in
    place of the loss (train.trainer.train)."""

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
