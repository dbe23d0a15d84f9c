"""https://python.useinstructor.com: from_openai around an SDK client, with tools and with a schema."""

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field
from report import MODEL, QUESTION, tried

ASK = [{"role": "user", "content": QUESTION}]


class City(BaseModel):
    city: str = Field(max_length=12)


def extract(mode, **more):
    client = instructor.from_openai(OpenAI(), mode=mode)
    return client.chat.completions.create(
        model=MODEL, messages=ASK, response_model=City, max_tokens=64, max_retries=2, **more
    )


def tools():
    assert extract(instructor.Mode.TOOLS).city


def schema():
    assert extract(instructor.Mode.JSON_SCHEMA).city


def stream():
    client = instructor.from_openai(OpenAI(), mode=instructor.Mode.TOOLS)
    parts = client.chat.completions.create_partial(model=MODEL, messages=ASK, response_model=City, max_tokens=64)
    assert list(parts)[-1].city


def responses():
    client = instructor.from_openai(OpenAI(), mode=instructor.Mode.RESPONSES_TOOLS)
    assert client.responses.create(model=MODEL, input=QUESTION, response_model=City, max_output_tokens=64).city


tried(stream, tools, schema, responses)
