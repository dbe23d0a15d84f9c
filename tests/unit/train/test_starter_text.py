"""The starter's pretraining text: deterministic, well-formed, and right where it calculates."""

import itertools
import re

from train.starter.stories import PLACES, story
from train.starter.text import CAPITALS, conversation, documents


def _some(seed: int, count: int):
    return list(itertools.islice(documents(seed), count))


def test_the_same_seed_gives_the_same_documents_and_another_seed_others():
    assert _some(3, 50) == _some(3, 50)
    assert _some(3, 50) != _some(4, 50)


def test_conversations_alternate_and_begin_with_the_user_after_an_optional_system_message():
    for document in _some(0, 400):
        if isinstance(document, str):
            assert document.endswith((".", '"', "!"))
            continue
        roles = [message["role"] for message in document]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and 2 <= len(roles) <= 6
        assert all(message["content"].strip() == message["content"] != "" for message in document)


def test_every_equation_in_the_text_holds():
    text = "\n".join(
        m["content"] for d in _some(1, 3000) if not isinstance(d, str) for m in d if m["role"] == "assistant"
    )
    equations = re.findall(r"(\d+) ([+x/-]) (\d+) = (\d+)", text)
    assert len(equations) > 200
    meaning = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "x": lambda x, y: x * y, "/": lambda x, y: x / y}
    wrong = [e for e in equations if meaning[e[1]](int(e[0]), int(e[2])) != int(e[3])]
    assert not wrong


def test_a_story_is_about_what_was_asked_for():
    import random

    for seed in range(20):
        place = PLACES[seed % len(PLACES)]
        text = story(random.Random(seed), animal="fox", place=place, thing="kite")
        assert "fox" in text and "kite" in text and place.name.removeprefix("the ") in text


def test_documents_do_not_leave_slots_unfilled():
    for document in _some(5, 2000):
        texts = [document] if isinstance(document, str) else [m["content"] for m in document]
        assert not any("{" in text or "}" in text for text in texts)


def test_capitals_are_answered_in_a_full_sentence():
    import random

    seen = set()
    for seed in range(3000):
        for message in conversation(random.Random(seed)):
            match = re.fullmatch(r"The capital of (.+) is (.+)\.", message["content"])
            if match:
                seen.add(match[1])
                assert CAPITALS[match[1]] == match[2]
    assert len(seen) > 20
