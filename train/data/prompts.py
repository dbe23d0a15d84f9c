"""Converts the records of reinforcement tuning: a conversation that ends with the user, and what a grader compares the
model's answer with.

OpenAI     {"messages": [..., {"role": "user", "content": ...}], "tools"?, "reference_answer": ..., any other field}
"""

from __future__ import annotations

import orjson

from train.data.formats import REFUSES
from train.shapes.messages import read_messages, read_tools, refuse, with_system
from train.shapes.records import BadRecord, Record

MAX_ITEM_BYTES = 1 << 20
"""Of it as JSON: whoever grades has 64 samples at once, each with its item."""
_OF_THE_REQUEST = ("messages", "tools", "functions", "parallel_tool_calls")


def prompt(record: Record) -> Record:
    """{"messages", "tools"?, "item"}: checked messages, and all further fields as `item`, which a grader sees with the
    messages. Raises BadRecord with the reason."""
    refuse(record, REFUSES)
    messages = read_messages(with_system(record.get("messages"), record))
    if messages[-1]["role"] != "user":
        raise BadRecord(
            f"the last message is from {messages[-1]['role']!r}; expected 'user': the model answers while it trains, "
            "and what its answer is compared with belongs in fields next to 'messages'"
        )
    if any("weight" in message for message in messages):
        raise BadRecord("has a message with a 'weight'; nothing of a prompt is trained")
    item = {name: value for name, value in record.items() if name not in _OF_THE_REQUEST}
    if (size := len(orjson.dumps({**item, "messages": messages}))) > MAX_ITEM_BYTES:
        raise BadRecord(f"is {size} bytes long; the limit for what a grader sees is {MAX_ITEM_BYTES}")
    return {"messages": messages, **read_tools(record), "item": item}
