"""For any examples: reported duplicates are duplicates, no example is lost, each weighted answer is trained."""

import random
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.train.test_chat import BEGIN, END, FORGETFUL, MARKED, OPENS
from tests.train_support.tiny import CHATML, tokenizer, trained_texts
from tests.unit.train.test_data_checks import chat, repeats, write
from train.data.chat import ChatEncoder
from train.data_checks.check import LIKE, grams, personal_data

WORDS = [f"word{n}" for n in range(40)]
# Few words, so that texts collide: one-word changes, repeats, and unrelated texts.
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=60)
EDITS = st.tuples(st.integers(0, 9), st.integers(0, 59), st.sampled_from(WORDS))


def _texts(bases, edits):
    made = [list(base) for base in bases]
    for which, at, word in edits:
        base = list(bases[which % len(bases)])
        base[at % len(base)] = word
        made.append(base)
    return [" ".join(words) for words in made]


def _jaccard(one, other):
    """Jaccard similarity of word 5-grams, by its definition."""

    def runs(text):
        words = text.split()
        return {tuple(words[at : at + 5]) for at in range(max(1, len(words) - 5 + 1))}

    one, other = runs(one), runs(other)
    return len(one & other) / len(one | other)


@given(bases=st.lists(TEXTS, min_size=1, max_size=10), edits=st.lists(EDITS, max_size=20))
@settings(max_examples=60, deadline=None)
def test_repeats_are_near_duplicates_of_kept_texts(tmp_path_factory, bases, edits):
    texts = _texts(bases, edits)
    path = write(tmp_path_factory.mktemp("near") / "f.jsonl", *(chat("", text) for text in texts))
    of_each = repeats(path)
    gone = set(of_each)
    for index, of in of_each.items():
        assert of < index and (of not in gone or texts[of] == texts[index] or of_each[of] not in gone)
        assert _jaccard(texts[of], texts[index]) >= LIKE
    firsts = {}
    for index, text in enumerate(texts):
        if firsts.setdefault(text, index) != index:
            assert index in gone, "the same text twice"


def test_repeats_finds_99_percent_of_near_duplicates(tmp_path):
    random_ = random.Random(3)
    texts, pairs = [], 300
    for _ in range(pairs):
        words = [str(random_.randrange(10**6)) for _ in range(120)]
        other = list(words)
        other[random_.randrange(120)] = "changed"
        texts += [" ".join(words), " ".join(other)]
    found = repeats(write(tmp_path / "f.jsonl", *(chat("", text) for text in texts)))
    assert len(found) >= 0.99 * pairs and all(index == of + 1 for index, of in found.items())


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_grams_and_personal_data_accept_any_text(text):
    assert (len(grams(text)) > 0) == any(character.isalnum() for character in text.lower())
    assert all(value in text for _, value in personal_data(text))


# Like Phi 3: a conversation and a turn end with different tokens.
TWO_ENDS = BEGIN + "{{ m['content'] }}" + END + "{% if not add_generation_prompt %}<|pad|>{% endif %}"
# Like GLM: no end token, a turn ends where the next begins.
NO_END = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Like gpt-oss: the last turn has another end token than earlier turns.
RETURNS = (
    BEGIN + "{{ m['content'] }}{% if loop.last and m['role'] == 'assistant' %}<|return|>{% else %}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDS = {RETURNS: "<|return|>", NO_END: "<|user|>"}
TEMPLATES = (CHATML, MARKED, FORGETFUL, OPENS, RETURNS, TWO_ENDS, NO_END)
# Few words, so that answers occur in questions and in each other; also template text, spaces, other scripts.
PHRASES = st.sampled_from(["yes", "no", "yes or no", "a", "assistant", "<|x|>", "  b", "\n", "é", "你好", "end", "1"])
TEXT = st.lists(PHRASES, min_size=1, max_size=4).map(" ".join).filter(str.strip)


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
def test_encode_trains_weighted_answers_after_their_request(template, messages):
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
