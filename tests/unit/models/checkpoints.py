"""Tiny but complete checkpoint directories for the tests of `appliance.models`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from weights.tiers.copies import DirectoryCopies

HIDDEN, VOCABULARY, LAYERS = 8, 32, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 128,
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def stored(tmp_path: Path) -> list[tuple[str, str]]:
    """Sorted pairs (model, version) of all models in the test's library."""
    return sorted((name.model, name.version) for name in DirectoryCopies(tmp_path / "models").manifests())


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    named = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    named |= {f"model.layers.{n}.mlp.up_proj.weight": (16, HIDDEN) for n in range(LAYERS)}
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in named.items()}


def write(
    directory: Path, *, config: dict[str, Any] | None = None, shards: int = 1, template: str | None = TEMPLATE
) -> Path:
    """Create `directory` and write a checkpoint into it, split into `shards` weight files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE"}}))
    described = {"eos_token": "</s>"} | ({"chat_template": template} if template is not None else {})
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    everything = tensors()
    if shards == 1:
        save_file(everything, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(everything.items())[number::shards])
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
