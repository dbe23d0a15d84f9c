"""Loads the model to train: a Hugging Face causal language model with packed attention, optionally with LoRA.

An adapter on disk has peft's layout (`adapter_model.safetensors`, `adapter_config.json`; Hugging Face docs, "PEFT
checkpoint format"), so peft, transformers and vLLM load published adapters unchanged.
"""

from __future__ import annotations

import json
from contextlib import suppress

import torch
from peft import LoraConfig, PeftConfig, inject_adapter_in_model
from peft.utils import load_peft_weights
from peft.utils.other import get_pattern_key
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from runtime.devices.kind import HOST_MEMORY
from train.model import attention
from train.plan.errors import UnsupportedModel
from train.plan.spec import TrainSpec

# transformers' names of layer types that pass a state, besides keys and values, from token to token.
_KEEP_STATE = frozenset({"conv", "hybrid", "hybrid_sliding", "linear_attention"})
ADAPTER = "default"
STEM = "adapter_model"
CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."
LIGER_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # families whose gradients tests compare with torch's
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory, without running code from there. Raises UnsupportedModel."""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} has no tokenizer that can be loaded: {error}") from error


def load_model(spec: TrainSpec, *, weights: bool = True, sent: bool = False) -> PreTrainedModel:
    """Load the base model on the CPU, in the precision of training; trained parameters have `requires_grad`.

    Every rank gets the same bytes: LoRA is initialised from `spec.seed`. With `weights=False` trained parameters are
    undefined, because a snapshot will set them; with `sent` all parameters are undefined, because another rank will
    send them. Raises UnsupportedModel.
    """
    attention.register()
    transformers_logging.disable_progress_bar()
    try:
        model = _without_weights(spec, sent) if sent or (spec.full and not weights) else None
        empty = model is not None
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(
                spec.base_path,
                dtype=DTYPES[spec.precision],
                attn_implementation=attention.NAME,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"{spec.base_path} cannot be loaded as a causal language model: {error}") from error
    _refuse_unsupported(model)
    if _is_quantised(model.config):
        # compressed-tensors takes seconds to import, and few jobs need it.
        from train.model.quantised import keep_quantised  # noqa: PLC0415

        keep_quantised(model)
    _choose_experts(model)
    if spec.base_adapter is not None and not empty:
        merge_into(model, spec.base_adapter)
    model.config.use_cache = False
    if spec.kernels == "liger":
        use_liger(model)
    if spec.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if spec.full:
        model.requires_grad_(True)
    else:
        add_lora(model, spec)
        if spec.activation_checkpointing:
            model.enable_input_require_grads()
    model.train()
    return model


def _without_weights(spec: TrainSpec, sent: bool) -> PreTrainedModel | None:
    """Build the model with uninitialised parameters. None if weights must be loaded: if the model has state besides
    parameters, or if, with `sent`, loading decides which parameters exist or their precision."""
    config = AutoConfig.from_pretrained(spec.base_path, local_files_only=True, trust_remote_code=False)
    if _is_quantised(config):
        return None
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[spec.precision], attn_implementation=attention.NAME, trust_remote_code=False
        )
    # (A checkpoint may store separate tensors for parameters that the architecture ties.)
    if sent and (model._keep_in_fp32_modules_strict or model.get_expanded_tied_weights_keys(all_submodels=True)):
        return None
    model.tie_weights()
    # As loading does: publishing needs the conversions (train.state.publish), engines need the generation config.
    model._weight_conversions = get_model_conversion_mapping(model)
    with suppress(OSError):  # the directory has no generation config
        model.generation_config = GenerationConfig.from_pretrained(spec.base_path, local_files_only=True)
    persistent = model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return None if persistent else model


def _is_quantised(config: PretrainedConfig) -> bool:
    return getattr(config, "quantization_config", None) is not None


def use_liger(model: PreTrainedModel) -> None:
    """Replace norms, rotary embedding (for the whole process) and MLPs by Liger's fused kernels (Hsu et al., 2024),
    which store fewer activations and need a GPU. The output head has other kernels (train.methods.packed_objective).
    Raises UnsupportedModel for other families."""
    if model.config.model_type not in LIGER_FAMILIES:
        known = ", ".join(LIGER_FAMILIES)
        raise UnsupportedModel(f"kernels 'liger' supports {known}, not {model.config.model_type}; use 'torch'")
    # Liger takes a second to import, and few jobs need it.
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance  # noqa: PLC0415

    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)


def add_lora(model: PreTrainedModel, spec: TrainSpec) -> None:
    """Add LoRA layers (Hu et al., 2021; peft) to `model` in place and freeze everything else."""
    targets = list(spec.lora_targets) or linear_layers(model)
    # In some mixtures of experts (DeepSeek, GLM 4, Qwen3-Next) peft mistakes names of dense and shared MLPs for names
    # of experts, which they were in older checkpoints; here experts are fused.
    converted = LoraConfig(target_modules=targets)
    convert_peft_config_for_transformers(converted, model, None)
    if converted.target_parameters:
        left = sorted(converted.target_modules or ())
        if spec.lora_targets:
            raise UnsupportedModel(
                f"lora_targets {targets}: {', '.join(sorted(set(targets) - set(left)))} would also name experts of "
                f"{model.config.model_type}, which cannot have adapters; name other layers"
            )
        targets = left
    config = LoraConfig(
        r=spec.lora_rank,
        lora_alpha=spec.lora_alpha,
        lora_dropout=spec.lora_dropout,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(spec.seed)
    try:
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise UnsupportedModel(f"lora_targets {targets} do not match layers of the model: {error}") from error


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the last name components of all linear layers except the output head, as LoRA targets."""
    head = model.get_output_embeddings()
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        }
    )


# --- adapters


def is_factor(name: str) -> bool:
    """Whether a parameter of a LoRA-wrapped model belongs to the adapter."""
    return ".lora_" in name


def stored_name(name: str) -> str:
    """Return the name in peft's files for the factor `name` (as in `fragments.parameters`)."""
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")


def config_json(config: LoraConfig, base_model: str) -> bytes:
    """Return adapter_config.json for a trained adapter; `base_model` is the base's public name."""
    fields = config.to_dict()
    fields |= {"base_model_name_or_path": base_model, "inference_mode": True}
    fields = {key: sorted(value) if isinstance(value, (set, frozenset)) else value for key, value in fields.items()}
    return json.dumps(fields, indent=2, default=str, sort_keys=True).encode()


@torch.no_grad()
def merge_into(model: PreTrainedModel, directory: str) -> None:
    """Add the stored adapter's scaling * B @ A to the weights of `model`, in float32, in place. (peft's merge would
    import modules and match regular expressions that the adapter's untrusted configuration names.)

    Raises UnsupportedModel if the adapter does not belong to this model or is more than B @ A.
    """
    config = PeftConfig.from_pretrained(directory)
    if not isinstance(config, LoraConfig) or config.use_dora or config.bias != "none" or config.modules_to_save:
        raise UnsupportedModel(f"the adapter {directory} is not plain LoRA and cannot be merged")
    tensors = load_peft_weights(directory, device=HOST_MEMORY)
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


# --- facts about a model


def keeps_state(model: PreTrainedModel) -> bool:
    """Whether layers pass a state from token to token (mamba, gated delta nets, convolutions). Such a state crosses the
    bounds of examples, and ranks cannot share a row's tokens."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return bool(model._is_stateful) or not _KEEP_STATE.isdisjoint(kinds)


def checkpoint_name(name: str) -> str:
    """Return a parameter's name in the model's own checkpoint; `name` is from the (LoRA-wrapped) model."""
    return name.replace(".base_layer.", ".")


def _choose_experts(model: PreTrainedModel) -> None:
    """Compute experts one by one where torch's grouped matrix product, transformers' default, refuses rows that are not
    a multiple of 16 bytes. (Convolutions have three dimensions too, but other names.)"""
    experts = [p for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name]
    uneven = any(p.shape[-1] * p.element_size() % 16 for p in experts)
    if uneven and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def _refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel if packed attention would silently leave out a part of the model's attention."""
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None):
        raise UnsupportedModel(
            f"{config.model_type} caps its attention logits, which packed attention does not support"
        )
    if getattr(config, "index_topk", None):  # some families apply it only in the mask, which is not read
        raise UnsupportedModel(
            f"{config.model_type} attends to tokens that an indexer picks (DeepSeek's sparse attention), which "
            "packed attention does not support"
        )
    if not getattr(model, "_supports_sdpa", False):  # such a model would ignore packed attention
        raise UnsupportedModel(
            f"{config.model_type} does not compute its attention with torch's scaled_dot_product_attention (as models "
            "with attention sinks), which is all that packed attention replaces"
        )
