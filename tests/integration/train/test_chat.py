"""Which tokens of a conversation are trained."""

import json

import pytest

from tests.train_support.tiny import CHATML, tokenizer, trained_texts
from train.data.chat import ChatEncoder, vocabulary_of
from train.data.formats import convert
from train.data.records import BadRecord

QUESTION = {"role": "user", "content": "hello"}
TALK = {
    "messages": [
        {"role": "system", "content": "be kind"},
        QUESTION,
        {"role": "assistant", "content": "hello, fox"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "good bye"},
    ]
}
BEGIN = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MARKED = (
    BEGIN + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}" + END
)
# Like Qwen 3's template: only the last answer has reasoning, empty if the message has none.
FORGETFUL = (
    BEGIN + "{% if m['role'] == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n"
    "{% endif %}{{ m['content'] }}" + END
)
# Like the distilled R1's template: the generation prompt opens a reasoning block, which is never rendered.
OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
STRICT = "{% if messages[-1]['role'] != 'assistant' %}{{ raise_exception('incomplete') }}{% endif %}" + CHATML
NO_PROMPT = BEGIN + "{{ m['content'] }}<|im_end|>\n{% endfor %}"
GOOD, BYE = "hello, fox<|im_end|>", "good bye<|im_end|>"


def trained(encoder, example):
    return [text for _, text in trained_texts(encoder, example)]


@pytest.mark.parametrize(
    ("template", "expected", "n_rows"),
    [
        (CHATML, [GOOD, BYE], 1),
        (MARKED, [GOOD, BYE], 1),
        (STRICT, [GOOD, BYE], 1),
        (OPENS, [GOOD, BYE], 2),
        (NO_PROMPT, [GOOD, BYE], 2),
        (FORGETFUL, [GOOD, "<think>\n\n</think>\n" + BYE], 1),
    ],
)
def test_encode_trains_answers_with_end_tokens_under_each_template(template, expected, n_rows):
    encoder = ChatEncoder(tokenizer(template))
    found = trained_texts(encoder, TALK)
    assert sorted(text for _, text in found) == sorted(expected) and len(encoder.encode(TALK)) == n_rows
    if n_rows > 1:
        with pytest.raises(BadRecord, match="one turn"):
            encoder.encode_whole(TALK)
    for before, text in found if template != STRICT else ():  # each answer follows the prompt that an engine would get
        asked = TALK["messages"][: 4 if text.endswith(BYE) else 2]
        assert before == encoder.tokenizer.decode(encoder.prompt({"messages": asked}))


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_encode_trains_reasoning_of_each_turn_or_raises(key):
    talk = {"messages": [dict(message) for message in TALK["messages"]]}
    for number in (2, 4):
        talk["messages"][number][key] = f"\nI think of it {number} times.\n"
    chat = convert(talk).record
    encoder = ChatEncoder(tokenizer(FORGETFUL))
    assert sorted(trained(encoder, chat)) == [
        "<think>\n\nI think of it 2 times.\n\n</think>\nhello, fox<|im_end|>",
        "<think>\n\nI think of it 4 times.\n\n</think>\ngood bye<|im_end|>",
    ]
    assert len(encoder.encode(chat)) == 2
    with pytest.raises(BadRecord, match=r"reasoning in messages\[2\]"):
        ChatEncoder(tokenizer()).encode(chat)
    both = {"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"}
    with pytest.raises(BadRecord, match="reasoning_content"):
        convert({"messages": [QUESTION, both]})


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = {
    "messages": [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "assistant", "content": "it is 2"},
    ]
}
NO_ARGUMENTS = {**CALL, "function": {"name": "add", "arguments": "{}"}}
SAYS_IT_CALLS = {"messages": [QUESTION, {"role": "assistant", "content": "I add.", "tool_calls": [NO_ARGUMENTS]}]}


# Like gpt-oss's template: results are JSON, and reasoning before an answered call is dropped.
JSON_RESULTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'tool' %}{{ m['content'] | tojson }}"
    "{% elif m['tool_calls'] %}{% if loop.index0 + 2 >= messages | length %}<think>hm</think>{% endif %}"
    "{{ m['tool_calls'][0]['function']['name'] }} {{ m['tool_calls'][0]['function']['arguments'] | tojson }}"
    "{% else %}{{ m['content'] }}{% endif %}" + END
)


@pytest.mark.parametrize("result", ['{"state": "running"}', "", "2"])
def test_encode_of_repeated_calls_trains_no_result(result):
    call, answered = CALLED["messages"][1], {**CALLED["messages"][2], "content": result}
    messages = [QUESTION, call, answered, call, answered, CALLED["messages"][3]]
    found = trained(ChatEncoder(tokenizer(JSON_RESULTS)), {"messages": messages})
    found = sorted(text.removeprefix("<think>hm</think>") for text in found)
    assert found == ['add {"a": 1}<|im_end|>'] * 2 + ["it is 2<|im_end|>"]


def test_encode_under_template_with_text_after_end_stops_at_end():
    goes_on = (
        BEGIN + "{% for c in m.tool_calls or [] %}{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}<|im_end|>\n<|im_start|>assistant\n{% endfor %}"
        "{{ m['content'] }}" + END
    )
    encoder = ChatEncoder(tokenizer(goes_on))
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert trained(encoder, {"messages": [QUESTION, call]}) == ['add {"a": 1}<|im_end|>']
    with pytest.raises(BadRecord, match=r"text in messages\[1\]"):
        encoder.encode({"messages": [QUESTION, {**call, "content": "I add."}]})


def test_encode_of_reasoning_reopens_closed_block_of_template():
    closes = FORGETFUL.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n{% endif %}")
    thought = {"role": "assistant", "content": "bye", "reasoning_content": "hm"}
    ((before, text),) = trained_texts(ChatEncoder(tokenizer(closes)), {"messages": [QUESTION, thought]})
    assert "</think>" not in before and text.strip() == "hm\n</think>\nbye<|im_end|>"
    closed = "{% if m['role'] == 'assistant' %}<think></think>{% endif %}"
    plain = BEGIN + closed + "{{ m['content'] }}" + END.replace("assistant\n", "assistant\n<think></think>")
    tagged = {"role": "assistant", "content": "<think>hm</think>bye"}
    with pytest.raises(BadRecord, match=r"reasoning in messages\[1\]"):
        ChatEncoder(tokenizer(plain)).encode({"messages": [QUESTION, tagged]})


def test_encode_drops_repeated_end_token_and_rejects_inner_one():
    encoder = ChatEncoder(tokenizer())
    ended = {"role": "assistant", "content": "hello, fox<|im_end|>"}
    asks = {"role": "user", "content": "what is <|im_end|> here"}
    assert trained(encoder, {"messages": [QUESTION, ended]}) == trained(encoder, {"messages": [asks, ended]}) == [GOOD]
    with pytest.raises(BadRecord, match=r"within messages\[1\]"):
        encoder.encode({"messages": [QUESTION, {**ended, "content": "a<|im_end|> b"}]})


def test_encode_counts_examples_with_tools_missing_in_template():
    tools = [{"type": "function", "function": {"name": "lookup"}}]
    for template, count in (("{# no tools #}" + CHATML, 1), (BEGIN + "{{ m['content'] }}" + END, 0)):
        encoder = ChatEncoder(tokenizer(template))
        encoder.encode({**TALK, "tools": tools})
        assert encoder.n_without_tools == count


def test_encode_shortens_call_ids_rejected_by_template():
    """Like Mistral's template, which requires ids of nine letters."""
    checks = (
        "{% for m in messages %}{% for c in m['tool_calls'] or [] %}{% if c['id'] | length != 9 %}"
        "{{ raise_exception('nine letters') }}{% endif %}{% endfor %}{% endfor %}"
    )
    assert trained(ChatEncoder(tokenizer(checks + CHATML)), CALLED)[-1] == "it is 2<|im_end|>"


NAMES_ONLY = BEGIN + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{{ m['content'] or '' }}" + END


def leaves_out(role):
    return BEGIN + "{% if m['role'] != '" + role + "' %}{{ m['content'] }}{% endif %}" + END


@pytest.mark.parametrize(
    ("template", "example", "reason"),
    [
        ("{# knows no tool_calls #}" + BEGIN + "{{ m['content'] }}" + END, SAYS_IT_CALLS, "a call of 'add'"),
        ("{{ raise_exception('no tools here') }}", TALK, "no tools here"),
        (leaves_out("system"), TALK, "from 'system'"),
        (leaves_out("user"), TALK, "from 'user'"),
        ("{{ messages[0]['content'] }}", TALK, r"messages\[2\]"),
        ("{# knows no tool_calls #}" + BEGIN + "{{ m['content'] or '' }}" + END, CALLED, "a call of 'add'"),
        (NAMES_ONLY, CALLED, "the argument '1'"),
        (
            BEGIN + "{{ m['content'].split('</think>')[-1] }}" + END,
            {"messages": [QUESTION, {"role": "assistant", "content": "<think>so</think>a"}]},
            "reasoning",
        ),
    ],
)
def test_encode_rejects_parts_missing_in_template(template, example, reason):
    with pytest.raises(BadRecord, match=reason):
        ChatEncoder(tokenizer(template)).encode(example)
    if example is CALLED and template is not NAMES_ONLY:
        with pytest.raises(BadRecord, match="calls"):
            ChatEncoder(tokenizer(template)).prompt({"messages": CALLED["messages"][:3]})


def test_encode_tokenizes_prompt_separately_like_an_engine():
    words = tokenizer(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    answer = {"role": "assistant", "content": "the quick brown fox"}
    encoder = ChatEncoder(words)
    ((ids, mask),) = encoder.encode({"messages": [QUESTION, answer]})
    prompt = encoder.prompt({"messages": [QUESTION]})
    assert ids[: len(prompt)].tolist() == prompt.tolist()
    assert mask.tolist() == [n >= len(prompt) for n in range(len(ids))]
    assert words.decode(ids[len(prompt) :]) == "the quick brown fox<|im_end|>"
    talk = [QUESTION, answer] * 2
    for (ids, mask), end in zip(encoder.encode({"messages": talk}), (1, 3), strict=True):
        prompt = encoder.prompt({"messages": talk[:end]}).tolist()
        assert ids[~mask].tolist() == prompt and words.decode(ids[mask]) == "the quick brown fox<|im_end|>"


@pytest.mark.parametrize("nested", [False, True])
def test_encode_rejects_token_without_embedding(tmp_path, nested):
    words = tokenizer()
    known = len(words)
    words.add_special_tokens({"additional_special_tokens": ["<picture>"]})
    config = {"vocab_size": known}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config} if nested else config))
    encoder = ChatEncoder(words, vocabulary_of(tmp_path))
    shown = [{"role": "user", "content": "What is on <picture>?"}, {"role": "assistant", "content": "a fox"}]
    for encode in (encoder.encode, encoder.prompt):
        encode({"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a fox"}]})
        with pytest.raises(BadRecord, match="<picture>"):
            encode({"messages": shown})
    ChatEncoder(words).encode({"messages": shown})
    assert vocabulary_of(tmp_path / "none") is None
