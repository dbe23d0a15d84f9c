"""https://github.com/openai/openai-python: base_url and api_key as arguments or environment variables."""

import base64
import json

from openai import OpenAI
from pydantic import BaseModel, Field
from report import CITY_SCHEMA, EMBEDDING_MODEL, MODEL, QUESTION, tried

client = OpenAI()
ASK = [{"role": "user", "content": QUESTION}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY_SCHEMA}}


class City(BaseModel):
    city: str = Field(max_length=12)


def plain():
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content and answer.usage.completion_tokens > 0
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert MODEL in [model.id for model in client.models.list()]


def stream():
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8, stream=True, stream_options=options)
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage.completion_tokens > 0
    with client.chat.completions.stream(model=MODEL, messages=ASK, temperature=0) as events:
        assert events.get_final_completion().choices[0].message.content


def tools():
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[WEATHER], tool_choice=choice, max_tokens=64
        )
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"]
    back = [*ASK, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(model=MODEL, messages=back, tools=[WEATHER], max_tokens=8).choices
    chunks = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=64, stream=True
    )
    parts = [c.choices[0].delta.tool_calls for c in chunks if c.choices and c.choices[0].delta.tool_calls]
    assert json.loads("".join(part[0].function.arguments or "" for part in parts))["city"]


def schema():
    parsed = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=City, max_tokens=40)
    assert parsed.choices[0].message.parsed.city


def responses():
    answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=12)
    assert answer.output_text
    after = client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=answer.id, max_output_tokens=6
    )
    assert after.previous_response_id == answer.id
    events = list(client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    tool = {"type": "function", "name": "get_weather", "parameters": CITY_SCHEMA}
    called = client.responses.create(
        model=MODEL, input=QUESTION, tools=[tool], tool_choice="required", max_output_tokens=64
    )
    call = next(item for item in called.output if item.type == "function_call")
    assert json.loads(call.arguments)["city"]
    assert client.responses.parse(
        model=MODEL, input=QUESTION, text_format=City, max_output_tokens=40
    ).output_parsed.city


def logprobs():
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=3, logprobs=True, top_logprobs=2)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    scored = client.completions.create(model=MODEL, prompt="Paris is in France", max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == "Paris is in France" and len(scored.choices[0].logprobs.token_logprobs) > 3


def embeddings():
    found = client.embeddings.create(model=EMBEDDING_MODEL, input=["one", "two"])
    assert len(found.data) == 2 and len(found.data[0].embedding) > 10
    coded = client.embeddings.create(model=EMBEDDING_MODEL, input="one", encoding_format="base64")
    assert len(base64.b64decode(coded.data[0].embedding)) == 4 * len(found.data[0].embedding)


tried(plain, stream, tools, schema, responses, logprobs, embeddings)
