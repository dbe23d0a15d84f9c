"""https://inspect.aisi.org.uk/providers.html#openai-compatible: openai-api/NAME/MODEL, NAME_BASE_URL and _API_KEY."""

import asyncio
import os
import tempfile

from report import BASE_URL, CITY_SCHEMA, KEY, MODEL, QUESTION, tried

os.environ |= {"BOX_BASE_URL": BASE_URL, "BOX_API_KEY": KEY, "INSPECT_LOG_DIR": tempfile.mkdtemp()}

from inspect_ai import Task, eval  # noqa: A004, E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model  # noqa: E402
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.tool import tool  # noqa: E402
from inspect_ai.util import JSONSchema  # noqa: E402

NAME = f"openai-api/box/{MODEL}"


@tool
def get_weather():
    async def execute(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        return "sunny"

    return execute


def generate(more=None, tools=(), choice=None, **model_args):
    async def run():
        model = get_model(NAME, memoize=False, **model_args)
        return await model.generate(
            QUESTION, tools=list(tools), tool_choice=choice, config=GenerateConfig(**(more or {}))
        )

    return asyncio.run(run())


def plain():
    task = Task(dataset=[Sample(QUESTION, target="Paris")], scorer=includes(), config=GenerateConfig(max_tokens=12))
    (log,) = eval(task, model=NAME, display="none")
    assert log.status == "success", log.error


def tools():
    answer = generate({"max_tokens": 64}, [get_weather()], "any")
    assert answer.message.tool_calls[0].function == "get_weather"


def schema():
    wanted = ResponseSchema(name="city", json_schema=JSONSchema(**CITY_SCHEMA))
    assert "city" in generate({"max_tokens": 40, "response_schema": wanted}).completion


def responses():
    assert generate({"max_tokens": 16}, responses_api=True).completion


def logprobs():
    assert generate({"max_tokens": 3, "logprobs": True, "top_logprobs": 2}).choices[0].logprobs.content


tried(plain, tools, schema, responses, logprobs)
