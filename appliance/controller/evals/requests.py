"""Defines what a request for an evaluation or a run may contain, and the request body that makes a sample of an
item."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from appliance.controller.http.strict_body import StrictBody
from train.graders import templates
from train.graders.errors import GradingErrors, GradingFailed, InvalidGrader
from train.graders.graders import DEFAULT_ANSWER_TOKENS, MAX_PARTS, MAX_VARIABLES, Grader, parts_of, texts
from train.graders.templates import Sample

MAX_CRITERIA = 32
MAX_ITEMS = 10_000
MAX_DATA_BYTES = 64 << 20
MAX_ENTRY_BYTES = 1 << 20
MAX_SCHEMA_BYTES = 1 << 20
MAX_CRITERIA_BYTES = 2 << 20
MAX_SOURCE_BYTES = 256 << 10
"""The size of a run without its items; its row is written again for every item that is judged."""
JSONL = "jsonl"
ROW_BYTES, ITEM_BYTES = 4096, 256
"""The bytes that a run and an item take in addition to their texts: 10,000 items of 11 bytes are 3 MB on the disk."""
Text = Annotated[str, Field(max_length=templates.MAX_TEXT)]


class CustomConfig(StrictBody):
    type: Literal["custom"]
    item_schema: dict[str, Any]
    include_sample_schema: bool = False


class EvalCreate(StrictBody):
    data_source_config: CustomConfig
    testing_criteria: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_CRITERIA)]
    name: Annotated[str, Field(max_length=512)] | None = None
    metadata: dict[str, str] | None = None


class EvalUpdate(StrictBody):
    name: Annotated[str, Field(max_length=512)] | None = None
    metadata: dict[str, str] | None = None


class Entry(StrictBody):
    item: dict[str, Any]
    sample: dict[str, Any] | None = None


class FileContent(StrictBody):
    type: Literal["file_content"]
    content: Annotated[list[Entry], Field(max_length=MAX_ITEMS)]
    """Empty once the items have rows of their own, see `without_items`."""


class FileId(StrictBody):
    type: Literal["file_id"]
    id: Annotated[str, Field(min_length=1, max_length=256)]


Source = Annotated[FileContent | FileId, Field(discriminator="type")]


class _Part(StrictBody):
    type: Literal["input_text", "output_text", "text"]
    text: Text


class Message(StrictBody):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | _Part | Annotated[list[Text | _Part], Field(max_length=MAX_PARTS)]
    type: Literal["message"] | None = None

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in parts_of(self.content, ""))


class Template(StrictBody):
    type: Literal["template"]
    template: Annotated[list[Message], Field(min_length=1, max_length=64)]


class ItemReference(StrictBody):
    type: Literal["item_reference"]
    item_reference: Annotated[str, Field(min_length=1, max_length=512)]


class TextFormat(StrictBody):
    format: dict[str, Any] | None = None


class Sampling(StrictBody):
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    # As OpenAI's own examples spell it.
    max_completions_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    response_format: dict[str, Any] | None = None
    text: TextFormat | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None


class Jsonl(StrictBody):
    type: Literal["jsonl"]
    source: Source


class Sampled(StrictBody):
    """`completions` and `responses` differ in how tools and formats are written."""

    type: Literal["completions", "responses"]
    source: Source
    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    input_messages: Annotated[Template | ItemReference, Field(discriminator="type")] | None = None
    sampling_params: Sampling | None = None


class RunCreate(StrictBody):
    data_source: Annotated[Jsonl | Sampled, Field(discriminator="type")]
    name: Annotated[str, Field(max_length=512)] | None = None
    metadata: dict[str, str] | None = None


def size_of(source: dict[str, Any]) -> int:
    """Bytes of a run's data source as JSON."""
    return len(orjson.dumps(source))


def own_bytes(source: dict[str, Any]) -> int:
    """What the row of a run takes beside its items."""
    return size_of(without_items(source)) + ROW_BYTES


def without_items(source: dict[str, Any]) -> dict[str, Any]:
    """A run's data source as it is shown, and as it is stored once its items have rows."""
    if source["source"].get("type") != "file_content":
        return source
    return {**source, "source": {**source["source"], "content": []}}


def check_source(source: dict[str, Any]) -> None:
    """Raises InvalidGrader, whose `param` is below `data_source`."""
    if source["source"].get("type") == "file_content" and not source["source"]["content"]:
        raise InvalidGrader("source.content", "has no items")
    if (size := size_of(without_items(source))) > MAX_SOURCE_BYTES:
        raise InvalidGrader("", f"has {size} bytes besides its items; at most {MAX_SOURCE_BYTES} are taken")


def check_eval(body: EvalCreate) -> None:
    """Raises InvalidGrader, whose `param` is below the body."""
    for param, value, most in (
        ("data_source_config.item_schema", body.data_source_config.item_schema, MAX_SCHEMA_BYTES),
        ("testing_criteria", body.testing_criteria, MAX_CRITERIA_BYTES),
    ):
        if (size := len(orjson.dumps(value))) > most:
            raise InvalidGrader(param, f"has {size} bytes; at most {most} are taken")
    if (variables := orjson.dumps(body.testing_criteria).count(b"{{")) > MAX_VARIABLES:
        raise InvalidGrader("testing_criteria", f"has {variables} times '{{{{'; at most {MAX_VARIABLES} are taken")


def check_variables(grader: Grader, config: CustomConfig) -> None:
    """Raises InvalidGrader for a template that names a field that no item has by its schema, or no sample has."""
    no_sample = "" if config.include_sample_schema else _NO_SAMPLES
    for param, text in texts(grader):
        _check_names(param, text, config.item_schema, no_sample)


_NO_SAMPLES = "'data_source_config.include_sample_schema' is not true"
_NOT_YET = "no sample is there before the model is asked"


def _check_names(param: str, text: str, schema: dict[str, Any], no_sample: str) -> None:
    """no_sample: why there is no sample, "" if there is one. Raises InvalidGrader."""
    for namespace, *steps in templates.variables(text):
        if namespace == "sample":
            if no_sample:
                raise InvalidGrader(param, f"names 'sample.{steps[0]}', and {no_sample}")
        elif lacks := _lacking(steps, schema):
            raise InvalidGrader(
                param, f"names 'item.{lacks}', which is no property of the eval's 'data_source_config.item_schema'"
            )


def _lacking(steps: list[str], schema: Any) -> str:
    """The path to the first step that is certainly not a property by a JSON schema, "" if there is none."""
    for place, step in enumerate(steps, 1):
        known = schema.get("properties") if isinstance(schema, dict) else None
        if not isinstance(known, dict) or not known or any(schema.get(name, False) is not False for name in _FURTHER):
            return ""
        if step not in known:
            return ".".join(steps[:place])
        schema = known[step]
    return ""


_FURTHER = ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
"""With these a schema may say more of an object's properties than `properties` does."""


def _asked(messages: Template | ItemReference, param: str) -> list[tuple[str, str]]:
    """(path, text) of the messages to a model; a reference to an item appears as the variable that it is."""
    if isinstance(messages, ItemReference):
        return [(f"{param}.item_reference", f"{{{{{messages.item_reference}}}}}")]
    return [
        found
        for place, message in enumerate(messages.template)
        for found in parts_of(message.content, f"{param}.template.{place}.content")
    ]


def check_sampled(source: Sampled, schema: dict[str, Any]) -> None:
    """schema: of the eval's items. Raises InvalidGrader, whose `param` is below `data_source`."""
    if source.model is None:
        raise InvalidGrader("model", "is missing; it says which model of the box is to answer")
    if source.input_messages is None:
        raise InvalidGrader("input_messages", "is missing; it says what the model is asked for each item")
    if isinstance(source.input_messages, Template):
        # Filled in for each item.
        if (variables := sum(one.text.count("{{") for one in source.input_messages.template)) > MAX_VARIABLES:
            raise InvalidGrader("input_messages", f"has {variables} times '{{{{'; at most {MAX_VARIABLES} are taken")
    elif "{" in source.input_messages.item_reference:
        raise InvalidGrader(
            "input_messages.item_reference",
            "is a template, and names a list of messages: item.messages, without braces",
        )
    for path, text in _asked(source.input_messages, "input_messages"):
        templates.check(text, path)
        _check_names(path, text, schema, _NOT_YET)
    for place, tool in enumerate((source.sampling_params.tools if source.sampling_params else None) or []):
        if tool.get("type") != "function":
            raise InvalidGrader(f"sampling_params.tools.{place}", "is not a function; a box runs no tools of its own")


def body_of(source: Sampled, item: dict[str, Any]) -> dict[str, Any]:
    """The chat completion that makes the sample. Raises GradingFailed when the item lacks a variable."""
    return {"model": source.model, "messages": _messages(source, item), **fields_of(source)}


def fields_of(source: Sampled) -> dict[str, Any]:
    """What the chat completions of all items have in common."""
    sampling = source.sampling_params or Sampling()
    given = ("temperature", "top_p", "seed", "reasoning_effort", "response_format")
    most = sampling.max_completion_tokens or sampling.max_completions_tokens
    fields = {
        "max_completion_tokens": most or DEFAULT_ANSWER_TOKENS,
        **{name: value for name in given if (value := getattr(sampling, name)) is not None},
    }
    if sampling.text is not None and sampling.text.format is not None:
        fields["response_format"] = _format(sampling.text.format)
    if sampling.tools:
        fields["tools"] = [tool if "function" in tool else chat_tool(tool) for tool in sampling.tools]
    return fields


def chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A function tool of /v1/responses, as chat completions have it."""
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _messages(source: Sampled, item: dict[str, Any]) -> list[dict[str, Any]]:
    empty, size = Sample(""), 0
    if isinstance(source.input_messages, ItemReference):
        found = templates.value(source.input_messages.item_reference, empty, item)
        if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
            raise GradingFailed(f"{source.input_messages.item_reference} is not a list of messages", _LACKS)
        return found
    assert source.input_messages is not None
    messages = []
    for message in source.input_messages.template:
        content = templates.fill(message.text, empty, item)
        if (size := size + len(content)) > templates.MAX_TEXT:
            raise GradingFailed(
                f"the messages are longer than {templates.MAX_TEXT} characters",
                GradingErrors(other_error=True),
            )
        messages.append({"role": message.role, "content": content})
    return messages


def _format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema" or "json_schema" in given:
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def sample_of(given: dict[str, Any] | None) -> Sample:
    """The sample of an entry of the data: `output_text`, or the message of its first choice."""
    given = given or {}
    choices = given.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    message = message if isinstance(message, dict) else {}
    text = given.get("output_text", message.get("content"))
    tools = given.get("output_tools", message.get("tool_calls"))
    return Sample(
        text if isinstance(text, str) else json.dumps(text) if text else "", tools if isinstance(tools, list) else []
    )


_LACKS = GradingErrors(invalid_variable_error=True)
