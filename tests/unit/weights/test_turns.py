"""Rendering of each part of a conversation by chat templates modelled on public ones."""

import pytest

from appliance.models.template_trial import try_here
from weights.checkpoint.turns import new_end, warnings_of
from weights.format.tool_template import with_tools

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + PROMPT
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
# The next role's name ends a turn.
GLM = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# The last answer has another end token than earlier answers and reasoning.
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
TOKENS = (
    *("</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>", "<|return|>", "<|start|>"),
    *("<|response_end|>", "<|turn_end|>", "<|turn|>"),
)


def rendered(template: str) -> dict[str, str | None]:
    return try_here(str(with_tools(template)), SPECIAL)["rendered"]


@pytest.mark.parametrize(
    ("template", "known", "new"),
    [
        (CHATML, {"</s>"}, "<|im_end|>"),
        (CHATML, {"<|im_end|>"}, ""),
        (LLAMA2, {"</s>"}, ""),
        (GLM, {"</s>"}, "<|user|>"),
        (HARMONY, {"<|return|>"}, ""),
        (HARMONY, {"</s>"}, "<|return|>"),
        (PHI, {"</s>"}, "<|end|>"),
        (COHERE, {"<|turn_end|>"}, ""),
    ],
)
def test_new_end_is_token_after_an_answer(template, known, new):
    assert new_end(rendered(template), TOKENS, known) == new


@pytest.mark.parametrize(
    ("template", "warnings"),
    [
        (CHATML, []),
        (LLAMA2, ["refuses system messages"]),
        (
            CHATML.replace("for m in messages", "for m in messages if m.role != 'system'"),
            ["leaves system messages out", "leaves tools out"],
        ),
        ("{# tool #}" + CHATML, ["leaves tools out"]),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + CHATML, ["refuses tools"]),
        (CHATML.removesuffix(PROMPT), ["ignores add_generation_prompt"]),
    ],
)
def test_warnings_name_parts_missing_in_template(template, warnings):
    found = warnings_of(rendered(template), TOKENS)
    assert len(found) == len(warnings) and all(text in one for text, one in zip(warnings, found, strict=True))


def test_warnings_name_end_that_is_not_a_token():
    assert new_end(rendered(CHATML), ["</s>"], {"</s>"}) == ""
    assert len(warnings_of(rendered(CHATML), ["</s>"])) == 1
