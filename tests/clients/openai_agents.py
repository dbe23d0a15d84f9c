"""https://openai.github.io/openai-agents-python/models/: a default SDK client, chat completions or Responses."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from report import MODEL, QUESTION, tried

set_tracing_disabled(True)


class City(BaseModel):
    city: str = Field(max_length=12)


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return "sunny"


called: list[str] = []


def agent(made=OpenAIChatCompletionsModel, tokens=10, **more):
    settings = ModelSettings(max_tokens=tokens, tool_choice="required" if more.get("tools") else None)
    return Agent(name="a", model=made(model=MODEL, openai_client=AsyncOpenAI()), model_settings=settings, **more)


def run(one):
    return asyncio.run(Runner.run(one, QUESTION)).final_output


def plain():
    assert run(agent())


def stream():
    async def events():
        result = Runner.run_streamed(agent(tokens=8), QUESTION)
        return [event async for event in result.stream_events()]

    assert asyncio.run(events())


def tools():
    run(agent(tokens=64, tools=[get_weather]))
    assert called


def schema():
    assert run(agent(tokens=40, output_type=City)).city


def responses():
    assert run(agent(OpenAIResponsesModel, tokens=128))
    before = len(called)
    run(agent(OpenAIResponsesModel, tokens=64, tools=[get_weather]))
    assert len(called) > before


tried(plain, stream, tools, schema, responses)
