"""Tools added to templates that do not mention them, rendered as transformers renders them."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from weights.format.tool_template import with_tools

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "Weather in Paris?"}


def call(arguments):
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def rendered(template, messages, tools=None, **options):
    texts, _ = render_jinja_template([messages], chat_template=template, tools=tools, **options)
    return texts[0]


@pytest.mark.parametrize("template", [CHATML, NO_SYSTEM])
def test_conversations_without_tools_render_as_before(template):
    messages = [ASKED, {"role": "assistant", "content": "Sunny."}, ASKED]
    assert rendered(with_tools(template), messages) == rendered(template, messages)
    assert rendered(with_tools(template), messages, tools=[]) == rendered(template, messages)


def test_with_tools_lists_tools_in_system_message():
    text = rendered(with_tools(CHATML), [ASKED], tools=[TOOL], add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou may call functions.") and text.endswith("<|im_start|>assistant\n")
    assert json.dumps(TOOL) in text and text.count("<|im_start|>") == 3
    own = rendered(with_tools(CHATML), [{"role": "system", "content": "Be brief."}, ASKED], tools=[TOOL])
    assert own.startswith("<|im_start|>system\nBe brief.\n\nYou may call") and own.count("<|im_start|>") == 2
    text = rendered(with_tools(NO_SYSTEM), [ASKED], tools=[TOOL])
    assert text.startswith("user: You may call") and text.endswith("</tool_call>\n\nWeather in Paris?\n")


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
def test_with_tools_renders_calls_and_results(arguments):
    messages = [ASKED, call(arguments), {"role": "tool", "content": "12 C", "tool_call_id": "c1"}]
    text = rendered(with_tools(CHATML), messages)
    written = '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{written}<|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\n12 C\n</tool_response><|im_end|>" in text


def test_with_tools_keeps_templates_with_tools():
    known = CHATML + "{{ tools }}"
    assert with_tools(known) == known and with_tools(None) is None and with_tools("") == ""
