"""Converts a GGUF file to a checkpoint directory, in a process of its own: `python -m train.convert.gguf FILE OUT`.

GGUF is llama.cpp's format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). transformers reads and
dequantises it (https://huggingface.co/docs/transformers/gguf); the result is bfloat16 safetensors and a fast tokenizer,
which engines and trainers load like any other checkpoint. The file is untrusted: this process has a memory limit and
runs no code of the file; the caller tries the chat template separately.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from runtime.processes.kernel import Bounds

MAGIC = b"GGUF"
_FIXED_BYTES = 2 << 30  # memory for torch, transformers and one tensor in float32
_AVAILABLE_SHARE = 0.9
_HEADER_CPU_S, _BYTES_PER_CPU_S = 300, 500_000  # CPU-time limit; so many bytes usually take 0.1 s


class _Refused(Exception):
    """The file cannot become a checkpoint; the text says why."""


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def main(file: Path, out: Path) -> None:
    sys.stdout = sys.stderr  # libraries may print to stderr
    available = psutil.virtual_memory().available
    most = int(_AVAILABLE_SHARE * available)
    Bounds(_HEADER_CPU_S + file.stat().st_size // _BYTES_PER_CPU_S, most).hold()
    try:
        needed = 2 * 2 * _parameters(file) + _FIXED_BYTES  # bfloat16, for the tensors read and the model
        if needed > most:
            _say("done", needed_bytes=needed, available_bytes=available)
            return
        with tempfile.TemporaryDirectory(dir=out.parent) as alone:
            # Link the file into an empty directory: transformers would read a tokenizer_config, which may name code,
            # from the file's own directory.
            (Path(alone) / file.name).symlink_to(file.resolve())
            _say("done", **_convert(Path(alone) / file.name, out))
    except _Refused as error:
        _say("done", refused=str(error))


def _parameters(file: Path) -> int:
    """Return the model's number of parameters. Raises _Refused."""
    try:
        reader = _reader(file)
        fields = map(reader.get_field, ("split.count", "general.type"))
        parts, kind = (None if field is None else field.contents() for field in fields)
        count = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except Exception as error:  # noqa: BLE001 - broken files raise anything
        raise _Refused(f"is not a valid GGUF file: {type(error).__name__}: {str(error)[:200]}") from error
    if parts is not None and int(parts) > 1:
        raise _Refused(f"is one of {parts} parts; join them (`llama-gguf-split --merge`) and import the result")
    if kind not in (None, "model"):
        raise _Refused(f"holds a {str(kind)!r}, not a model")
    return count


def _convert(file: Path, out: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
    from transformers.utils import logging

    logging.set_verbosity_error()
    modeling_gguf_pytorch_utils.tqdm = _with_progress  # the only sign of progress for the caller
    _read_head_sizes()
    reader = _reader(file)
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place, trust_remote_code=False)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            **place,
            dtype=torch.bfloat16,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as error:  # noqa: BLE001 - as above
        raise _Refused(f"cannot be read by transformers: {type(error).__name__}: {str(error)[:300]}") from error
    if wrong := sorted({*loaded["missing_keys"], *map(str, loaded["mismatched_keys"])}):
        raise _Refused(f"lacks a matching tensor for {', '.join(wrong[:3])} ({len(wrong)} in all); is it damaged?")
    _scale_gemma(model.config)
    scaled = next((tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    if scaled is not None:
        model.config.rope_parameters = _llama3_rope(model.config, [float(factor) for factor in scaled.data.ravel()])
    # The model is no longer quantised, and the quantiser would refuse to save it.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {"parameters": model.num_parameters(), "architecture": model.config.model_type}


def _read_head_sizes() -> None:
    """Make transformers read head sizes for which it would use a default, such as 128 for every Qwen3."""
    from transformers import CONFIG_MAPPING
    from transformers.integrations import GGUF_CONFIG_MAPPING

    known: dict[str, dict[str, Any]] = dict(GGUF_CONFIG_MAPPING)
    for name, fields in known.items():
        if name in CONFIG_MAPPING and hasattr(CONFIG_MAPPING[name](), "head_dim"):
            fields.setdefault("attention.key_length", "head_dim")


def _scale_gemma(config: Any) -> None:
    """Set `query_pre_attn_scalar`, which GGUF lacks, by the model's size, as llama.cpp does (`f_attention_scale` in
    src/models/gemma2.cpp and gemma3.cpp); transformers would use 256 for all sizes."""
    if config.model_type in ("gemma2", "gemma3_text"):
        is_27b = config.num_hidden_layers == {"gemma2": 46, "gemma3_text": 62}[config.model_type]
        heads = config.num_attention_heads
        config.query_pre_attn_scalar = config.hidden_size // heads if is_27b else config.head_dim


def _llama3_rope(config: Any, factors: Sequence[float]) -> dict[str, Any]:
    """Return the rotary scaling of Llama 3.1 and later, which GGUF stores as one factor per frequency and transformers
    ignores. The factors follow transformers' `_compute_llama3_parameters`."""
    plain = {**config.rope_parameters}
    rope = plain | {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for i, factor in enumerate(factors):
        wavelength = 2 * math.pi * plain["rope_theta"] ** (i / len(factors))
        smooth = min(max((8192 / wavelength - 1.0) / 3.0, 0.0), 1.0)
        expected = 1 / ((1 - smooth) / rope["factor"] + smooth)
        if not math.isclose(factor, expected, rel_tol=1e-3):
            raise _Refused(
                f"scales its rotary embedding differently from Llama 3.1 (frequency {i}: {factor:g}, expected "
                f"{expected:g}); import the model's safetensors instead"
            )
    return rope


def _reader(file: Path) -> Any:
    import gguf

    return gguf.GGUFReader(str(file))


def _with_progress(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
    tensors = list(tensors)
    for number, tensor in enumerate(tensors, 1):
        yield tensor
        if number == len(tensors) or number % 10 == 0:
            _say("progress", done=number, total=len(tensors))


def _say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event} | fields), flush=True, file=sys.__stdout__)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
