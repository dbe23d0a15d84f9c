"""https://docs.litellm.ai/docs/providers/openai_compatible: the model name with the prefix `openai/`, and api_base."""

import json

import litellm
from report import BASE_URL, CITY_SCHEMA, EMBEDDING_MODEL, KEY, MODEL, QUESTION, tried

ASK = [{"role": "user", "content": QUESTION}]
HERE = {"api_base": BASE_URL, "api_key": KEY}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY_SCHEMA}}


def complete(**more):
    return litellm.completion(model=f"openai/{MODEL}", messages=ASK, **HERE, **more)


def plain():
    assert complete(max_tokens=8).choices[0].message.content


def stream():
    assert "".join(chunk.choices[0].delta.content or "" for chunk in complete(max_tokens=8, stream=True))


def tools():
    call = complete(max_tokens=64, tools=[WEATHER], tool_choice="required").choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"]


def schema():
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA, "strict": True}}
    assert json.loads(complete(max_tokens=40, response_format=wanted).choices[0].message.content)["city"]


def responses():
    answer = litellm.responses(model=f"openai/{MODEL}", input=QUESTION, max_output_tokens=8, **HERE)
    assert answer.output[0].content[0].text


def logprobs():
    assert complete(max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs


def embeddings():
    found = litellm.embedding(model=f"openai/{EMBEDDING_MODEL}", input=["one", "two"], **HERE)
    assert len(found.data) == 2


tried(plain, stream, tools, schema, responses, logprobs, embeddings)
