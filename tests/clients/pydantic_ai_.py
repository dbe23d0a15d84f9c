"""https://ai.pydantic.dev/models/openai/: OpenAIChatModel with an OpenAIProvider that has base_url and api_key."""

import asyncio

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import BASE_URL, KEY, MODEL, QUESTION, tried

provider = OpenAIProvider(base_url=BASE_URL, api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider)


class City(BaseModel):
    city: str = Field(max_length=12)


def plain():
    assert Agent(model).run_sync(QUESTION, model_settings={"max_tokens": 10}).output


def stream():
    async def run():
        async with Agent(model).run_stream(QUESTION, model_settings={"max_tokens": 8}) as result:
            return [text async for text in result.stream_text(delta=True)]

    assert "".join(asyncio.run(run()))


def tools():
    # It implements structured output as a forced tool call.
    agent = Agent(model, output_type=City, retries=2)
    assert agent.run_sync(QUESTION, model_settings={"max_tokens": 64}).output.city


def schema():
    agent = Agent(model, output_type=NativeOutput(City))
    assert agent.run_sync(QUESTION, model_settings={"max_tokens": 40}).output.city


def responses():
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider))
    assert agent.run_sync(QUESTION, model_settings={"max_tokens": 16}).output


tried(plain, stream, tools, schema, responses)
