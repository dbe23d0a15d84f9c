"""Trained tokens under the chat templates of common model families, taken from TRL's wheel."""

import importlib.util
import json
import re
from functools import cache
from pathlib import Path

import pytest

from tests.train_support.tiny import tokenizer, trained_texts
from train.data.chat import ChatEncoder
from train.data.records import BadRecord

(_ROOT,) = importlib.util.find_spec("trl").submodule_search_locations
TEMPLATES = Path(_ROOT) / "chat_templates"
FAMILIES = sorted(path.stem.removesuffix("_training") for path in TEMPLATES.glob("*_training.jinja"))
# End tokens of an answer and, if different, of a turn with tool calls.
ENDS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "cohere2": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>",),
    "llama3": ("<|eot_id|>",),
    "llava": ("</s>",),
    "muse": ("<|eot|>",),
    "phi3": ("<|end|>",),
    "smolvlm": ("<end_of_utterance>",),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "read_gauge",
        "description": "Reads a gauge.",
        "parameters": {
            "type": "object",
            "properties": {"line": {"type": "integer", "description": "a line"}},
            "required": ["line"],
        },
    },
}


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def called(text, *lines, **more):
    calls = [
        {"id": f"call{n}", "type": "function", "function": {"name": "read_gauge", "arguments": json.dumps({"line": n})}}
        for n in lines
    ]
    results = [
        {"role": "tool", "content": f"bar: {n}0", "tool_call_id": f"call{n}", "name": "read_gauge"} for n in lines
    ]
    return [said(text, tool_calls=calls, **more), *results]


CONVERSATIONS = {
    "one": [user("How warm is it?"), said("It is twelve degrees.")],
    "two": [user("How warm is it?"), said("It is twelve."), user("And now?"), said("Thirteen.")],
    "short": [user("Answer yes or no, yes?"), said("yes"), user("Answer yes or no, no?"), said("no")],
    "system": [{"role": "system", "content": "Say yes."}, user("Is it warm, yes?"), said("yes")],
    "call": [user("Read line 3"), *called("", 3), said("30 bar")],
    "call with words": [user("Read line 3"), *called("I look.", 3), said("30 bar")],
    "two calls": [user("Read lines 3 and 4"), *called("", 3, 4), said("30 and 40 bar")],
    "thought": [user("2 + 2?"), said("four", reasoning_content="Two and two.")],
    "two thoughts": [
        user("2 + 2?"),
        said("four", reasoning_content="Two and two."),
        user("3 + 3?"),
        said("six", reasoning_content="Thrice two."),
    ],
    "thought and call": [
        user("Read line 3"),
        *called("", 3, reasoning_content="I look."),
        said("30 bar", reasoning_content="The tool says 30."),
    ],
}
# Conversations that a template cannot render and `encode` therefore rejects.
NO_THOUGHTS = {"thought", "two thoughts", "thought and call"}
NO_CALLS = {"call", "call with words", "two calls", "thought and call"}
REFUSED = {
    **dict.fromkeys(("cohere", "cohere2", "gemma3", "llama3", "phi3", "phi3_5"), NO_THOUGHTS),
    **dict.fromkeys(("qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"), NO_THOUGHTS),
    "gemma": NO_THOUGHTS | {"system"},
    "deepseekv3": NO_THOUGHTS,
    "deepseek_r1_distill": NO_THOUGHTS | {"call with words"},
    "gptoss": {"two calls"},  # one call per message
    "muse_glimmer": {"call with words"},
    "lfm2": NO_THOUGHTS | NO_CALLS,
    "lfm2_v2": NO_THOUGHTS,
    **dict.fromkeys(("idefics3", "llava_next", "smolvlm"), NO_THOUGHTS | NO_CALLS),
}


def ends_of(family):
    return next((ends for prefix, ends in ENDS.items() if family.startswith(prefix)), ("<|im_end|>",))


@cache
def encoder_of(family, own_tokens):
    template = (TEMPLATES / f"{family}.jinja").read_text()
    words = tokenizer(template)
    words.bos_token = "<|pad|>"
    if own_tokens:
        markers = set(
            re.findall(r"<\|[^\s<>'\"]{1,40}\|>|<[^\s<>'\"]{1,40}\|>|<\|[^\s<>'\"]{1,40}>|<｜[^\s<>]+?｜>", template)
        )
        words.add_tokens(sorted(markers | set(ends_of(family))), special_tokens=True)
        words.eos_token = ends_of(family)[0]
    return ChatEncoder(words)


def trained(encoder, messages):
    """Pairs (prompt, trained text) of each trained turn, in the order of the conversation."""
    tools = {"tools": [TOOL]} if any("tool_calls" in message for message in messages) else {}
    return sorted(trained_texts(encoder, {"messages": messages, **tools}), key=lambda one: len(one[0]))


CASES = [(family, name) for family in FAMILIES for name in CONVERSATIONS if name not in REFUSED.get(family, ())]


@pytest.mark.parametrize("own_tokens", [True, False], ids=["own tokens", "base model"])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_encode_under_public_template_trains_answers_and_ends(family, name, own_tokens):
    """A base model with a foreign template lacks the template's tokens; an engine stops only at the tokenizer's end."""
    messages = CONVERSATIONS[name]
    answers = [message for message in messages if message["role"] == "assistant"]
    found = trained(encoder_of(family, own_tokens), messages)
    assert len(found) == len(answers)
    for (_, text), answer in zip(found, answers, strict=True):
        calls = answer.get("tool_calls", [])
        assert answer["content"] in text and answer.get("reasoning_content", "") in text
        assert text.count("read_gauge") >= len(calls)
        for call in calls:
            assert str(json.loads(call["function"]["arguments"])["line"]) in text
        end = ends_of(family)[-1 if calls else 0] if own_tokens else "<|im_end|>"
        assert text.endswith(end) and text.count(end) == 1
        for other in messages:  # nothing of other roles
            if other["role"] != "assistant":
                assert other["content"] not in text


@pytest.mark.parametrize(("family", "name"), [(f, n) for f, names in REFUSED.items() for n in sorted(names)])
def test_encode_rejects_parts_unsupported_by_public_template(family, name):
    with pytest.raises(BadRecord, match="template"):
        trained(encoder_of(family, own_tokens=True), CONVERSATIONS[name])
