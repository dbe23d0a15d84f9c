"""The loss of supervised fine-tuning, computed only where something is learnt.

Of a row of thousands of tokens often a tenth is the assistant's. The hidden states of those positions are gathered
before the output head, so the head's matrix product and the vocabulary-wide softmax are paid for them alone, and
the head's gradient is made in the forward pass chunk by chunk, so that no logits live until the backward
(the idea of Liger Kernel's FusedLinearCrossEntropy, arXiv:2410.10989).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from runtime.devices.kinds import in_host_memory
from train.data.packing import Row
from train.methods.head_gradient import HeadGradient, chunk_rows

# What some architectures do to logits or hidden states around the head; they go through their own forward.
_HEAD_EXTRAS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class SupervisedObjective(nn.Module):
    """Wraps the model so that the training engine's forward returns the loss of one micro-batch."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        plain = type(head) is nn.Linear and head.bias is None
        self._fused = plain and not any(getattr(config, name, None) for name in _HEAD_EXTRAS)
        if self._fused:
            # Under ZeRO-3 the weight is only there inside the module's own forward, so the loss must be its forward.
            head.__class__ = LossHead

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Sum over the row of the cross entropy of its learnt tokens, times batch["scale"]; a float32 scalar."""
        row = {
            "input_ids": batch["input_ids"],
            "position_ids": batch["position_ids"],
            "use_cache": False,
            "segments": batch["segments"],
        }
        if self._fused:
            hidden = self.model.get_decoder()(**row).last_hidden_state
            learnt = hidden[0].index_select(0, batch["predict_at"])
            return self.model.get_output_embeddings()(learnt, batch["labels"], batch["scale"])
        logits = self.model(**row, logits_to_keep=batch["predict_at"]).logits[0]
        return functional.cross_entropy(logits.float(), batch["labels"], reduction="sum") * batch["scale"]


class LossHead(nn.Linear):
    """The output head; called with labels it returns the loss in place of logits."""

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        """hidden (n, width), labels (n,) int64 -> scalar; without labels the usual logits (..., vocabulary)."""
        if labels is None:
            return super().forward(hidden)
        return _LinearCrossEntropy.apply(hidden, self.weight, labels, scale)


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
        for start in range(0, n, rows):
            part = hidden[start : start + rows]
            target = labels[start : start + rows, None]
            logits = (part @ weight.t()).float()
            log_sum = torch.logsumexp(logits, dim=-1, keepdim=True)
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
        return total * scale

    @staticmethod
    def backward(ctx, upstream):
        hidden_grad, weight_grad = ctx.saved_tensors
        return (_times(hidden_grad, upstream), _times(weight_grad, upstream), None, None)


def _times(grad: torch.Tensor | None, upstream: torch.Tensor) -> torch.Tensor | None:
    if grad is None or (in_host_memory(upstream.device) and upstream.item() == 1.0):
        return grad
    return grad * upstream.to(grad.dtype)


def to_batch(row: Row, scale: float, device: torch.device | str) -> dict[str, Any]:
    """The tensors `SupervisedObjective` takes, on `device`. `scale` is 1 / learnt tokens of the whole global step."""

    def tensor(array) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return {
        "input_ids": tensor(row.input_ids)[None],
        "position_ids": tensor(row.position_ids)[None],
        "predict_at": tensor(row.predict_at),
        "labels": tensor(row.labels),
        "segments": row.segments,
        "scale": scale,
    }
