"""LoRA adapters as peft stores them: names, configuration, and the merge of a stored adapter into its base.

The layout is peft's own (`adapter_model.safetensors`, `adapter_config.json`; Hugging Face docs, "PEFT checkpoint
format"), so what is published here loads in peft, transformers and vLLM as it is.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.lora import LoraLayer
from peft.utils import load_peft_weights
from peft.utils.other import get_pattern_key
from transformers import PreTrainedModel

from runtime.devices.kinds import HOST_MEMORY
from train.plan.errors import UnsupportedModel

ADAPTER = "default"
STEM = "adapter_model"
CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."


def is_factor(name: str) -> bool:
    """Whether a parameter of a LoRA-wrapped model belongs to the adapter."""
    return ".lora_" in name


def stored_name(name: str) -> str:
    """peft's name on disk of the factor `name` (as `fragments.parameters` calls it)."""
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")


def config_json(config: LoraConfig, base_model: str) -> bytes:
    """adapter_config.json of a trained adapter; `base_model` is the base's public name."""
    fields = config.to_dict()
    fields |= {"base_model_name_or_path": base_model, "inference_mode": True}
    fields = {key: sorted(value) if isinstance(value, (set, frozenset)) else value for key, value in fields.items()}
    return json.dumps(fields, indent=2, default=str, sort_keys=True).encode()


@torch.no_grad()
def merge_into(model: PreTrainedModel, directory: str | Path) -> None:
    """Add the stored adapter's scaling * B @ A to the weights of `model`, in float32, in place.

    Raises UnsupportedModel when it does not belong to this model or is of a kind that is more than B @ A.
    """
    config = PeftConfig.from_pretrained(str(directory))
    if not isinstance(config, LoraConfig) or config.use_dora or config.bias != "none" or config.modules_to_save:
        raise UnsupportedModel(f"the adapter {directory} is not plain LoRA and cannot be merged")
    tensors = load_peft_weights(str(directory), device=HOST_MEMORY)
    weights = dict(model.named_parameters())
    for name in sorted(tensors):
        module, part, _ = name.removeprefix(_PREFIX).rpartition(".lora_A.weight")
        if not part:
            continue
        weight, up = weights.get(f"{module}.weight"), tensors.get(name.replace(".lora_A.", ".lora_B."))
        down = tensors[name]
        if weight is None or up is None or weight.shape != (up.shape[0], down.shape[1]):
            raise UnsupportedModel(f"{name} of the adapter {directory} does not fit the model it is merged into")
        rank = down.shape[0]
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, module), config.lora_alpha)
        scaling = alpha / (rank**0.5 if config.use_rslora else rank)
        weight.copy_(weight.float() + scaling * (up.float() @ down.float()))


def layers(module: torch.nn.Module) -> dict[str, LoraLayer]:
    """The LoRA layers inside `module` by their name in it."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
