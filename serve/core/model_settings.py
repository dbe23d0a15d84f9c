"""Per-model engine settings that override the box's configuration, and the vLLM arguments that a model may set.

Only listed arguments are allowed, because most others give access to a file, socket, host, code, key or log. The error
for any other argument names the box's setting that replaces it, if there is one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from serve.core.config import EngineConfig

Parser = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
MAX_ARGUMENT_CHARACTERS = 2000
# vLLM 0.32's names of arguments whose values are numbers, words or JSON and affect only the computation.
ENGINE_ARGUMENTS = frozenset(
    (
        "async-scheduling attention-backend block-size chat-template-content-format disable-cascade-attn "
        "disable-chunked-mm-input disable-custom-all-reduce disable-sliding-window enable-dbo "
        "enable-expert-parallel enable-prefix-caching enforce-eager kv-sharing-fast-prefill limit-mm-per-prompt "
        "long-prefill-token-threshold mamba-cache-dtype mamba-ssm-cache-dtype max-num-batched-tokens "
        "optimization-level quantization stream-interval"
    ).split()
) | {"max-cudagraph-capture-size"}
_FEWER_BITS = ("--quantization", "--kv-cache-dtype", "--mamba-cache-dtype", "--mamba-ssm-cache-dtype")
# Arguments that a setting of the model or the box controls.
ELSEWHERE = {
    **{
        name: f"--{name}"
        for name in "max-model-len dtype kv-cache-dtype max-num-seqs reasoning-parser chat-template".split()
    },
    "kv-cache-memory-bytes": "--kv-cache-bytes",
    "gpu-memory-utilization": "--gpu-memory",
    **dict.fromkeys(("tool-call-parser", "enable-auto-tool-choice"), "--tool-parser"),
    **dict.fromkeys(("override-generation-config", "generation-config"), "--temperature and the like"),
    "speculative-config": "--draft",
    "tensor-parallel-size": "--tensor-parallel",
    **dict.fromkeys(("enable-lora", "max-loras"), "[serve] adapter_slots"),
    "max-lora-rank": "[serve] adapter_max_rank",
    "max-cpu-loras": "[serve] adapters_resident",
}


def in_fewer_bits(engine_arguments: Iterable[str]) -> bool:
    """Return whether weights, keys and values, or states are stored in fewer bits than in training. Such settings
    change answers by more than the fingerprint tolerance; kernel rounding changes them by less."""
    return any(argument.partition("=")[0] in _FEWER_BITS for argument in engine_arguments)


class Sampling(BaseModel):
    """Sampling defaults for requests; None: the default in the model's generation_config.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None


class ModelSettings(BaseModel):
    """Settings of one model; None or empty: use the box's configuration or the checkpoint's value.

    tool_parser: vLLM's parser name, or "none". chat_template: the template's text. draft_tokens: tokens guessed from
    n-grams in the prompt and verified together (n-gram speculation). engine_args: names and values as for `vllm serve`;
    true or false for a switch. Raises pydantic.ValidationError.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_model_len: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"] | None = None
    kv_cache_bytes: Annotated[int, Field(ge=1, le=1 << 50)] | None = None
    gpu_memory: Annotated[float, Field(gt=0, le=1)] | None = None
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | None = None
    tool_parser: Parser | None = None
    reasoning_parser: Parser | None = None
    chat_template: Annotated[str, Field(min_length=1, max_length=200_000)] | None = None
    system_prompt: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    sampling: Sampling = Sampling()
    draft_tokens: Annotated[int, Field(ge=1, le=32)] | None = None
    engine_args: Annotated[dict[str, str], Field(max_length=32)] = Field(default_factory=dict)

    @field_validator("chat_template")
    @classmethod
    def _a_template(cls, text: str | None) -> str | None:
        # if the template is a file path, vLLM would open that file
        if text is not None and "{{" not in text and "{%" not in text:
            raise ValueError("is not a Jinja template: it has neither '{{' nor '{%'")
        return text

    @field_validator("engine_args")
    @classmethod
    def _allowed(cls, arguments: dict[str, str]) -> dict[str, str]:
        allowed = {}
        for name, value in arguments.items():
            key = name.removeprefix("--").replace("_", "-")
            if key in ELSEWHERE:
                raise ValueError(f"{name[:100]!r} is set by {ELSEWHERE[key]}")
            if key not in ENGINE_ARGUMENTS:
                raise ValueError(
                    f"{name[:100]!r} may not be set for a model; allowed: {', '.join(sorted(ENGINE_ARGUMENTS))}"
                )
            if len(value) > MAX_ARGUMENT_CHARACTERS or not value.isprintable():
                raise ValueError(f"the value of {key} must be printable, at most {MAX_ARGUMENT_CHARACTERS} characters")
            allowed[key] = value
        return allowed

    @property
    def digest(self) -> str:
        """Return the hash that identifies these settings; "" if none is set. Equal settings have equal hashes."""
        settings = self.as_json()
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12] if settings else ""

    def as_json(self) -> dict[str, Any]:
        """Return the settings that are set, as JSON values."""
        body = self.model_dump(exclude_none=True)
        return {name: value for name, value in body.items() if value not in ({}, "")}

    @property
    def batched_tokens(self) -> int | None:
        """Return the number of tokens per batch; None if not set."""
        text = self.engine_args.get("max-num-batched-tokens", "")
        return int(text) if text.isascii() and text.isdigit() else None

    def config(self, box: EngineConfig) -> EngineConfig:
        """Return the box's configuration, overridden by this model's settings."""
        own = {
            "max_model_len": self.max_model_len,
            "kv_cache_bytes": self.kv_cache_bytes,
            "gpu_memory_fraction": self.gpu_memory,
            "max_num_seqs": self.max_num_seqs,
        }
        return box.model_copy(update={name: value for name, value in own.items() if value is not None})

    def spec_fields(self) -> dict[str, Any]:
        """Return the fields of a ReplicaSpec that derive from neither `config` nor the engine's size."""
        args = []
        if self.kv_cache_dtype is not None:
            args.append(f"--kv-cache-dtype={self.kv_cache_dtype}")
        sampling = self.sampling.model_dump(exclude_none=True)
        if sampling:
            if "max_tokens" in sampling:
                sampling["max_new_tokens"] = sampling.pop("max_tokens")
            args.append(f"--override-generation-config={json.dumps(sampling)}")
        if self.draft_tokens is not None:
            guess = {"method": "ngram", "num_speculative_tokens": self.draft_tokens, "prompt_lookup_max": 4}
            args.append(f"--speculative-config={json.dumps(guess)}")
        for name, value in self.engine_args.items():
            # Join name and value with "=", so that no value can act as an option.
            switch = {"true": f"--{name}", "false": f"--no-{name}"}.get(value)
            args.append(switch or f"--{name}={value}")
        return {
            "settings": self.digest,
            "extra_args": tuple(args),
            "chat_template": self.chat_template or "",
            "system_prompt": self.system_prompt or "",
            "tool_parser": self.tool_parser or "",
            "reasoning_parser": self.reasoning_parser or "",
        }


def with_system_prompt(template: str | None, prompt: str) -> str | None:
    """Return `template` extended to put `prompt` before conversations without a system message; None stays None.

    vLLM has no setting for a system prompt; with the prompt in the template, token counts and all routes that render a
    conversation agree.
    """
    if not template or not prompt:
        return template
    # Jinja reads escapes in a string literal as Python does
    literal = prompt.encode("unicode_escape").decode("ascii").replace("'", "\\'")
    return (
        "{%- if messages and messages[0]['role'] not in ('system', 'developer') -%}"
        f"{{%- set messages = [{{'role': 'system', 'content': '{literal}'}}] + messages -%}}"
        "{%- endif -%}"
        f"{template}"
    )
