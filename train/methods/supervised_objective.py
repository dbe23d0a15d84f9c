"""The loss of supervised fine-tuning, computed only where something is learnt.

The head's gradient is made in the forward pass chunk by chunk, so that no logits live until the backward (the idea of
Liger Kernel's FusedLinearCrossEntropy, arXiv:2410.10989).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from runtime.devices.kinds import in_host_memory
from train.methods.head_gradient import HeadGradient, chunk_rows
from train.methods.packed_objective import LogProbHead, PackedObjective, log_sum_exp


class SupervisedObjective(PackedObjective):
    """Wraps the model so that the training engine's forward returns the loss of one micro-batch."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model, LossHead)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Sum over the row of the cross entropy of its learnt tokens, times batch["scale"]; a float32 scalar. For a
        batch `as_reference`, what the model says of each sequence."""
        if batch.get("as_reference"):
            return self.sequence_log_probs(batch)[0]
        if self._fused:
            loss = self.head(batch, batch["scale"])
            self.report_hits(self.model.get_output_embeddings().right, batch["scale"])
            return loss
        logits = self.logits(batch)
        self.report_hits(logits.detach().argmax(-1) == batch["labels"], batch["scale"])
        return functional.cross_entropy(logits, batch["labels"], reduction="sum") * batch["scale"]


class LossHead(LogProbHead):
    """The output head; called with labels and a scale it returns the loss."""

    def forward(
        self, hidden: torch.Tensor, labels: torch.Tensor | None = None, scale: float | None = None
    ) -> torch.Tensor:
        """hidden (n, width), labels (n,) int64 -> scalar; without a scale what a LogProbHead returns."""
        if labels is None or scale is None:
            return super().forward(hidden, labels)
        loss, self.right = _LinearCrossEntropy.apply(hidden, self.weight, labels, scale)
        return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """sum(cross_entropy(hidden @ weight.T, labels)) * scale, gradients made in the forward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, scale):
        n, vocabulary = hidden.shape[0], weight.shape[0]
        rows = chunk_rows(hidden, vocabulary)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if need_hidden else None
        weight_grad = HeadGradient(hidden, vocabulary, rows) if need_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        right = torch.empty(n, dtype=torch.bool, device=hidden.device)
        for start in range(0, n, rows):
            part = hidden[start : start + rows]
            target = labels[start : start + rows, None]
            logits = (part @ weight.t()).float()
            log_sum, likeliest = log_sum_exp(logits)
            right[start : start + rows] = (likeliest == target)[:, 0]
            total += (log_sum - logits.gather(1, target)).sum()
            if not (need_hidden or need_weight):
                continue
            grad = logits.sub_(log_sum).exp_()  # softmax, in place of the logits
            grad.scatter_add_(1, target, torch.full_like(target, -1, dtype=grad.dtype))
            grad = grad.mul_(scale)
            grad = grad.to(hidden.dtype) if weight_grad is None else weight_grad.add(grad)
            if need_hidden:
                torch.mm(grad, weight, out=hidden_grad[start : start + rows])
        ctx.save_for_backward(hidden_grad, None if weight_grad is None else weight_grad.total())
        ctx.mark_non_differentiable(right)
        return total * scale, right

    @staticmethod
    def backward(ctx, upstream, _):
        hidden_grad, weight_grad = ctx.saved_tensors
        return (_times(hidden_grad, upstream), _times(weight_grad, upstream), None, None)


def _times(grad: torch.Tensor | None, upstream: torch.Tensor) -> torch.Tensor | None:
    if grad is None or (in_host_memory(upstream.device) and upstream.item() == 1.0):
        return grad
    return grad * upstream.to(grad.dtype)
