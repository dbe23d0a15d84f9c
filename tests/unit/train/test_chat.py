"""Which tokens of a conversation are learnt."""

import json

import pytest

from tests.train_support.tiny import CHATML, tokenizer
from train.data.chat import ChatEncoder, _refuse_lost_calls, refuse_costly, vocabulary_of
from train.data.formats import BadRecord, check_chat
from train.plan.errors import UnsupportedModel

TALK = {
    "messages": [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello, fox"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "good bye"},
    ]
}
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like reasoning models: only the last assistant message keeps its thought, so prefixes do not line up.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}"
    "<think>\n</think>{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def learnt(encoder, example):
    ids, mask = encoder.encode(example)
    assert len(ids) == len(mask)
    runs, run = [], []
    for token, kept in zip(ids.tolist(), mask.tolist(), strict=True):
        if kept:
            run.append(token)
        elif run:
            runs.append(encoder.tokenizer.decode(run))
            run = []
    return runs + ([encoder.tokenizer.decode(run)] if run else [])


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_what_the_assistant_says_and_its_end_of_turn(template):
    encoder = ChatEncoder(tokenizer(template))
    assert learnt(encoder, TALK) == ["hello, fox<|im_end|>", "good bye<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_weight_zero_is_not_learnt(template):
    messages = [dict(m) for m in TALK["messages"]]
    messages[2]["weight"] = 0
    assert learnt(ChatEncoder(tokenizer(template)), {"messages": messages}) == ["good bye<|im_end|>"]


def test_templates_that_render_history_otherwise():
    encoder = ChatEncoder(tokenizer(FORGETFUL))
    first, last = learnt(encoder, TALK)
    assert first == "hello, fox<|im_end|>" and last.endswith("good bye<|im_end|>")


# As Qwen3's: what was thought stands before the last answer alone.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m.reasoning_content and loop.last %}"
    "<think>\n{{ m.reasoning_content.strip('\n') }}\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_what_was_thought_before_the_last_answer_is_learnt_with_it_or_refused(key):
    """Where the template does not write it, it was lost without a word."""
    talk = {"messages": [dict(message) for message in TALK["messages"]]}
    for number in (2, 4):
        talk["messages"][number][key] = f"\nI think of it {number} times.\n"
    chat = check_chat(talk)
    first, last = learnt(ChatEncoder(tokenizer(REASONING)), chat)
    assert first == "hello, fox<|im_end|>"
    assert last == "<think>\nI think of it 4 times.\n</think>\n\ngood bye<|im_end|>"
    with pytest.raises(BadRecord, match="has reasoning in message 5, which the model's chat template does not write"):
        ChatEncoder(tokenizer()).encode(chat)
    del talk["messages"][4][key]
    assert len(learnt(ChatEncoder(tokenizer()), check_chat(talk))) == 2
    both = {"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"}
    with pytest.raises(BadRecord, match="two different texts"):
        check_chat({"messages": [TALK["messages"][1], both]})


def test_templates_that_refuse_half_a_conversation():
    strict = "{% if messages[-1]['role'] != 'assistant' %}{{ raise_exception('incomplete') }}{% endif %}" + CHATML
    assert learnt(ChatEncoder(tokenizer(strict)), TALK) == ["hello, fox<|im_end|>", "good bye<|im_end|>"]


def test_tool_calls_are_learnt_and_their_arguments_are_not_quoted_twice():
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    example = {
        "messages": [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "c"},
            {"role": "assistant", "content": "it is 2"},
        ]
    }
    said = learnt(ChatEncoder(tokenizer()), example)
    assert said == ['<tool>{"name": "add", "arguments": {"a": 1}}</tool><|im_end|>', "it is 2<|im_end|>"]


def test_what_cannot_be_learnt_from():
    with pytest.raises(UnsupportedModel, match="no chat template"):
        ChatEncoder(tokenizer(None))
    with pytest.raises(BadRecord, match="refused by the model's chat template: no tools here"):
        ChatEncoder(tokenizer("{{ raise_exception('no tools here') }}")).encode(TALK)
    with pytest.raises(BadRecord, match="hides"):
        ChatEncoder(tokenizer("{{ messages[0]['content'] }}")).encode(TALK)


PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": '{"q": "x"}'}}


def test_a_template_without_tools_shows_and_learns_calls_all_the_same():
    asked = [
        {"role": "user", "content": "Look x up."},
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
    ]
    encoder = ChatEncoder(tokenizer(PLAIN))
    text, spans = encoder.spans({"messages": asked, "tools": [{"type": "function", "function": {"name": "lookup"}}]})
    (start, end), *rest = spans
    assert not rest and '<tool_call>\n{"name": "lookup", "arguments": {"q": "x"}}\n</tool_call>' in text[start:end]
    assert "<tools>" in text[:start]


def test_a_call_that_the_template_drops_is_refused():
    encoder = ChatEncoder(tokenizer("{# knows no tool_calls #}" + PLAIN))
    asked = [
        {"role": "user", "content": "Look x up."},
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
    ]
    with pytest.raises(BadRecord, match="calls 'lookup' in message 2.*does not write"):
        encoder.encode({"messages": asked})


def test_rows_in_the_older_form_of_calls_become_tool_calls():
    row = {
        "messages": [
            {"role": "user", "content": "Look x up."},
            {"role": "assistant", "content": None, "function_call": {"name": "lookup", "arguments": '{"q": "x"}'}},
            {"role": "function", "name": "lookup", "content": "found"},
            {"role": "assistant", "content": "It is found."},
        ],
        "functions": [{"name": "lookup", "parameters": {}}],
    }
    chat = check_chat(row)
    assert chat["tools"] == [{"type": "function", "function": row["functions"][0]}]
    call, answer = chat["messages"][1:3]
    assert call["tool_calls"][0] == {
        "id": "call_1",
        "type": "function",
        "function": row["messages"][1]["function_call"],
    }
    assert (answer["role"], answer["tool_call_id"]) == ("tool", "call_1")
    with pytest.raises(BadRecord, match="both 'tools' and 'functions'"):
        check_chat(row | {"tools": chat["tools"]})


def test_an_example_has_so_many_messages():
    with pytest.raises(BadRecord, match="has 8193 messages, at most 8192"):
        check_chat({"messages": [{"role": "user", "content": "a"}] * 8193})


def talk_of(pairs: int, text: str = "a", calls: int = 0, tools: int = 0) -> dict:
    answer: dict = {"role": "assistant", "content": text}
    if calls:
        named = [{"name": f"f{n}", "arguments": "{}"} for n in range(calls)]
        answer["tool_calls"] = [{"id": "c", "type": "function", "function": one} for one in named]
    return {
        "messages": [{"role": "user", "content": text}, answer] * pairs,
        "tools": [{"type": "function", "function": {"name": "f", "description": "a" * tools}}],
    }


def test_an_example_costs_no_more_to_find_its_answers_in_than_some_seconds():
    for good in (
        talk_of(725, "a" * 140),
        talk_of(350, "a" * 2100),
        talk_of(100, "a" * 50_000),
        talk_of(1, calls=20_000),
    ):
        refuse_costly(check_chat(good))
    refuse_costly(check_chat({"messages": [{"role": "user", "content": "a"}] * 8000 + talk_of(1)["messages"]}))
    for bad in (talk_of(1100), talk_of(4096), talk_of(300, "a" * 50_000), talk_of(100, calls=800)):
        with pytest.raises(BadRecord, match="answers among .* bytes with its tools: to find them takes too long"):
            refuse_costly(check_chat(bad))
    with pytest.raises(BadRecord, match="has 400 answers among 800 messages"):
        ChatEncoder(tokenizer()).encode(check_chat(talk_of(400, tools=300_000)))


def test_a_template_that_marks_the_answers_takes_an_example_with_any_number_of_them():
    assert ChatEncoder(tokenizer(MARKED)).encode(check_chat(talk_of(1100)))[1].sum() == 2 * 1100


def test_the_functions_that_are_called_cost_no_more_to_find_than_some_seconds():
    with pytest.raises(BadRecord, match="calls 60000 functions in .* characters: make several examples of it"):
        _refuse_lost_calls(talk_of(1, calls=60_000)["messages"], "f" * 50_000)
    _refuse_lost_calls(talk_of(2000, calls=30)["messages"], " ".join(f"f{n}" for n in range(30)))


@pytest.mark.parametrize("nested", [False, True])
def test_a_token_that_the_model_has_no_embedding_for_is_refused(tmp_path, nested):
    words = tokenizer()
    known = len(words)
    words.add_special_tokens({"additional_special_tokens": ["<picture>"]})
    config = {"vocab_size": known}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config} if nested else config))
    encoder = ChatEncoder(words, vocabulary_of(tmp_path))
    shown = [{"role": "user", "content": "What is on <picture>?"}, {"role": "assistant", "content": "a fox"}]
    for encode in (encoder.encode, encoder.prompt):
        encode({"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a fox"}]})
        with pytest.raises(BadRecord, match=rf"token '<picture>' \({known}\).*the model, with {known} of them"):
            encode({"messages": shown})
    ChatEncoder(words).encode({"messages": shown})
    assert vocabulary_of(tmp_path / "none") is None
