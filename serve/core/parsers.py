"""Selects vLLM's parsers for tool calls and reasoning by a model's family, chat template and tokens. Pure.

Engines are started with these parsers, and `appliance model show` prints them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

# vLLM's tool-call parser for each model family (vllm/tool_parsers; docs "Tool Calling"). An unknown family gets no
# parser; its tools work only with tool_choice "required" or a named function.
TOOL_PARSERS: Mapping[str, str] = {
    "llama": "llama3_json",
    "llama4": "llama4_pythonic",
    "qwen2": "hermes",
    "qwen2_moe": "hermes",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
    "mistral": "mistral",
    "mixtral": "mistral",
    "granite": "granite",
    "granitemoe": "granite",
    "internlm2": "internlm",
    "jamba": "jamba",
    "deepseek_v3": "deepseek_v3",
    "glm4_moe": "glm45",
    "phi3": "phi4_mini_json",
    "olmo3": "olmo3",
    "gemma4": "gemma4",
    "gpt_oss": "openai",
}

# Marks that a chat template writes around tool calls, each with vLLM's parser for that syntax. The template's syntax
# overrides the family, because some models are fine-tuned with another family's syntax. The first match counts.
CALL_SYNTAX = (
    ("<function=", "qwen3_coder"),  # Qwen 3.5, Nemotron 3
    ("<arg_key>", "glm45"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|tool_call>", "gemma4"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
)

# Tokens that these vLLM parsers require of a tokenizer: no engine starts without them. Others start without theirs.
NEEDED_TOKENS: Mapping[str, tuple[str, ...]] = {
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "jamba": ("<tool_calls>", "</tool_calls>"),
}
PARSER_TOKENS = frozenset(token for tokens in NEEDED_TOKENS.values() for token in tokens)

# Family -> vLLM's reasoning parser, and the mark in the chat templates of the family's reasoning models
# (vllm/reasoning; docs "Reasoning Outputs"). All other models with `<think>` tags get one of the two parsers below.
REASONING_PARSERS: Mapping[str, tuple[str, str]] = {
    "gpt_oss": ("openai_gptoss", "<|channel|>"),
    "seed_oss": ("seed_oss", "<seed:think>"),
    "granite": ("granite", "Here is my thought process"),
    "granitemoehybrid": ("granite", "Here is my thought process"),
    "deepseek_v3": ("deepseek_v3", "thinking"),
    "gemma4": ("gemma4", "<|channel>"),
}
THINK_PARSER, BEGUN_THOUGHT_PARSER = "thought", "begun_thought"
"""Parsers of `<think>` (serve.vllm.thoughts): if the model writes the opening tag; if the generation prompt does."""
_THINK, _ANSWER_BEGINS = "<think>", "add_generation_prompt"
_CLOSED_THOUGHT = re.compile(r"<think>(\\n|\s)*</think>")


def parser_of_calls(model_type: str | None, chat_template: str | None) -> str | None:
    """Return vLLM's tool parser for a model of this family (`model_type` in config.json), None if none is known.

    The family's parser is used only if the template mentions tools; otherwise it could parse ordinary text as a call. A
    template that does not mention tools was extended at import to render tools with Hermes' tags
    (weights.format.tool_template).
    """
    template = chat_template or ""
    own = TOOL_PARSERS.get(model_type or "") if "tools" in template else None
    return next((parser for mark, parser in CALL_SYNTAX if mark in template), own)


def missing_tokens(parser: str | None, tokens: Collection[str]) -> tuple[str, ...]:
    """Tokens without which the tool parser refuses the tokenizer. tokens: the tokenizer's subset of PARSER_TOKENS."""
    return tuple(token for token in NEEDED_TOKENS.get(parser or "", ()) if token not in tokens)


def tool_parser(model_type: str | None, chat_template: str | None, tokens: Collection[str]) -> str | None:
    """Return the result of `parser_of_calls` if the tokenizer has the tokens that this parser requires, else None."""
    parser = parser_of_calls(model_type, chat_template)
    return None if missing_tokens(parser, tokens) else parser


def reasoning_parser(model_type: str | None, chat_template: str | None) -> str | None:
    """Return vLLM's reasoning parser for a model of this family, None for a model that does not reason.

    The family alone does not decide: Qwen 3's instruct models do not reason. If the template may write the opening tag
    at the end of the prompt, the output may have only the closing tag; otherwise it has both tags.
    """
    template = chat_template or ""
    own, sign = REASONING_PARSERS.get(model_type or "", (None, ""))
    if own is not None and sign in template:
        return own
    if _THINK in _CLOSED_THOUGHT.sub("", template.rpartition(_ANSWER_BEGINS)[2]):
        return BEGUN_THOUGHT_PARSER
    return THINK_PARSER if _THINK in template else None
