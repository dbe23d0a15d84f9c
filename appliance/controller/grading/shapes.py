"""Evaluations, runs and their items in the form of OpenAI's API (openai 3.52, `types/evals`): fields of requests, the
chat completion that makes an item's sample, and the objects in answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from appliance.controller.context.tasks import TaskFailed
from appliance.controller.http.resource import object_of
from appliance.controller.http.routers import Metadata, StrictBody, json_of
from appliance.controller.interfaces.errors import first_error
from appliance.store.rows import EvalItemRow, EvalRow, EvalRunRow
from train.data.records import MARK
from train.graders import graders, templates
from train.graders.errors import GradingErrors, GradingFailed, InvalidGrader
from train.graders.graders import ModelAnswer
from train.graders.templates import Sample

MAX_CRITERIA = 32
MAX_ITEMS = 10_000
MAX_DATA_BYTES = 64 << 20
MAX_ENTRY_BYTES = 1 << 20
NO_ERROR = {"code": "", "message": ""}
"""The SDK's types have an error in every run and sample; without a failure, it is empty."""


class CustomConfig(StrictBody):
    type: Literal["custom"]
    item_schema: dict[str, Any]
    include_sample_schema: bool = False


class EvalUpdate(StrictBody):
    name: Annotated[str, Field(max_length=512)] | None = None
    metadata: Metadata | None = None


class EvalCreate(EvalUpdate):
    data_source_config: CustomConfig
    testing_criteria: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_CRITERIA)]


class Entry(StrictBody):
    item: dict[str, Any]
    sample: dict[str, Any] | None = None


class FileContent(StrictBody):
    type: Literal["file_content"]
    content: Annotated[list[Entry], Field(max_length=MAX_ITEMS)]


class FileId(StrictBody):
    type: Literal["file_id"]
    id: Annotated[str, Field(min_length=1, max_length=256)]


class Template(StrictBody):
    type: Literal["template"]
    template: Annotated[list[graders.Message], Field(min_length=1, max_length=64)]


class ItemReference(StrictBody):
    type: Literal["item_reference"]
    item_reference: Annotated[str, Field(min_length=1, max_length=512)]


class TextFormat(StrictBody):
    format: dict[str, Any] | None = None


class Sampling(graders.Sampling):
    response_format: dict[str, Any] | None = None
    text: TextFormat | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None


class Jsonl(StrictBody):
    type: Literal["jsonl"]
    source: Annotated[FileContent | FileId, Field(discriminator="type")]


class Sampled(StrictBody):
    """Data that a model samples. `completions` and `responses` differ in the form of tools and formats."""

    type: Literal["completions", "responses"]
    source: Annotated[FileContent | FileId, Field(discriminator="type")]
    model: Annotated[str, Field(min_length=1, max_length=512)]
    input_messages: Annotated[Template | ItemReference, Field(discriminator="type")]
    sampling_params: Sampling | None = None


class RunCreate(EvalUpdate):
    data_source: Annotated[Jsonl | Sampled, Field(discriminator="type")]


def without_items(source: dict[str, Any]) -> dict[str, Any]:
    """Return a run's data source without items, as the API shows it and as it is stored after the run's end."""
    if source["source"].get("type") != "file_content":
        return source
    return {**source, "source": {**source["source"], "content": []}}


def check_sampled(source: Sampled) -> None:
    """Check a data source that a model samples. Raises InvalidGrader, with a `param` relative to `data_source`."""
    messages = source.input_messages
    if isinstance(messages, Template):
        turns = enumerate(messages.template)
        texts = [(f"template.{at}.content", part) for at, message in turns for part in message.parts()]
    elif "{" in messages.item_reference:
        raise InvalidGrader("input_messages.item_reference", "names a list of messages, without braces: item.messages")
    else:
        texts = [("item_reference", f"{{{{{messages.item_reference}}}}}")]
    for place, text in texts:
        templates.check(text, param := f"input_messages.{place}")
        if any(namespace == "sample" for namespace, *_ in templates.variables(text)):
            raise InvalidGrader(param, "names a sample, but there is no sample before the model answers")
    for place, tool in enumerate((source.sampling_params and source.sampling_params.tools) or []):
        if tool.get("type") != "function":
            raise InvalidGrader(f"sampling_params.tools.{place}", "is not a function; a box runs no tools of its own")


def body_of(source: Sampled, item: dict[str, Any]) -> dict[str, Any]:
    """Return the chat completion request for an item's sample. Raises GradingFailed if the item lacks a variable."""
    return {"model": source.model, "messages": _messages(source.input_messages, item), **fields_of(source)}


def fields_of(source: Sampled) -> dict[str, Any]:
    """Return the fields that the chat completions of all items share."""
    sampling = source.sampling_params or Sampling()
    fields = {"max_completion_tokens": sampling.most_tokens, **sampling.fields()}
    if sampling.response_format is not None:
        fields["response_format"] = sampling.response_format
    if sampling.text is not None and sampling.text.format is not None:
        fields["response_format"] = _nested(sampling.text.format, "json_schema")
    if sampling.tools:
        fields["tools"] = [_nested(tool, "function") for tool in sampling.tools]
    return fields


def _nested(value: dict[str, Any], kind: str) -> dict[str, Any]:
    """Convert a tool or a format of /v1/responses to the form of chat completions."""
    if value.get("type") != kind or kind in value:
        return value
    return {"type": kind, kind: {name: field for name, field in value.items() if name != "type"}}


def _messages(messages: Template | ItemReference, item: dict[str, Any]) -> list[dict[str, Any]]:
    empty = Sample("")
    if isinstance(messages, Template):
        return graders.filled(messages.template, empty, item)
    turns = templates.value(messages.item_reference, empty, item)
    if not isinstance(turns, list) or not all(isinstance(message, dict) for message in turns):
        lacks = GradingErrors(invalid_variable_error=True)
        raise GradingFailed(f"{messages.item_reference} is not a list of messages", lacks)
    return turns


def sample_of(fields: dict[str, Any] | None) -> Sample:
    """Return the sample in an entry of the data: `output_text`, or the message of its first choice."""
    fields = fields or {}
    choices = fields.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    message = message if isinstance(message, dict) else {}
    text = fields.get("output_text", message.get("content"))
    tools = fields.get("output_tools", message.get("tool_calls"))
    return Sample(
        text if isinstance(text, str) else json.dumps(text) if text else "", tools if isinstance(tools, list) else []
    )


def entries(path: Path) -> Iterator[Entry]:
    """Yield the entries of a JSONL file. Raises TaskFailed."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(partial(file.readline, MAX_ENTRY_BYTES + 1), b""), 1):
                if number > MAX_ITEMS:
                    raise TaskFailed("invalid_data", f"The file has more than {MAX_ITEMS} lines.")
                if len(line) > MAX_ENTRY_BYTES:
                    raise TaskFailed("invalid_data", f"Line {number} is longer than {MAX_ENTRY_BYTES} bytes.")
                if text := line.removeprefix(MARK).strip():
                    yield _entry(number, text)
    except OSError as error:
        raise TaskFailed("file_unreadable", f"The file could not be read: {error}") from None


def _entry(number: int, line: bytes) -> Entry:
    """Parse a line of the file. Raises TaskFailed."""
    data, why = json_of(line)  # orjson, because pydantic's parser accepts NaN, and integers that no engine takes
    if why:
        raise TaskFailed("invalid_data", f"Line {number} is not JSON: {why}.")
    try:
        return Entry.model_validate(data)
    except ValidationError as error:
        first = first_error(error.errors(include_url=False, include_input=False))
        where = ".".join(map(str, first["loc"])) or "the line"
        why = f'is not {{"item": {{...}}, "sample": {{...}}}}: {where}: {first["msg"]}'
        raise TaskFailed("invalid_data", f"Line {number} {why}.") from None


# --- objects


def eval_object(row: EvalRow) -> dict[str, Any]:
    sample = {"sample": {"type": "object"}} if row.include_sample else {}
    properties: dict[str, Any] = {"item": row.item_schema, **sample}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    config = {"type": "custom", "schema": schema}
    return object_of(row, "eval", "name metadata", data_source_config=config, testing_criteria=row.criteria)


def run_object(row: EvalRunRow, url: str, waits_for: str = "") -> dict[str, Any]:
    """Return OpenAI's object of a run, plus `waits_for` (why it does not proceed) and each criterion's mean reward."""
    counts = {"passed": "pass", "failed": "fail", "errored": "error"}
    return object_of(
        row,
        "eval.run",
        "eval_id name model status metadata",
        waits_for=waits_for or None,
        data_source=without_items(row.data_source),
        error=row.error or NO_ERROR,
        # The URL is the web page's, which asks for a key: a browser cannot send a key to the API's URL.
        report_url=f"{url}/ui#/evals/{row.eval_id}/{row.id}",
        result_counts={"total": row.total, **{name: row.counts.get(status, 0) for name, status in counts.items()}},
        per_testing_criteria_results=[
            {
                "testing_criteria": name,
                "passed": of.get("passed", 0),
                "failed": of.get("failed", 0),
                "mean_reward": of["reward"] / of["rewarded"] if of.get("rewarded") else None,
            }
            for name, of in row.results.items()
        ],
        per_model_usage=[
            {"model_name": model, **of, "total_tokens": of["prompt_tokens"] + of["completion_tokens"]}
            for model, of in row.usage.items()
        ],
    )


def item_object(row: EvalItemRow, run: EvalRunRow) -> dict[str, Any]:
    item = {"eval_id": run.eval_id, "datasource_item_id": row.place, "datasource_item": row.item}
    return object_of(row, "eval.run.output_item", "run_id status results sample", **item)


def sample_object(body: Mapping[str, Any], answers: Sequence[ModelAnswer]) -> dict[str, Any]:
    """Return a sample: requests to models and their answers. body: the request to the first model. The SDK's types have
    no null."""
    why = next((answer.error for answer in answers if answer.error), "")
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    temperature = body.get("temperature")
    return {
        "input": [{name: str(turn.get(name) or "") for name in ("role", "content")} for turn in body["messages"]],
        "output": [{"role": "assistant", "content": answer.text} for answer in answers],
        "model": answers[0].model,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "cached_tokens": sum(answer.cached_tokens for answer in answers),
            "total_tokens": prompt + completion,
        },
        "error": {"code": "sample_failed", "message": why} if why else NO_ERROR,
        "finish_reason": answers[0].finish_reason,
        "max_completion_tokens": body.get("max_completion_tokens") or 0,
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": body.get("top_p") or 1.0,
        "seed": body.get("seed") or 0,
    }
