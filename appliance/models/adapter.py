"""Reads a LoRA adapter's directory, as peft writes it, and checks that engines can serve it. Nothing is loaded.

vLLM itself (vllm/lora/peft_helper.py) refuses a bad adapter only at the first request, as if it did not exist; these
checks run at the import.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from appliance.models.checkpoint import ADAPTER_WEIGHTS_FILE as WEIGHTS_FILE
from appliance.models.checkpoint import INDEX_SUFFIX, WEIGHT_SUFFIX, chat_templates, check_header, regular
from appliance.models.errors import AdapterRefused
from serve.core.sizing import ADAPTER_MODULES
from weights.checkpoint.folder import ADAPTER_CONFIG_FILE as CONFIG_FILE
from weights.checkpoint.folder import NotACheckpoint, PickleRefused, read_json
from weights.format.layout import Layout, Placed

_PICKLE, _KEPT = "adapter_model.bin", ("README.md",)
_LAYER = re.compile(r"\^?[A-Za-z0-9_.]{1,200}")
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# Initializations that leave the base unchanged. Others, such as PiSSA, OLoRA, CorDA and LoftQ, need a changed base.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
_MORE_THAN_FACTORS = {
    "use_dora": "DoRA",
    "lora_bias": "biases in the factors",
    "modules_to_save": "whole modules in addition to the factors",
    "trainable_token_indices": "embeddings of its own for some tokens",
    "target_parameters": "factors on parameters (experts) and not on layers",
    "layer_replication": "repeated layers",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "use_bdlora": "block-diagonal factors",
    "use_qalora": "QA-LoRA",
}


def is_adapter(directory: Path) -> bool:
    """Whether this directory has an adapter and no whole model."""
    return names_adapter(os.listdir(directory))


def names_adapter(names: Collection[str]) -> bool:
    """Whether files of these names are an adapter and no whole model. Trainers also add the base's config.json; some
    add the whole model."""
    whole = any(name.endswith((WEIGHT_SUFFIX, INDEX_SUFFIX)) and name != WEIGHTS_FILE for name in names)
    return CONFIG_FILE in names and not whole


def files_of(where: str, names: Collection[str]) -> set[str]:
    """Return the files of an adapter's directory or repository to import. Raises NotACheckpoint, PickleRefused."""
    if WEIGHTS_FILE not in names:
        if _PICKLE in names:
            raise PickleRefused(
                _PICKLE,
                "the weights are pickles, which can run any code when loaded and are never opened here. Convert them "
                "where you trust them: peft's `PeftModel.save_pretrained(DIR)` writes safetensors",
            )
        raise NotACheckpoint(WEIGHTS_FILE, f"not in {where}; an adapter has {CONFIG_FILE} and {WEIGHTS_FILE}")
    return {name for name in (CONFIG_FILE, WEIGHTS_FILE, *_KEPT) if name in names}


def choose_files(directory: Path) -> dict[str, Path]:
    """Return the adapter's files by name. Other files, such as a tokenizer, are left out, because engines use the
    base's files. Raises NotACheckpoint, PickleRefused, UnsafeLink."""
    taken = {name: regular(directory, name) for name in sorted(files_of(str(directory), os.listdir(directory)))}
    check_header(taken[WEIGHTS_FILE], WEIGHTS_FILE)
    return taken


def read_base(directory: Path) -> str:
    """Return the base that the adapter's config names, "" if it names none. Raises NotACheckpoint, UnsafeLink."""
    config = read_json(regular(directory, CONFIG_FILE), CONFIG_FILE)
    named = config.get("base_model_name_or_path")
    return named if isinstance(named, str) else ""


def template_note(directory: Path, base: str, base_path: Path) -> list[str]:
    """Return a note if the adapter has another chat template than its base, whose template engines use. Raises
    NotACheckpoint."""
    own, _ = chat_templates(directory)
    if own is None or own == chat_templates(base_path)[0]:
        return []
    return [
        f"its directory has another chat template than {base}. It is not imported: engines use the template of "
        "the base. If the adapter was trained with its own, merge it (peft's `merge_and_unload`) and import the result"
    ]


def examine(directory: Path, layout: Layout, *, base: str, base_layout: Layout, rank_limit: int) -> int:
    """Check the adapter in `directory`, whose tensors are `layout`, against its base; return its highest rank.
    `rank_limit`: highest rank that the base's engines take; 0: the engines take no adapters. Raises AdapterRefused,
    NotACheckpoint."""
    config = read_json(directory / CONFIG_FILE, CONFIG_FILE)
    _refuse_kind(config)
    if rank_limit == 0:
        raise AdapterRefused("", f"engines of {base} take no adapters: merge it into the base and import the result")
    rank = config.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise AdapterRefused(CONFIG_FILE, "r must be an integer of at least 1")
    for name, kinds, least in (("rank_pattern", (int,), 1), ("alpha_pattern", (int, float), -math.inf)):
        # peft reads these keys as regular expressions; a hostile one could block an engine for all users of the base.
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(
            _LAYER.fullmatch(key) and type(n) in kinds and n >= least for key, n in pattern.items()
        ):
            numbers = "integers of at least 1" if name == "rank_pattern" else "numbers"
            raise AdapterRefused(
                CONFIG_FILE,
                f"{name} is {str(pattern)[:80]}; expected {numbers} by layer name or by the end of a layer name",
            )
    ranks = [rank, *(config.get("rank_pattern") or {}).values(), *_pairs(layout, base, base_layout)]
    if max(ranks) > rank_limit:
        raise AdapterRefused(
            CONFIG_FILE,
            f"the adapter has rank {max(ranks)}, engines of {base} take at most {rank_limit}: increase [serve] "
            "adapter_max_rank, or merge it into the base and import the result",
        )
    return max(ranks)


def _refuse_kind(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterRefused(CONFIG_FILE, f"peft_type is {str(kind)[:40]!r}; engines serve only LORA")
    for key, extra in _MORE_THAN_FACTORS.items():
        if config.get(key):
            raise AdapterRefused(
                CONFIG_FILE,
                f"{key} is set: the adapter has {extra}, which engines do not serve. Merge it into its base "
                "(peft's `merge_and_unload`) and import the result",
            )
    if config.get("bias", "none") != "none":
        raise AdapterRefused(
            CONFIG_FILE, f"bias is {str(config['bias'])[:40]!r}; engines serve adapters without biases"
        )
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        raise AdapterRefused(
            CONFIG_FILE,
            f"init_lora_weights is {start[:40]!r}: it needs a base that this initialization changed. Convert it with "
            "peft's path_initial_model_for_weight_conversion, or merge it and import the result",
        )
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise AdapterRefused(CONFIG_FILE, "lora_alpha must be a number")


def _pairs(layout: Layout, base: str, base_layout: Layout) -> list[int]:
    """Return the ranks of all pairs of factors. Raises AdapterRefused with the first tensor that does not fit."""
    by_name, ranks = {placed.spec.name: placed for placed in layout}, []
    for name, placed in by_name.items():
        module, _, kind = name.rpartition(".lora_")
        if f".lora_{kind}" not in (_DOWN, _UP) or not module.startswith(_PREFIX):
            raise AdapterRefused(name, f"is not a factor of a layer ({_PREFIX}….lora_A.weight, ….lora_B.weight)")
        twin = by_name.get(module + (_UP if f".lora_{kind}" == _DOWN else _DOWN))
        if twin is None:
            raise AdapterRefused(name, "the other factor of its layer is missing")
        if f".lora_{kind}" == _DOWN:
            ranks.append(_check_pair(module.removeprefix(_PREFIX), placed, twin, base, base_layout))
    if not ranks:
        raise AdapterRefused(WEIGHTS_FILE, "has no factors")
    return ranks


def _check_pair(module: str, down: Placed, up: Placed, base: str, base_layout: Layout) -> int:
    if module.rpartition(".")[2] not in ADAPTER_MODULES:
        raise AdapterRefused(
            down.spec.name, f"engines take adapters only on {', '.join(ADAPTER_MODULES)}, not on {module}: merge it"
        )
    if len(down.spec.shape) != 2 or len(up.spec.shape) != 2 or down.spec.shape[0] != up.spec.shape[1]:
        raise AdapterRefused(
            down.spec.name, f"shapes {list(down.spec.shape)} and {list(up.spec.shape)} are not a pair of factors"
        )
    if f"{module}.weight" in base_layout:
        outer, inner = base_layout.find(f"{module}.weight").spec.shape
        if (up.spec.shape[0], down.spec.shape[1]) != (outer, inner):
            raise AdapterRefused(
                down.spec.name,
                f"fits a layer with {down.spec.shape[1]} inputs and {up.spec.shape[0]} outputs; in {base} it has "
                f"{inner} and {outer}. If it is an adapter of another model, give that model with --base",
            )
    elif not any(placed.spec.name.startswith(f"{module}.") for placed in base_layout):  # quantised
        raise AdapterRefused(down.spec.name, f"{base} has no layer {module}: give the adapter's own base with --base")
    return down.spec.shape[0]
