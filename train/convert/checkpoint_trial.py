"""Tests how transformers loads a checkpoint: `python -m train.convert.checkpoint_trial FOLDER ARCH`.

It builds the architecture of config.json on the meta device, and passes the names and shapes of the stored tensors
through transformers' renamings and conversions; no tensor is allocated or read. Then it compares the tokenizer that
transformers loads with tokenizer.json itself.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto import tokenization_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from runtime.processes.kernel import Bounds
from weights.format.layout import Layout

CPU_S, MEMORY_BYTES = 1200, 8 << 30
MOST_ADDED = 65_536
# Parts that wrappers add to names: torch.compile, FSDP, activation checkpointing, DDP, Lightning, peft.
_WRAPPERS = re.compile(
    r"(^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|module|base_layer)(?=\.)"
)
_PEFT, _INNER = "base_model.model.", re.compile(r"(^|\.)language_model(?=\.)")
# Layers for speculative decoding, which engines ignore if config.json declares them.
_SPECULATION = re.compile(r"(^|\.)(?:mtp|mtp_\w+|nextn\w*)\.")
_OF_EMBEDDINGS = re.compile(r"(^|\.)(?:pooler|lm_head|cls|score|classifier)\.")
_FLOATS = ("BF16", "F16", "F32", "F64")
_QUANTISED_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
# Texts with single and double spaces, lines, indentation, CJK, emoji; in Unicode's composed form.
TEXTS = (
    "Hello big wide world, it's 12:30.",
    "def f(x):\n    return x + 1\n\n\tdone  twice",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \ud55c\uad6d\uc5b4 \u65e5\u672c\u8a9e",
    "caf\u00e9 \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 ok",
)


class Unfit(Exception):
    """No engine or rank can build the model or tokenizer from these files; the text says why."""


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    out, sys.stdout = sys.stdout, sys.stderr  # libraries may print to stderr
    path, arch = Path(sys.argv[1]), sys.argv[2]
    Bounds(CPU_S, MEMORY_BYTES).hold()
    try:
        tensors = compared(path, arch)
        answer = {"tensors": tensors, "tokenizer": read(path, tensors["rows"])}
    except Unfit as error:
        answer = {"unfit": str(error)[:400]}
    print(json.dumps(answer), file=out)


# --- tensors ----------------------------------------------------------------------------------------------------------


def compared(path: Path, arch: str) -> dict[str, Any]:
    """Return the result of `compare`. If comparing fails, refuse nothing; "unchecked" says why. Raises Unfit."""
    try:
        return compare(path, arch)
    except (Unfit, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - an untested architecture may raise anything
        reason = f"transformers failed to compare them: {type(error).__name__}: {str(error)[:200]}"
        return {"unchecked": reason, "renamed": {}, "rows": 0}


def compare(path: Path, arch: str) -> dict[str, Any]:
    """Return the differences between the tensors in `path` and the architecture. Raises Unfit.

    renamed: stored name -> the name without wrappers. missing, unknown: names of tensors. shapes: [name, stored shape,
    expected shape]. tied: stored [head, embedding] pairs that the config ties. plain: whether config.json describes a
    quantisation that the tensors do not have. head, embedding: names of these tensors in the architecture, "" without
    one. rows: number of rows of the embedding. unchecked: why nothing was compared; "" if tensors were compared.
    """
    model, unchecked = _built(path, arch)
    if model is None:
        return {"unchecked": unchecked, "renamed": {}, "rows": 0}
    stored = {placed.spec.name: placed.spec for placed in Layout.read(path)}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = embedding.weight.shape[0] if embedding is not None else 0
    quantised = _is_quantised(path)
    if quantised and any(spec.dtype not in _FLOATS for spec in stored.values()):
        unchecked = "they are quantised, by names and shapes of their format"
        return {"unchecked": unchecked, "renamed": {}, "rows": rows}
    is_whole = not arch.endswith("Model")
    names = _names(model, stored, is_whole=is_whole)
    shapes = {names.get(name, name): spec.shape for name, spec in stored.items()}
    with torch.device("meta"):
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    named = {module: name for name, module in model.named_modules()}
    report = {"unchecked": "", "rows": rows, "head": named.get(head, ""), "embedding": named.get(embedding, "")}
    tied = dict(model.all_tied_weights_keys)
    differs = _loaded(model, tensors, is_whole=is_whole)
    report |= differs | {"plain": quantised and not any(differs.values())}
    for target, source in tied.items():
        if target in shapes and source not in shapes:
            names[next(name for name in stored if names.get(name, name) == target)] = source
    report["tied"] = [[target, source] for target, source in tied.items() if target in shapes and source in shapes]
    return report | {"renamed": {name: new for name, new in names.items() if name != new}}


def _built(path: Path, arch: str) -> tuple[Any, str]:
    """Return the model without weights; or None and the reason, if transformers lacks it or cannot build it here.
    Raises Unfit."""
    model_type = json.loads((path / "config.json").read_bytes()).get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        return None, f"transformers {transformers.__version__} does not know the model_type {str(model_type)[:80]!r}"
    cls = getattr(transformers, arch, None)
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - each configuration class has its own errors
        raise Unfit(f"transformers cannot read it: {type(error).__name__}: {error}") from error
    if cls is None:
        cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if cls is None or not issubclass(cls, transformers.PreTrainedModel):
        return None, f"transformers {transformers.__version__} does not know the architecture {arch}"
    if cls.config_class is not None and not isinstance(config, cls.config_class):
        parts = [part for part in vars(config).values() if isinstance(part, cls.config_class)]
        if not parts:
            return None, f"in transformers {arch} does not belong to the model_type {str(model_type)[:80]!r}"
        config = parts[0]
    for part in (config, config.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    try:
        with torch.device("meta"):
            return cls._from_config(config, attn_implementation="eager", dtype=torch.bfloat16), ""
    except (ImportError, OSError, NotImplementedError) as error:
        return None, f"transformers cannot build {arch} here: {str(error)[:200]}"
    except Exception as error:  # noqa: BLE001 - models raise anything for sizes that do not fit
        raise Unfit(f"transformers cannot build {arch} from it: {type(error).__name__}: {error}") from error


def _names(model: Any, stored: Collection[str], *, is_whole: bool) -> dict[str, str]:
    """Return {stored name: new name} for names that contain a wrapper's parts or lack the base model's prefix."""
    expected, conversions = dict.fromkeys(model.state_dict(), True), get_model_conversion_mapping(model)
    renamings, converters = ([c for c in conversions if isinstance(c, k)] for k in (WeightRenaming, WeightConverter))
    prefix = model.base_model_prefix
    # Parts of a multimodal model are stored without the prefix (multi_modal_projector, vision_tower).
    is_whole = is_whole and model.config.get_text_config() is model.config

    def leads(name: str, *base: Any) -> bool:
        """Whether transformers loads `name`; with `base`, also by adding or removing the base model's prefix."""
        return name in expected or rename_source_key(name, renamings, converters, *base)[0] in expected

    names = {}
    for name in stored:
        options = [name, *_candidates(name)]
        # For a whole model, engines neither add nor remove the prefix.
        exact = [*options, *(f"{prefix}.{option}" for option in options)] if is_whole else []
        found = next((option for option in exact if leads(option)), None)
        found = found or next((option for option in options if leads(option, prefix, expected)), name)
        # A name is given to one tensor only; a second tensor for it counts as unknown.
        if found != name and found not in stored and found not in names.values():
            names[name] = found
    return names


def _candidates(name: str) -> Iterable[str]:
    """Yield the name without parts that wrappers add, the smallest change first."""
    plain, before = name, ""
    while plain != before:
        before, plain = plain, _WRAPPERS.sub("", plain).removeprefix(".").removeprefix(_PEFT)
    yield plain
    yield plain.removeprefix("model.")
    yield _INNER.sub("", plain).removeprefix(".")
    yield _INNER.sub("", plain.removeprefix("model.")).removeprefix(".")


def _loaded(model: Any, tensors: Mapping[str, Any], *, is_whole: bool) -> dict[str, Any]:
    buffers = {name for name, _ in model.named_buffers()}
    config = LoadStateDictConfig(device_map={"": "meta"}, weight_mapping=get_model_conversion_mapping(model))
    info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), config)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    missing = sorted(info.missing_keys - buffers)
    settings = {**model.config.to_dict(), **model.config.get_text_config().to_dict()}
    speculates = any(value for key, value in settings.items() if "nextn" in key or "mtp" in key)
    unknown = sorted(name for name in info.unexpected_keys if not (speculates and _SPECULATION.search(name)))
    if not is_whole:
        missing, unknown = ([n for n in some if not _OF_EMBEDDINGS.search(n)] for some in (missing, unknown))
    return {
        "missing": missing,
        "unknown": unknown,
        "shapes": [[name, list(was), list(expected)] for name, was, expected in sorted(info.mismatched_keys)],
        "unconvertible": sorted(info.conversion_errors),
    }


def _is_quantised(path: Path) -> bool:
    own = json.loads((path / "config.json").read_bytes())
    parts = [own, *(part for part in own.values() if isinstance(part, dict))]
    described = any(part.get("quantization_config") or part.get("compression_config") for part in parts)
    return described or any((path / name).is_file() for name in _QUANTISED_FILES)


# --- tokenizer --------------------------------------------------------------------------------------------------------


def read(path: Path, rows: int) -> dict[str, Any]:
    """Return facts about the tokenizer that transformers loads. rows: embedding rows, 0 if unknown. Raises Unfit.

    added: added tokens and their ids. special: token and id of each role. beyond: [token, id] pairs without a row in
    the embedding. begins: whether every text begins with the BOS token. differs: a text that the loaded class tokenizes
    differently from tokenizer.json, "" if none. mended: whether PreTrainedTokenizerFast agrees with tokenizer.json.
    generation: why generation_config.json cannot be read, "" if it can.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - each tokenizer has errors of its own
        raise Unfit(f"the tokenizer cannot be loaded: {type(error).__name__}: {error}") from error
    file, report = path / "tokenizer.json", {"differs": "", "class": type(tokenizer).__name__, "mended": False}
    try:
        plain = Tokenizer.from_file(str(file)) if file.is_file() else None
    except Exception as error:  # noqa: BLE001 - the library raises nothing more specific
        print(f"nothing to compare the tokenizer with: {error}", file=sys.stderr)
        plain = None
    if plain is not None and (text := _differs(tokenizer, plain)):
        report["differs"] = text
        # As if tokenizer_config.json named this class; for some families transformers still uses a class of its own.
        settings = tokenization_auto.get_tokenizer_config(path) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        try:
            with patch.object(tokenization_auto, "get_tokenizer_config", lambda *_, **__: settings):
                other = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            if not _differs(other, plain):
                report["mended"], tokenizer = True, other
        except Exception as error:  # noqa: BLE001 - as above
            print(f"not loaded by the plain class: {error}", file=sys.stderr)
    ids = tokenizer.get_vocab()
    # The library gives an added token another id if smaller ids are unused.
    claimed = json.loads(file.read_bytes()).get("added_tokens") if file.is_file() else None
    ids |= {token["content"]: token["id"] for token in claimed or ()}
    beyond = sorted((number, token) for token, number in ids.items() if rows and number >= rows)
    roles = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {role: str(token) for role in roles if (token := getattr(tokenizer, role, None)) is not None}
    added = sorted(tokenizer.get_added_vocab().items(), key=lambda item: item[1])
    first, generation = tokenizer("a")["input_ids"][:1], ""
    try:
        GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # other checks report a file that is missing or not JSON
        pass
    except Exception as error:  # noqa: BLE001 - its values may raise anything
        generation = f"{type(error).__name__}: {str(error)[:200]}"
    return report | {
        "added": dict(added[-MOST_ADDED:]),
        "special": {role: [token[:200], ids.get(token)] for role, token in special.items()},
        "beyond": [[token[:200], number] for number, token in beyond],
        "generation": generation,
        "begins": tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id],
    }


def _differs(tokenizer: Any, plain: Any) -> str:
    """Return a text that `tokenizer` encodes or decodes differently from tokenizer.json (`plain`); "" if none."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        return ""
    special = [token.content for token in plain.get_added_tokens_decoder().values()]
    for text in (*TEXTS, *(f"{token}user\nWhat is it?{token}\nA cat." for token in special[:2])):
        theirs, ours = (each.encode(text, add_special_tokens=False).ids for each in (plain, inner))
        if theirs != ours or plain.decode(theirs) != inner.decode(ours):
            return text
    return ""


if __name__ == "__main__":
    main()
