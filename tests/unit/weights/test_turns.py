"""What a chat template does with each part of a conversation, under templates in the manner of public ones."""

import pytest

from appliance.models.template_trial import try_here
from weights.checkpoint.turns import Turns, turns_of, warnings_of
from weights.format.tool_template import with_tools

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + PROMPT
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
# The next role's name is the end of a turn.
GLM = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
GLM_CALLS = GLM.replace(
    "m.content }}", "m.content }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name }}</call>{% endfor %}"
).replace("'<|' + m.role", "'<|' + (m.role if m.role != 'tool' else 'start')")
# The last answer ends otherwise than one in the middle, and thoughts end as that does.
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|message|>Hm.<|end|><|start|>assistant<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}"
)
COHERE = (
    "{% for m in messages %}{{ '<|turn|>' + m.role + '<|start|>' + m.content + '<|response_end|><|turn_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant<|start|>' }}{% endif %}"
)
CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + (c.function | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|call_end|>' if m.tool_calls else '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
TOKENS = (
    *("</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>", "<|return|>", "<|start|>"),
    *("<|response_end|>", "<|turn_end|>", "<|turn|>", "<call>", "</call>", "<|call_end|>"),
)


def of(template: str, *known: str, added=TOKENS) -> Turns:
    verdict = try_here(str(with_tools(template)), SPECIAL)
    return turns_of(verdict["rendered"], added, known or ("</s>",))


@pytest.mark.parametrize(
    ("template", "known", "ends", "new"),
    [
        (CHATML, ["</s>"], ("<|im_end|>",), ("<|im_end|>",)),
        (CHATML, ["<|im_end|>"], ("<|im_end|>",), ()),
        (GLM_CALLS, ["</s>"], ("<|user|>", "<|start|>"), ("<|user|>", "<|start|>")),
        (LLAMA2, ["</s>"], ("</s>",), ()),
        (GLM, ["</s>"], ("<|user|>",), ("<|user|>",)),
        (HARMONY, ["<|return|>"], ("<|return|>",), ()),
        (HARMONY, ["</s>"], ("<|return|>",), ("<|return|>",)),
        (PHI, ["</s>"], ("<|end|>", "</s>"), ("<|end|>",)),
        (COHERE, ["<|turn_end|>"], ("<|turn_end|>",), ()),
        (CALLS, ["<|im_end|>"], ("<|im_end|>", "<|call_end|>"), ("<|call_end|>",)),
        (CALLS.replace("<|call_end|>", ""), ["<|im_end|>"], ("<|im_end|>",), ()),
    ],
)
def test_told_finds_the_ends_of_turns(template, known, ends, new):
    turns = of(template, *known)
    assert (turns.ends, turns.new) == (ends, new)
    assert not turns.header and not turns.unstopped


def test_told_reports_an_end_that_is_no_token():
    turns = of(CHATML, added=("</s>",))
    assert turns.ends == () and turns.unstopped == "<|im_end|>" and len(warnings_of(turns)) == 1


@pytest.mark.parametrize(
    ("template", "uses"),
    [
        (CHATML, {}),
        (LLAMA2, {"system": "refused"}),
        (CHATML.replace("for m in messages", "for m in messages if m.role != 'system'"), {"system": "ignored"}),
        ("{# tool #}" + CHATML, {"tools": "ignored", "calls": "ignored"}),
        (
            "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + CHATML,
            {"tools": "refused", "calls": "refused"},
        ),
    ],
)
def test_told_reports_what_the_template_refuses_or_leaves_out(template, uses):
    turns = of(template)
    found = {part: use for part, use in turns.uses.items() if use != "used" and part in (uses or turns.uses)}
    assert found == uses and bool(warnings_of(turns)) == bool(uses)


def test_told_reports_a_prompt_without_the_beginning_of_the_turn():
    turns = of(CHATML.removesuffix(PROMPT))
    assert turns.header == "<|im_start|>assistant" and len(warnings_of(turns)) == 1
