"""Which of vLLM's parsers read a model's tool calls and its reasoning: by family and chat template. Pure.

Engines are started with them, and `appliance model show` names them.
"""

from __future__ import annotations

from collections.abc import Mapping

# vLLM's tool-call parser for each model family (vllm/tool_parsers; docs "Tool Calling"). An unknown family gets none:
# tools then work only with tool_choice "required" or a named function.
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

# vLLM's reasoning parser of a family, and what its chat template has where the model reasons (vllm/reasoning; docs
# "Reasoning Outputs"). Others with `<think>` tags are read by THINK_PARSER whatever their family.
REASONING_PARSERS: Mapping[str, tuple[str, str]] = {
    "gpt_oss": ("openai_gptoss", "<|channel|>"),
    "seed_oss": ("seed_oss", "<seed:think>"),
    "granite": ("granite", "Here is my thought process"),
    "granitemoehybrid": ("granite", "Here is my thought process"),
    "deepseek_v3": ("deepseek_v3", "thinking"),
    "gemma4": ("gemma4", "<|channel>"),
}
# It takes tags that are several tokens too, knows `enable_thinking: false`, and lets a tool call end the reasoning;
# deepseek_r1, the other one for these tags, does none of that.
THINK_PARSER = "qwen3"
_THINK, _ANSWER_BEGINS = "<think>", "add_generation_prompt"


def tool_parser(model_type: str | None, chat_template: str | None) -> str | None:
    """vLLM's tool parser for a model family (`model_type` of config.json), None if unknown.

    Several families are fine-tuned with the Hermes tags whatever their architecture, and their chat template
    says so: the tag wins over the family. A family's own parser is used only with a template that mentions
    tools, otherwise text that merely looks like a call would be taken for one. A template that does not mention them
    has been given a way to show them, with the same tags (weights.format.tool_template).
    """
    template = chat_template or ""
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "tools" not in template:
        return None
    return TOOL_PARSERS.get(model_type or "")


def reasoning_parser(model_type: str | None, chat_template: str | None) -> str | None:
    """vLLM's reasoning parser for a model family, None for a model that does not reason.

    A parser takes what stands before the closing tag for reasoning, all of it if there is no tag. So the name of the
    family is not enough: Qwen3's instruct models do not reason. The template of one that does has the tag where the
    answer begins, opened for it or closed where reasoning is switched off; older turns alone prove nothing.
    """
    template = chat_template or ""
    own, sign = REASONING_PARSERS.get(model_type or "", (None, ""))
    if own is not None and sign in template:
        return own
    _, found, beginning = template.rpartition(_ANSWER_BEGINS)
    return THINK_PARSER if found and _THINK in beginning else None
