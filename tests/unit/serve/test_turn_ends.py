"""The end of turn of a chat template that was set for a model is an end for its engine."""

import functools
from types import SimpleNamespace

import pytest

from appliance.models.template_trial import try_here
from serve.vllm.frontend import end_turns_of
from weights.checkpoint.turns import PROBES

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def rendered():
    return try_here(CHATML, {})["rendered"]


class Tokenizer:
    bos_token, eos_token, eos_token_id = None, "</s>", 2

    def get_added_vocab(self):
        return {"</s>": 2, "<|im_start|>": 6, "<|im_end|>": 7}

    def apply_chat_template(self, messages, *, chat_template, tokenize, **given):
        name = next(
            n for n, p in PROBES.items() if {"add_generation_prompt": True} | p == {"messages": tuple(messages)} | given
        )
        text = rendered()[name]
        if text is None:
            raise ValueError(name)
        return text


@pytest.mark.parametrize(("fields", "ends"), [({}, [7]), ({"eos_token_id": 2}, [2, 7]), ({"eos_token_id": [7]}, [7])])
def test_end_turns_of_adds_the_templates_end_of_turn(fields, ends):
    llm = SimpleNamespace(get_tokenizer=Tokenizer, input_processor=SimpleNamespace(generation_config_fields=fields))
    end_turns_of(llm, CHATML)
    assert fields["eos_token_id"] == ends
