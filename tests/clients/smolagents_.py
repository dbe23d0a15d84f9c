"""https://huggingface.co/docs/smolagents/reference/models: OpenAIModel with api_base and api_key."""

from report import BASE_URL, CITY_SCHEMA, KEY, MODEL, QUESTION, tried
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id=MODEL, api_base=BASE_URL, api_key=KEY, max_tokens=64)
ASK = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return "sunny"


def plain():
    assert model.generate(ASK, max_tokens=10).content


def stream():
    assert "".join(part.content or "" for part in model.generate_stream(ASK, max_tokens=8))


def tools():
    answer = model.generate(ASK, tools_to_call_from=[get_weather])
    assert answer.tool_calls[0].function.name == "get_weather"
    # It sends tool_choice "required": every step of the agent is a tool call.
    ToolCallingAgent(tools=[get_weather], model=model, max_steps=1, verbosity_level=0).run(QUESTION)


def schema():
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA}}
    assert "city" in model.generate(ASK, response_format=wanted, max_tokens=40).content


tried(plain, stream, tools, schema)
