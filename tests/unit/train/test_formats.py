"""Conversion of rows with all known field names: conversations, and preference pairs whose outputs are trained."""

import json
from pathlib import Path

import pytest

from train.data import messages
from train.data.formats import convert
from train.data.records import BadRecord, NoAnswer, parse

ASK, ANSWER = {"role": "user", "content": "3?"}, {"role": "assistant", "content": "12"}
TOOL = {"name": "gauge", "parameters": {"type": "object"}}


def read_messages(turns):
    return messages.read_messages(turns, set())


def call(identity: str, line: int, name: str = "gauge") -> dict:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": json.dumps({"line": line})}}


@pytest.mark.parametrize(
    "given",
    [
        {"tool_calls": [call("call_1", 3)]},
        {"tool_calls": json.dumps([call("call_1", 3)])},
        {"tool_calls": [{"name": "gauge", "arguments": {"line": 3}}]},
        {"function_call": {"name": "gauge", "arguments": '{"line": 3}'}},
    ],
)
@pytest.mark.parametrize("result", [{"tool_call_id": "call_1"}, {"name": "gauge"}, {}])
def test_read_messages_converts_every_tool_call_format(given, result):
    turns = [ASK, {"role": "assistant", **given}, {"role": "tool", "content": "12", **result}, ANSWER]
    made = read_messages(turns)
    assert made[1] == {"role": "assistant", "content": "", "tool_calls": [call("call_1", 3)]}
    assert made[2]["tool_call_id"] == "call_1"


def test_read_messages_joins_consecutive_calls_and_orders_results():
    said = [json.dumps({"name": "gauge", "arguments": {"line": line}}) for line in (1, 2)]
    turns = [
        {"from": "human", "value": "both?"},
        {"from": "gpt", "value": "I look."},
        *({"from": "function_call", "value": text} for text in said),
        {"from": "observation", "value": "7"},
        {"from": "observation", "value": "9"},
        {"from": "gpt", "value": "7 and 9."},
    ]
    made = read_messages(turns)
    assert made[1] == {"role": "assistant", "content": "I look.", "tool_calls": [call("call_1", 1), call("call_2", 2)]}
    assert [message["tool_call_id"] for message in made[2:4]] == ["call_1", "call_2"]
    listed = [turns[0], {"from": "function_call", "value": f"[{', '.join(said)}]"}, *turns[4:]]
    assert read_messages(listed)[1]["tool_calls"] == made[1]["tool_calls"]


def test_read_messages_matches_results_to_calls_by_name():
    calls = {"role": "assistant", "tool_calls": [call("a", 1), call("b", 2, "scale")]}
    results = [{"role": "tool", "name": name, "content": "1"} for name in ("scale", "gauge")]
    made = read_messages([ASK, calls, *results, ANSWER])
    assert [message["tool_call_id"] for message in made[2:4]] == ["b", "a"]
    with pytest.raises(BadRecord, match="'clock'; expected one of the calls before it: 'gauge', 'scale'"):
        read_messages([ASK, calls, results[0] | {"name": "clock"}])


@pytest.mark.parametrize("key", ["weight", "train", "loss", "loss_mask", "training"])
@pytest.mark.parametrize("off", [0, False])
def test_read_messages_accepts_every_weight_field_name(key, off):
    turns = [{"from": "human", "value": "a", key: off}, {"from": "gpt", "value": "b", key: off}]
    assert [message.get("weight") for message in read_messages(turns)] == [None, 0]
    with pytest.raises(BadRecord, match="nothing to learn"):
        convert({"conversations": turns})
    with pytest.raises(BadRecord, match="expected 0 or 1, on assistant messages only"):
        read_messages([turns[0] | {key: 1}])
    with pytest.raises(BadRecord, match="expected 0 or 1"):
        read_messages([turns[1] | {key: 0.5}])


def test_read_messages_accepts_reasoning_and_refusals():
    made = read_messages([ASK, ANSWER | {"thinking": "hm"}, ASK, {"role": "assistant", "refusal": "No."}])
    assert made[1]["reasoning_content"] == "hm" and made[3]["content"] == "No."
    with pytest.raises(BadRecord, match="both 'reasoning' and 'thinking'"):
        read_messages([ASK, ANSWER | {"thinking": "hm", "reasoning": "oh"}])
    with pytest.raises(NoAnswer):
        read_messages([ASK, {"role": "assistant", "content": None}])


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASK, ANSWER], "system": "Be brief."},
        {"conversation": [{"from": "human", "value": "3?"}, {"from": "gpt", "value": "12"}], "system": "Be brief."},
        {"conversations": [ASK, ANSWER], "system_prompt": "Be brief."},
        {"prompt": "3?", "completion": "12", "system": "Be brief."},
        {"prompt": [ASK], "completion": [ANSWER], "system": "Be brief."},
        {"question": "3?", "response": "12", "system_prompt": "Be brief."},
        {"instruction": "3?", "output": "12", "system": "Be brief.", "input": None},
    ],
)
def test_convert_turns_every_system_prompt_field_into_message(record):
    assert convert(record).record == {"messages": [SYSTEM, ASK, ANSWER]}


def test_convert_does_not_train_answers_in_prompt():
    record = {"prompt": [ASK, ANSWER, ASK], "completion": "13"}
    made = convert(record).record["messages"]
    assert [message.get("weight") for message in made] == [None, 0, None, None]


def test_left_out_includes_keys_of_parts_and_calls():
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "3?", "cache": 1}]},
        {"role": "assistant", "tool_calls": [{**call("a", 3), "index": 0}], "empty": []},
        ANSWER,
    ]
    assert convert({"messages": turns}).left_out == {"messages[].content[].cache", "messages[].tool_calls.index"}


def test_parse_decodes_nested_json_and_replaces_nan():
    assert parse(json.dumps({"messages": json.dumps([ASK, ANSWER])}).encode()) == {"messages": [ASK, ANSWER]}
    assert parse(b'{"a": NaN, "b": ["NaN", NaN]}') == {"a": None, "b": ["NaN", None]}
    assert parse(b'{"a": "NaN: \\u003a"}') == {"a": "NaN: :"}


def test_convert_drops_null_padding_of_tools_and_arguments():
    schema = {"type": "object", "properties": {"line": {"type": "integer"}, "crane": None}, "required": None}
    tool = {"name": "gauge", "input_schema": json.dumps(schema)}
    calls = {"role": "assistant", "tool_calls": [{"name": "gauge", "input": {"line": None, "crane": None}}]}
    turns = [ASK, calls, {"role": "tool_response", "content": "1"}, ANSWER]
    made = convert({"messages": turns, "tools": [tool]}).record
    parameters = {"type": "object", "properties": {"line": {"type": "integer"}}}
    assert made["tools"][0]["function"] == {"name": "gauge", "parameters": parameters}
    assert made["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"line": null}'


@pytest.mark.parametrize("given", [json.dumps('{"line": 3}'), {"line": 3}, '{"line": 3}'])
@pytest.mark.parametrize("key", ["arguments", "parameters", "input", "args"])
def test_read_messages_accepts_every_arguments_field_name(given, key):
    made = read_messages([ASK, {"role": "assistant", "tool_calls": [{"name": "gauge", key: given}]}])
    assert made[1]["tool_calls"] == [call("call_1", 3)]


@pytest.mark.parametrize("given", [None, "", " ", "null", "{}"])
def test_read_messages_turns_empty_arguments_into_object(given):
    made = read_messages([ASK, {"role": "assistant", "tool_calls": [{"name": "gauge", "arguments": given}]}])
    assert made[1]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("given", [[1], "[1]", "{a: 1}"])
def test_read_messages_rejects_arguments_that_are_not_an_object(given):
    with pytest.raises(BadRecord, match="'gauge'"):
        read_messages([ASK, {"role": "assistant", "tool_calls": [{"name": "gauge", "arguments": given}]}])


# -- pairs


def to_pair(record):
    assert (made := convert(record)).shape == "preference"
    return made.record["sequences"]


QUESTION = {"role": "user", "content": "2 and 2?"}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("4", "5"))
OPENAI = {"input": {"messages": [QUESTION]}, "preferred_output": [RIGHT], "non_preferred_output": [WRONG]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ADD = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    "record",
    [
        OPENAI,
        {"prompt": "2 and 2?", "chosen": "4", "rejected": "5"},
        {"prompt": [QUESTION], "chosen": [RIGHT], "rejected": [WRONG]},
        {"chosen": [QUESTION, RIGHT], "rejected": [QUESTION, WRONG]},
        # Like UltraFeedback on the hub: the prompt is repeated as text.
        {"prompt": "2 and 2?", "chosen": [QUESTION, RIGHT], "rejected": [QUESTION, WRONG]},
        {"prompt": "2 and 2?", "chosen": "4", "rejected": "5", "id": 7, "source": "elsewhere"},
        {
            "conversations": [{"from": "human", "value": "2 and 2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "5"},
        },
        {"conversations": [{"from": "human", "value": "2 and 2?"}], "chosen": "4", "rejected": [WRONG]},
        {side: f"Human: 2 and 2?\n\nAssistant: {n}" for side, n in (("chosen", 4), ("rejected", 5))},
    ],
    ids=["openai", "texts", "messages", "implicit", "repeated", "more-columns", "sharegpt", "mixed", "dialogues"],
)
def test_to_pair_converts_every_shape_equally(record):
    chosen, rejected = to_pair(record)
    assert chosen == {"messages": [QUESTION, RIGHT | {"weight": 1}]}
    assert rejected == {"messages": [QUESTION, WRONG | {"weight": 1}]}


def test_to_pair_accepts_pairs_in_docs():
    page = (Path(__file__).parents[3] / "docs" / "dpo.md").read_text()
    lines = page.partition("```json\n")[2].partition("```")[0].splitlines()
    assert len(lines) == 3 and all(to_pair(json.loads(line)) == to_pair(OPENAI) for line in lines)


def test_to_pair_trains_only_outputs_and_keeps_tools():
    before = [QUESTION, RIGHT | {"weight": 1}, {"role": "user", "content": "more"}]
    called = {"role": "assistant", "tool_calls": [ADD]}
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
        ({"chosen": '{"messages": [1]}', "rejected": '{"messages": [2]}'}, "'chosen' is the JSON text of messages"),
        (OPENAI | {"preferred_output": []}, "'preferred_output' is empty"),
        (OPENAI | {"image": "a.png"}, "has 'image'"),
        (OPENAI | {"preferred_output": [QUESTION]}, r"preferred_output\[0\] is from 'user'"),
        (OPENAI | {"input": {"messages": [QUESTION, RIGHT]}}, "prompt ends with a message from 'assistant'"),
        (OPENAI | {"preferred_output": [{"role": "assistant", "content": [{"type": "image_url"}]}]}, "only text"),
    ],
)
def test_to_pair_rejects_incomparable_outputs_with_reason(record, reason):
    with pytest.raises(BadRecord, match=reason):
        to_pair(record)
