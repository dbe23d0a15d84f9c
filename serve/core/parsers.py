"""Selects vLLM's parsers of a model's tool calls and reasoning by family, chat template and tokens. Pure.

Engines are started with these parsers, and `appliance model show` prints them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

# vLLM's tool-call parser for each model family (vllm/tool_parsers; docs "Tool Calling"). An unknown family gets no
# parser: tools then work only with tool_choice "required" or a named function.
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

# Marks that a chat template writes around calls, and vLLM's parser of them. The template's syntax wins over the family,
# because models are fine-tuned with the syntax of other families. The first match counts.
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

# Tokens without which vLLM's parser refuses a tokenizer, so that no engine starts. Other parsers start without theirs.
NEEDED_TOKENS: Mapping[str, tuple[str, ...]] = {
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "jamba": ("<tool_calls>", "</tool_calls>"),
}
PARSER_TOKENS = frozenset(token for tokens in NEEDED_TOKENS.values() for token in tokens)

# vLLM's reasoning parser of a family, and the mark in chat templates of its reasoning models (vllm/reasoning; docs
# "Reasoning Outputs"). Other models with `<think>` tags get one of the two parsers below, whatever the family.
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
    """vLLM's tool parser for a model of this family (`model_type` of config.json), None if none is known.

    A family's own parser is used only with a template that mentions tools, otherwise text that merely looks like a call
    would be taken for a call. A template that does not mention tools was extended to show them with Hermes' tags
    (weights.format.tool_template).
    """
    template = chat_template or ""
    own = TOOL_PARSERS.get(model_type or "") if "tools" in template else None
    return next((parser for mark, parser in CALL_SYNTAX if mark in template), own)


def missing_tokens(parser: str | None, tokens: Collection[str]) -> tuple[str, ...]:
    """Tokens without which the tool parser refuses the tokenizer. tokens: the tokenizer's subset of PARSER_TOKENS."""
    return tuple(token for token in NEEDED_TOKENS.get(parser or "", ()) if token not in tokens)


def tool_parser(model_type: str | None, chat_template: str | None, tokens: Collection[str]) -> str | None:
    """`parser_of_calls` if the tokenizer has the tokens that it needs, else None."""
    parser = parser_of_calls(model_type, chat_template)
    return None if missing_tokens(parser, tokens) else parser


def reasoning_parser(model_type: str | None, chat_template: str | None) -> str | None:
    """vLLM's reasoning parser for a model family, None for a model that does not reason.

    The name of a family is not enough: Qwen 3's instruct models do not reason. If the template may open a thought at
    the end of the prompt, the output may have only the closing tag; otherwise a thought has both.
    """
    template = chat_template or ""
    own, sign = REASONING_PARSERS.get(model_type or "", (None, ""))
    if own is not None and sign in template:
        return own
    if _THINK in _CLOSED_THOUGHT.sub("", template.rpartition(_ANSWER_BEGINS)[2]):
        return BEGUN_THOUGHT_PARSER
    return THINK_PARSER if _THINK in template else None
