"""What is trained of any conversation: each answer with weight, after the prompt that an engine is asked with."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train_support.tiny import CHATML, tokenizer, trained_texts
from tests.unit.train.test_chat import BEGIN, END, FORGETFUL, MARKED, OPENS
from train.data.chat import ChatEncoder

# As Phi 3's: the conversation ends with another token than a turn.
TWO_ENDS = BEGIN + "{{ m['content'] }}" + END + "{% if not add_generation_prompt %}<|pad|>{% endif %}"
# As GLM's: a turn ends where the next one begins.
NO_END = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As gpt-oss's: the last turn ends with another token than earlier ones.
RETURNS = (
    BEGIN + "{{ m['content'] }}{% if loop.last and m['role'] == 'assistant' %}<|return|>{% else %}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDS = {RETURNS: "<|return|>", NO_END: "<|user|>"}
TEMPLATES = (CHATML, MARKED, FORGETFUL, OPENS, RETURNS, TWO_ENDS, NO_END)
# Few words, so that answers stand in questions and in each other; text of templates, spaces and other scripts.
WORDS = st.sampled_from(["yes", "no", "yes or no", "a", "assistant", "<|x|>", "  b", "\n", "é", "你好", "end", "1"])
TEXT = st.lists(WORDS, min_size=1, max_size=4).map(" ".join).filter(str.strip)


@cache
def encoder(template):
    words = tokenizer(template)
    words.add_tokens(["<|return|>", "<|user|>", "<|assistant|>"], special_tokens=True)
    return ChatEncoder(words)


@st.composite
def conversations(draw):
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(TEXT)})
        messages.append({"role": "assistant", "content": draw(TEXT), "weight": draw(st.integers(0, 1))})
    messages[-1]["weight"] = 1
    return messages


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TEMPLATES), conversations())
def test_encode_trains_each_weighted_answer_in_the_context_of_its_request(template, messages):
    one = encoder(template)
    decode, end = one.tokenizer.decode, ENDS.get(template, "<|im_end|>")
    found = dict(trained_texts(one, {"messages": messages}))
    expected = {
        decode(one.prompt({"messages": messages[:index]})): message["content"] + end
        for index, message in enumerate(messages)
        if message.get("weight")
    }
    thought = "<think>\n\n</think>\n" if template == FORGETFUL else ""
    assert {prompt: text.removeprefix(thought) for prompt, text in found.items()} == expected
