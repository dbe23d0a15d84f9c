"""https://github.com/anthropics/anthropic-sdk-python: base_url and api_key as arguments or environment variables."""

import anthropic
from anthropic import Anthropic
from pydantic import BaseModel, Field
from report import CITY_SCHEMA, MODEL, QUESTION, tried

client = Anthropic()
ASK = [{"role": "user", "content": QUESTION}]
WEATHER = {"name": "get_weather", "description": "the weather of a city", "input_schema": CITY_SCHEMA}


class City(BaseModel):
    city: str = Field(max_length=12)


def plain():
    answer = client.messages.create(model=MODEL, max_tokens=12, messages=ASK, system="Be short.")
    assert answer.id.startswith("msg_") and answer.content[0].text and answer.stop_reason and answer._request_id
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, system="Be short.")
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 0
    begun = [*ASK, {"role": "assistant", "content": "The capital of France is"}]
    told = client.messages.create(model=MODEL, max_tokens=4, messages=begun, extra_body={"temperature": 0})
    assert "Paris" in told.content[0].text, told.content
    thinking = {"type": "enabled", "budget_tokens": 1024}
    stops = [".", "!", "?"]
    assert client.messages.create(
        model=MODEL, max_tokens=1040, thinking=thinking, messages=ASK, stop_sequences=stops
    ).content
    try:
        client.messages.create(model="nosuch", max_tokens=1, messages=ASK)
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error" and error.request_id == error.body["request_id"]
    else:
        raise AssertionError("expected an error for a model that does not exist")


def stream():
    with client.messages.stream(model=MODEL, max_tokens=8, messages=ASK) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "text" in kinds, kinds
    assert final.content[0].text and final.usage.output_tokens > 0 and final.id.startswith("msg_")


def tools():
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = client.messages.create(model=MODEL, max_tokens=64, messages=ASK, tools=[WEATHER], tool_choice=choice)
        call = next(part for part in answer.content if part.type == "tool_use")
        assert call.name == "get_weather" and call.input["city"] and answer.stop_reason == "tool_use"
    back = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [back]}]
    assert client.messages.create(model=MODEL, max_tokens=8, messages=messages, tools=[WEATHER]).content
    with client.messages.stream(
        model=MODEL, max_tokens=64, messages=ASK, tools=[WEATHER], tool_choice={"type": "any"}
    ) as events:
        final = events.get_final_message()
    assert final.content[-1].type == "tool_use" and final.content[-1].input["city"], final.content


def schema():
    parsed = client.messages.parse(model=MODEL, max_tokens=40, messages=ASK, output_format=City)
    assert parsed.parsed_output.city


tried(plain, stream, tools, schema)
