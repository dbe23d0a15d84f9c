"""Reads a checkpoint directory: the checkpoint's files and their contents. Nothing is loaded or executed.

A checkpoint is what `transformers` writes for a text model: config.json, a tokenizer, and safetensors (one file, or
several with an index). `weights.format.layout` validates the headers of the weight files.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from appliance.models.errors import MissingTokenizer
from serve.core.parsers import PARSER_TOKENS, missing_tokens, parser_of_calls, reasoning_parser
from weights.checkpoint.folder import (
    ADAPTER_CONFIG_FILE,
    MAX_CONFIG_BYTES,
    PICKLES,
    PROCESSOR_FILES,
    CheckpointRefused,
    NotACheckpoint,
    PickleRefused,
    UnsafeLink,
    UnsupportedModel,
    check_folder,
    read_json,
    read_tokenizer_config,
    tokens_of,
)
from weights.format.foreign_json import size, text_part, weight_bits
from weights.format.layout import FileLayout, Layout, read_index
from weights.format.manifest import AUX_SUFFIXES
from weights.format.names import MANIFEST_FILE, has_tokenizer
from weights.format.tool_template import with_tools

Task = Literal["generate", "embed"]

WEIGHT_SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
# Formats that the box's versions of vLLM and DeepSpeed do not read.
OTHER_WEIGHTS = (".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz")
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
KEPT_TEXT = ("README.md",)
# Files in which processors keep a chat template of their own, which engines prefer for requests without tools.
PROCESSORS = ("chat_template.json", *PROCESSOR_FILES)
MAX_TEMPLATES = 8
# The box writes the first itself; the second would make transformers add an adapter to the model; vLLM would read the
# third instead of config.json if weights are called consolidated*.safetensors; the last refers to another model, an
# audio tokenizer.
_NEVER_TAKEN = (MANIFEST_FILE, ADAPTER_CONFIG_FILE, "params.json", "audio_tokenizer_config.json")
_HEADS = ("Classification", "RewardModel", "QuestionAnswering")
TRAINED_FORM = "compressed-tensors"
"""The format (quant_method) of quantised weights on which adapters can be trained."""
_CLASS_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a checkpoint. `params`: number of weights; `info`: further facts for people."""

    params: int
    arch: str = ""
    task: Task = "generate"
    max_model_len: int | None = None
    warnings: Sequence[str] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


def choose_files(directory: Path) -> dict[str, Path]:
    """Return the checkpoint's files in `directory`, by name. Subdirectories, code and other formats are left out.

    A symlink is followed if it ends inside the directory, or in the `blobs` of the hub cache that contains the
    directory (as `huggingface_hub` lays out `snapshots/<revision>`). Raises NotACheckpoint, PickleRefused, UnsafeLink,
    IntegrityError.
    """
    names = sorted(os.listdir(directory))
    weights = _weight_files(directory, names)
    taken: dict[str, Path] = {}
    for name in names:
        is_taken = name in weights or name in KEPT_TEXT or (name.endswith(AUX_SUFFIXES) and name not in _NEVER_TAKEN)
        is_taken = is_taken and not name.startswith(".") and not (directory / name).is_dir()
        if name.endswith(INDEX_SUFFIX):
            is_taken = name == f"model{INDEX_SUFFIX}"
        if is_taken:
            taken[name] = regular(directory, name)
    for name in sorted(weights):
        if name not in taken:
            raise NotACheckpoint(name, f"listed in model{INDEX_SUFFIX} but not in {directory}: the copy is incomplete")
        check_header(taken[name], name)
    if "config.json" not in taken:
        raise NotACheckpoint("config.json", f"not in {directory}; expected a Hugging Face checkpoint directory")
    return taken


def check_header(path: Path, name: str) -> None:
    """Refuse a hostile or damaged safetensors file before its bytes are copied. Raises IntegrityError."""
    with path.open("rb") as file:
        FileLayout.read(file, path=path.parent, name=name)


def _weight_files(directory: Path, names: list[str]) -> frozenset[str]:
    if f"model{INDEX_SUFFIX}" in names:
        path = regular(directory, f"model{INDEX_SUFFIX}")
        single, shards = f"model{WEIGHT_SUFFIX}", sorted({*read_index(path.parent, path.name).values()})
        if single in names and single not in shards:
            raise NotACheckpoint(
                f"model{INDEX_SUFFIX}",
                f"lists {shards[0]}{' and others' if len(shards) > 1 else ''}, but there is a {single} too, which "
                f"transformers would load instead. Remove {single}, or model{INDEX_SUFFIX} with its files",
            )
        return frozenset(shards)
    tensors = [name for name in names if name.endswith(WEIGHT_SUFFIX) and not name.startswith(".")]
    if tensors == [ADAPTER_WEIGHTS_FILE]:
        raise NotACheckpoint(
            ADAPTER_WEIGHTS_FILE,
            f"the weights of an adapter without {ADAPTER_CONFIG_FILE}: copy that file too, and import the directory "
            "with --base",
        )
    tensors = [name for name in tensors if name != ADAPTER_WEIGHTS_FILE]
    if "model.safetensors" in tensors:
        return frozenset({"model.safetensors"})
    if len(tensors) == 1:
        return frozenset(tensors)
    if tensors:
        raise NotACheckpoint(
            f"model{INDEX_SUFFIX}",
            f"missing, but there are {len(tensors)} *{WEIGHT_SUFFIX} files: add the index that lists them",
        )
    raise no_weights(str(directory), names)


def no_weights(where: str, names: Collection[str]) -> CheckpointRefused:
    """Return the error for files without safetensors among them."""
    if pickles := sorted(name for name in names if name.endswith(PICKLES)):
        return PickleRefused(
            pickles[0],
            "the weights are pickles, which can run any code when loaded and are never opened here. Convert them "
            "where you trust them: `AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIR)` writes safetensors",
        )
    others = sorted(name for name in names if name.endswith(OTHER_WEIGHTS))
    hint = f"; {others[0]} is another format" if others else ""
    return NotACheckpoint("", f"{where} has no *{WEIGHT_SUFFIX} file{hint}. Expected a Hugging Face checkpoint")


def regular(directory: Path, name: str) -> Path:
    """Return the regular file behind `name` in `directory`, resolving links. Raises UnsafeLink."""
    path = directory / name
    real = Path(os.path.realpath(path))
    if path.is_symlink():
        allowed = [directory.resolve()]
        if directory.resolve().parent.name == "snapshots":
            allowed.append(directory.resolve().parent.parent / "blobs")
        if not any(real.is_relative_to(root) for root in allowed):
            raise UnsafeLink(name, f"a symlink to {real}, outside of {directory}; replace it with the file itself")
    try:
        mode = real.stat().st_mode
    except OSError as error:
        raise UnsafeLink(name, f"cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise UnsafeLink(name, "not a regular file")
    return real


def examine(directory: Path, layout: Layout) -> Facts:
    """Read config and tokenizer of a `directory` of plain files whose weights are `layout`.

    Raises CheckpointRefused. Does not run the chat template; `trial` does.
    """
    check_folder(directory)
    config = read_json(directory / "config.json", "config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise NotACheckpoint("config.json", "'architectures' must be a list of class names such as LlamaForCausalLM")
    arch = architectures[0]
    task = _task(arch)
    text, family = text_part(config), config.get("model_type")
    warnings: list[str] = []
    if not has_tokenizer(directory):
        raise MissingTokenizer(
            "tokenizer.json",
            "missing, as are tokenizer.model and vocab.json with merges.txt; copy the tokenizer files of the base "
            "model into the directory",
        )
    template, _ = chat_templates(directory)
    if template is None and task == "generate":
        warnings.append(
            "there is no chat template: /v1/chat/completions refuses this model, and fine-tuning on chats cannot "
            "format them; use /v1/completions, or add chat_template.jinja to the checkpoint and import it again (for "
            "serving alone, `appliance model deploy NAME --chat-template FILE` is enough)"
        )
    shown, tokens = with_tools(template), tokens_of(directory, PARSER_TOKENS)
    calls = parser_of_calls(family, shown)
    if missing := missing_tokens(calls, tokens) if task == "generate" else ():
        warnings.append(
            f"tool calls are parsed only if a request requires or names a tool, not with tool_choice auto: the "
            f"tokenizer lacks {' and '.join(map(repr, missing))}, which this model's vLLM parser {calls} "
            "needs. Add them to tokenizer and embedding and import again, or choose another parser: `appliance model "
            "deploy NAME --tool-parser PARSER`"
        )
    quantization = config.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise NotACheckpoint("config.json", "'quantization_config' must be an object")
    form = str(quantization.get("quant_method", "unnamed"))[:64] if quantization else None
    if form not in (None, TRAINED_FORM):
        warnings.append(f"the weights are quantised ({form}), so the model cannot be fine-tuned")
    return Facts(
        arch=arch,
        task=task,
        params=_parameters(layout, quantization),
        max_model_len=size(text, "max_position_embeddings") or None,
        warnings=tuple(warnings),
        info={
            "model_type": family,
            "layers": size(text, "num_hidden_layers") or None,
            "hidden_size": size(text, "hidden_size") or None,
            "vocab_size": size(text, "vocab_size") or None,
            "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
            "dtypes": sorted({placed.spec.dtype for placed in layout}),
            "chat_template": template is not None,
            "tool_parser": None if missing_tokens(calls, tokens) else calls,
            "reasoning_parser": reasoning_parser(family, shown),
            "quantization": form,
        },
    )


def _parameters(layout: Layout, quantization: Mapping[str, Any]) -> int:
    """Count weights, without scales of quantised tensors; compressed-tensors packs several weights into 32 bits."""
    each = 32 // (weight_bits(quantization) or 32)
    return sum(
        placed.spec.numel * (each if placed.spec.name.endswith("_packed") else 1)
        for placed in layout
        if not placed.spec.name.endswith(("_scale", "_shape", "_zero_point", "_g_idx"))
    )


def _task(arch: str) -> Task:
    if not _CLASS_NAME.fullmatch(arch):
        raise NotACheckpoint("config.json", f"architecture {arch[:80]!r} is not a class name")
    if arch.endswith(_HEADS):
        raise UnsupportedModel(
            "config.json",
            f"architecture {arch} outputs numbers or labels, which the box neither serves nor trains. A generative "
            "model can give rewards and labels as a grader (score_model, label_model), and label an answer with a "
            "response_format",
        )
    if arch.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")):
        return "generate"
    if arch.endswith("Model"):
        return "embed"
    raise UnsupportedModel(
        "config.json", f"architecture {arch} is neither generative (…ForCausalLM) nor an embedding model (…Model)"
    )


def chat_templates(directory: Path) -> tuple[str | None, tuple[str, ...]]:
    """Return the template for plain conversations, and all other templates that transformers or vLLM may use: named
    ones (`tool_use`) and those of processors. Raises NotACheckpoint."""
    templates: list[str] = []
    path = directory / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise NotACheckpoint(path.name, f"{path.stat().st_size} bytes; at most {MAX_CONFIG_BYTES} are read")
        try:
            templates.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise NotACheckpoint(path.name, f"not UTF-8: {error.reason} at byte {error.start}") from error
    templates += _named_templates(read_tokenizer_config(directory).get("chat_template"), "tokenizer_config.json")
    for name in PROCESSORS:
        if (directory / name).is_file():
            body = read_json(directory / name, name)
            templates += _named_templates(body.get("chat_template"), name)
    different = list(dict.fromkeys(templates))
    if len(different) > MAX_TEMPLATES:
        raise NotACheckpoint("", f"there are {len(different)} chat templates; at most {MAX_TEMPLATES} are accepted")
    first, others = next(iter(different), None), tuple(different[1:])
    return (first if first and first.strip() else None), others


def _named_templates(field: Any, file: str) -> list[str]:
    """Return the templates, the template for plain conversations first; `chat_template` has one, or several by name."""
    if field is None:
        return []
    if isinstance(field, str):
        return [field]
    if isinstance(field, list) and all(isinstance(entry, dict) for entry in field):
        named = {str(entry.get("name")): entry.get("template") for entry in field}
    else:
        named = field if isinstance(field, dict) else {"": None}
    texts = [text for _, text in sorted(named.items(), key=lambda entry: entry[0] != "default")]
    if not all(isinstance(text, str) for text in texts):
        raise NotACheckpoint(file, "'chat_template' must be a text, or texts by name")
    return texts
