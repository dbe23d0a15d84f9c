"""A Llama-architecture network in plain PyTorch, fast enough to pretrain on one CPU core in a minute.

Parameter names, shapes and arithmetic are those of `transformers.LlamaForCausalLM`, so its state dict *is* the
checkpoint; a test compares the logits of both. On 2 CPU cores that class trains this size at 5,000 tokens/s, this file
at 8,500. The difference comes from the loss (the logits of 4,096 positions times 4,096 words are never held at once)
and from attention as two batched matrix products, which at these lengths are three times as fast as the fused CPU
kernel.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; `config()` is its Hugging Face `config.json`."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def config(self, *, bos: int, eos: int, pad: int) -> dict:
        """`config.json` for `transformers` and vLLM; `bos`, `eos`, `pad` are token ids."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "rope_scaling": None,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "torch_dtype": "bfloat16",
        }


class Linear(nn.Linear):
    """Bias-free; float32 parameters, computed in the dtype of the input."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.heads, self.groups, self.head_dim = s.num_attention_heads, s.num_key_value_heads, s.head_dim
        self.q_proj = Linear(s.hidden_size, self.heads * s.head_dim)
        self.k_proj = Linear(s.hidden_size, self.groups * s.head_dim)
        self.v_proj = Linear(s.hidden_size, self.groups * s.head_dim)
        self.o_proj = Linear(self.heads * s.head_dim, s.hidden_size)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = rotate(self.q_proj(x).view(batch, length, self.heads, self.head_dim), rope)
        k = rotate(self.k_proj(x).view(batch, length, self.groups, self.head_dim), rope)
        v = self.v_proj(x).view(batch, length, self.groups, self.head_dim)
        per_group = self.heads // self.groups
        q = q.transpose(1, 2).reshape(batch * self.groups, per_group * length, self.head_dim)
        k = k.transpose(1, 2).reshape(batch * self.groups, length, self.head_dim)
        v = v.transpose(1, 2).reshape(batch * self.groups, length, self.head_dim)
        scores = torch.bmm(q, k.transpose(1, 2)) * self.head_dim**-0.5
        scores = scores.view(-1, per_group, length, length) + mask
        read = torch.bmm(scores.softmax(-1).view(-1, per_group * length, length), v)
        read = read.view(batch, self.heads, length, self.head_dim).transpose(1, 2)
        return self.o_proj(read.reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.gate_proj = Linear(s.hidden_size, s.intermediate_size)
        self.up_proj = Linear(s.hidden_size, s.intermediate_size)
        self.down_proj = Linear(s.intermediate_size, s.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = MLP(s)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """What the checkpoint calls `model.`: embeddings, layers, final norm."""

    def __init__(self, s: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_hidden_layers))
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)


class StarterNet(nn.Module):
    """Float32 parameters; activations in `compute_dtype`."""

    def __init__(self, shape: Shape, *, compute_dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.shape, self.compute_dtype = shape, compute_dtype
        self.model = Trunk(shape)
        self.lm_head = Linear(shape.hidden_size, shape.vocab_size)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Outputs of residual branches start smaller, as in GPT-2, so that depth does not add variance.
                branch_end = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * shape.num_hidden_layers) ** 0.5 if branch_end else 1))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Last hidden states, (batch, length, hidden_size) in `compute_dtype`, of `tokens` (batch, length) int64."""
        length, device, s = tokens.shape[1], tokens.device, self.shape
        frequencies = s.rope_theta ** (-torch.arange(0, s.head_dim, 2, device=device, dtype=torch.float32) / s.head_dim)
        angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)[None, :, None]
        rope = (angles.cos().to(self.compute_dtype), angles.sin().to(self.compute_dtype))
        mask = torch.full((length, length), float("-inf"), dtype=self.compute_dtype, device=device).triu(1)
        x = self.model.embed_tokens(tokens).to(self.compute_dtype)
        for layer in self.model.layers:
            x = layer(x, rope, mask)
        return self.model.norm(x)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length, vocab_size); for tests and sampling, training uses `loss`."""
        return self.lm_head(self.hidden(tokens))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of `targets` (batch, length) int64, a float32 scalar."""
        hidden = self.hidden(tokens)
        return ChunkedCrossEntropy.apply(hidden.reshape(-1, hidden.shape[-1]), self.lm_head.weight, targets.reshape(-1))


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary position embedding in Llama's half-split layout; `x` is (batch, length, heads, head_dim)."""
    cos, sin = rope
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Output projection and cross-entropy together, a few hundred rows at a time, gradients made on the way.

    The idea is Liger-Kernel's fused linear cross-entropy (arXiv 2410.10989).
    """

    ROWS = 256

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        w, n = weight.to(hidden.dtype), len(targets)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        loss = torch.zeros((), device=hidden.device)
        for start in range(0, n, ChunkedCrossEntropy.ROWS):
            rows = slice(start, min(start + ChunkedCrossEntropy.ROWS, n))
            p, wanted = (hidden[rows] @ w.t()).float(), targets[rows, None]
            log_norm = torch.logsumexp(p, 1, keepdim=True)
            loss += (log_norm - p.gather(1, wanted)).sum()
            p.sub_(log_norm).exp_().scatter_add_(1, wanted, torch.full_like(log_norm, -1.0))
            grad_logits = p.div_(n).to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ w
            grad_weight += grad_logits.t() @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss / n

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad, None
