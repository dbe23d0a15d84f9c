"""Pairs of outputs in every shape become two chats with one prompt, of which only the outputs are learnt."""

import json
from pathlib import Path

import pytest

from train.data.formats import convert
from train.data.records import BadRecord


def to_pair(record):
    assert (made := convert(record)).shape == "preference"
    return made.record["sequences"]


QUESTION = {"role": "user", "content": "2 and 2?"}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("4", "5"))
OPENAI = {"input": {"messages": [QUESTION]}, "preferred_output": [RIGHT], "non_preferred_output": [WRONG]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    "record",
    [
        OPENAI,
        {"prompt": "2 and 2?", "chosen": "4", "rejected": "5"},
        {"prompt": [QUESTION], "chosen": [RIGHT], "rejected": [WRONG]},
        {"chosen": [QUESTION, RIGHT], "rejected": [QUESTION, WRONG]},
        # As the hub has UltraFeedback: the prompt is repeated as a text.
        {"prompt": "2 and 2?", "chosen": [QUESTION, RIGHT], "rejected": [QUESTION, WRONG]},
        {"prompt": "2 and 2?", "chosen": "4", "rejected": "5", "id": 7, "source": "elsewhere"},
        {
            "conversations": [{"from": "human", "value": "2 and 2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "5"},
        },
        {"conversations": [{"from": "human", "value": "2 and 2?"}], "chosen": "4", "rejected": "5"},
    ],
    ids=["openai", "texts", "messages", "implicit", "repeated", "more-columns", "sharegpt", "sharegpt-texts"],
)
def test_every_shape_is_the_same_pair(record):
    chosen, rejected = to_pair(record)
    assert chosen == {"messages": [QUESTION, RIGHT | {"weight": 1}]}
    assert rejected == {"messages": [QUESTION, WRONG | {"weight": 1}]}


def test_the_pairs_in_the_docs_are_pairs():
    page = (Path(__file__).parents[3] / "docs" / "dpo.md").read_text()
    lines = page.partition("```json\n")[2].partition("```")[0].splitlines()
    assert len(lines) == 3 and all(to_pair(json.loads(line)) == to_pair(OPENAI) for line in lines)


def test_only_outputs_are_learnt_and_tools_are_kept():
    before = [QUESTION, RIGHT | {"weight": 1}, {"role": "user", "content": "more"}]
    called = {"role": "assistant", "tool_calls": [CALL]}
    answer = {"role": "tool", "tool_call_id": "1", "content": "4"}
    record = {
        "input": {"messages": before, "tools": TOOLS, "parallel_tool_calls": False},
        "preferred_output": [called, answer, RIGHT],
        "non_preferred_output": [WRONG],
    }
    chosen, rejected = to_pair(record)
    assert [m.get("weight") for m in chosen["messages"]] == [None, 0, None, 1, None, 1]
    assert [m.get("weight") for m in rejected["messages"]] == [None, 0, None, 1]
    assert chosen["tools"] == rejected["tools"] == TOOLS
    implicit = to_pair({"chosen": "Q: a\nA: yes", "rejected": "Q: a\nA: no"})
    assert [m["content"] for m in implicit[0]["messages"]] == ["Q: a\nA:", " yes"]


@pytest.mark.parametrize(
    "record, reason",
    [
        (OPENAI | {"non_preferred_output": [dict(RIGHT)]}, "both outputs are the same"),
        ({"chosen": [QUESTION, RIGHT], "rejected": [{"role": "user", "content": "2 and 3?"}, WRONG]}, "prompts differ"),
        ({"chosen": "yes", "rejected": "no"}, "no prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": [WRONG]}, "both texts or both lists"),
        ({"chosen": '{"messages": [1]}', "rejected": '{"messages": [2]}'}, "'chosen' is the JSON text of messages"),
        (OPENAI | {"preferred_output": []}, "'preferred_output' is empty"),
        (OPENAI | {"image": "a.png"}, "has 'image'"),
        (OPENAI | {"preferred_output": [QUESTION]}, r"preferred_output\[0\] is from 'user'"),
        (OPENAI | {"input": {"messages": [QUESTION, RIGHT]}}, "prompt ends with a message from 'assistant'"),
        (OPENAI | {"preferred_output": [{"role": "assistant", "content": [{"type": "image_url"}]}]}, "only text"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(record, reason):
    with pytest.raises(BadRecord, match=reason):
        to_pair(record)
