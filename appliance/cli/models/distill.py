"""`appliance distill make` and `kept`: a teacher's answers to prompts, or what a model has answered and is kept, as
training data for another model.

What `make` makes depends on the prompts and the options alone, whose digest the batch carries: a command that is run
again goes on with the batch of the first one, and finds what it has made.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli.command import Session, box_command, given, group
from appliance.cli.complete import models as complete_models
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.jobs import file_data
from appliance.cli.jobs.batch import begin, begun_before, refuse_unfinished, rows, wait_for_end
from appliance.cli.jobs.request import pairs
from appliance.cli.operations import TIMEOUT

app = group("Distillation: a teacher's answers to prompts, as training data (docs/distillation.md).")
METADATA = "distill"
_ENDPOINT = "/v1/chat/completions"
_LEFT_OUT = ("failed", "refused", "cut off", "without an answer", "duplicates")


@box_command(
    app,
    "appliance distill make prompts.jsonl --teacher large",
    "appliance distill make prompts.jsonl --teacher large@v2 --n 4 --temperature 1 --max-tokens 512 --out train.jsonl",
    "appliance distill make prompts.jsonl --teacher large --system 'Answer in one sentence.'",
    "appliance job submit --model small --file prompts.answers.jsonl             then the student learns from it",
    "",
    'A line of prompts.jsonl: {"messages": [..., {"role": "user", "content": "..."}]} or {"prompt": "..."}. The',
    "last answer of a conversation that was answered already is left out.",
    "The file's lineage (.lineage.json) is written next to it: teacher, prompts, and every line that was left",
    "out, and why.",
)
def make(
    session: Session,
    prompts: Annotated[Path, typer.Argument(metavar="PROMPTS", exists=True, dir_okay=False, readable=True)],
    teacher: Annotated[
        str,
        typer.Option(
            "--teacher", metavar="MODEL[@VERSION]", help="The model that answers.", autocompletion=complete_models
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the file goes. Default: PROMPTS.answers.jsonl, next to it.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, max=128, help="Answers to each prompt.")] = 1,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0, max=2)] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="The longest answer in tokens; longer ones are left out.")
    ] = 1024,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="A system prompt for the teacher.")
    ] = None,
    keep_system: Annotated[
        bool,
        typer.Option(
            "--keep-system", help="Put the system prompt into the file too, so that the student learns with it."
        ),
    ] = False,
    timeout: TIMEOUT = None,
) -> None:
    """Have a teacher answer prompts while engines are idle, and make a training file of its answers. Refusals, answers
    that were cut off and repeated ones are left out and counted."""
    target = out or prompts.with_name(f"{prompts.stem}.answers.jsonl")
    chosen = given(temperature=temperature) | {"n": n, "max_completion_tokens": max_tokens}
    lessons = _lessons(prompts, system)
    source = hashlib.sha256(prompts.read_bytes()).hexdigest()
    key = hashlib.sha256(json.dumps([source, teacher, chosen, system], sort_keys=True).encode()).hexdigest()
    lineage = _made_before(target, [key, keep_system])
    if lineage is None:
        questions = ((str(line), {"model": teacher, **lesson, **chosen}) for line, lesson in lessons.items())
        batch = begun_before(session, METADATA, key) or begin(session, _ENDPOINT, questions, METADATA, key)
        batch = wait_for_end(session, batch, timeout)
        refuse_unfinished(batch)
        examples, left_out, versions = _examples(session, batch, lessons, bool(system) and not keep_system)
        if not examples:
            raise CommandFailed(f"the teacher {teacher} gave no answer to learn from: {_counted(left_out)}")
        about = {
            "from": [{"file": str(prompts), "sha256": source}],
            "dropped_lines": left_out,
            "teacher": teacher,
            "teacher_versions": versions,
            "batch": batch["id"],
            "asked": chosen | given(system=system),
            "of": [key, keep_system],
        }
        lineage = _save(target, examples, left_out, about | {"read_examples": len(lessons)})
    session.show(lineage, file_data.made)


@box_command(
    app,
    "appliance distill kept answers.jsonl --model large",
    "appliance distill kept answers.jsonl --model large --metadata use=support --metadata rated=good",
    "appliance job submit --model small --file answers.jsonl             then the student learns from it",
    "",
    "Kept are chat completions that were asked with `store: true` (docs/responses.md); of several choices the",
    "first is taken. The file's lineage (.lineage.json) names each that was left out, and why.",
)
def kept(
    session: Session,
    out: Annotated[Path, typer.Argument(metavar="OUT", dir_okay=False)],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="What answered.", autocompletion=complete_models),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option("--metadata", metavar="NAME=VALUE", help="Only those that have it; repeatable."),
    ] = None,
) -> None:
    """Make a training file of the chat completions that are kept. Refusals, answers that were cut off and repeated ones
    are left out and counted."""
    if out.exists():
        raise BadUsage(f"{out} is there; name another file")
    filters = {f"metadata[{name}]": value for name, value in pairs("--metadata", metadata or [])}
    found = session.client.listed("/v1/chat/completions", order="asc", messages=True, model=model, **filters)["data"]
    examples, left_out, seen = list[dict[str, Any]](), list[tuple[str, str]](), dict[str, set[str]]()
    for one in found:
        tools = {"tools": one["tools"]} if one.get("tools") else {}
        lesson = {"messages": one["messages"], **tools}
        same = seen.setdefault(hashlib.sha256(json.dumps(lesson, sort_keys=True).encode()).hexdigest(), set())
        choice = one["choices"][0] if one["choices"] else {"message": {}}
        answer = _learnt(choice)
        text = json.dumps(answer, sort_keys=True) if "tool_calls" in answer else answer["content"]
        if why := _why_not(choice, text, same):
            left_out.append((one["id"], why))
            continue
        same.add(text)
        examples.append({**lesson, "messages": [*one["messages"], answer]})
    if not examples:
        raise CommandFailed(f"{len(found):,} kept completions fit, and nothing is learnt from them")
    about = {
        "from": [],
        "read_examples": len(found),
        "dropped_completions": left_out,
        "teachers": sorted({one["model"] for one in found}),
        "asked": given(model=model, metadata=metadata or None),
        "completions": [found[0]["id"], found[-1]["id"]] if found else [],
    }
    session.show(_save(out, examples, left_out, about), file_data.made)


def _lineage_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.lineage.json")


def _save(
    path: Path, examples: list[dict[str, Any]], left_out: Sequence[tuple[object, str]], about: dict[str, Any]
) -> dict[str, Any]:
    """Writes the file and its lineage, and returns that. about: what the lineage says besides. Raises BadUsage."""
    content = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in examples).encode()
    digest = hashlib.sha256(content).hexdigest()
    lineage = about | {
        "made": [{"file": str(path), "sha256": digest, "examples": len(examples), "bytes": len(content)}],
        "dropped": dict.fromkeys(_LEFT_OUT, 0) | Counter(why for _, why in left_out),
        "masked": {},
    }
    _write(path, content)
    _write(_lineage_of(path), json.dumps(lineage, indent=1).encode())
    return lineage


def _learnt(choice: dict[str, Any]) -> dict[str, Any]:
    """The message that is learnt."""
    message = choice["message"]
    if message.get("tool_calls"):
        return {"role": "assistant", "content": message.get("content"), "tool_calls": message["tool_calls"]}
    return {"role": "assistant", "content": message.get("content") or ""}


def _lessons(path: Path, system: str | None) -> dict[int, dict[str, Any]]:
    """What the teacher is asked, by line: {"messages", "tools"?}. Raises BadUsage."""
    found: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            messages, tools = _prompt(json.loads(line))
        except ValueError as error:
            why = "is not valid JSON" if isinstance(error, json.JSONDecodeError) else error
            raise BadUsage(f"line {number} of {path} {why}") from None
        before = [{"role": "system", "content": system}] if system else []
        found[number] = {"messages": [*before, *messages], **tools}
    if not found:
        raise BadUsage(f"{path} has no prompts")
    return found


def _prompt(record: Any) -> tuple[list[Any], dict[str, Any]]:
    """Messages up to the last of the user, and {"tools"} if there are any; the box checks what is in them. Raises
    ValueError, in words."""
    if isinstance(record, dict) and isinstance(record.get("prompt"), str):
        return [{"role": "user", "content": record["prompt"]}], {}
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ValueError("has neither 'messages' nor a 'prompt'")
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1].get("role") != "user":
        raise ValueError("has no message of the user that could be answered")
    kept = [{name: value for name, value in one.items() if name != "weight"} for one in messages]
    return kept, {"tools": record["tools"]} if record.get("tools") else {}


def _made_before(target: Path, of: list[Any]) -> dict[str, Any] | None:
    """The lineage of what an earlier command has made of the same. Raises BadUsage if something else is there."""
    if not target.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(_lineage_of(target).read_bytes())
        if found["of"] == of and found["made"][0]["sha256"] == hashlib.sha256(target.read_bytes()).hexdigest():
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise BadUsage(f"{target} is there, made of something else or changed since; --out names another file")


def _examples(
    session: Session, batch: dict[str, Any], lessons: dict[int, dict[str, Any]], without_system: bool
) -> tuple[list[dict[str, Any]], list[tuple[int, str]], list[str]]:
    """What is learnt from, in the order of the prompts, (line, why) of what is not, and which versions have answered: a
    name may be another version's before the batch has ended."""
    answers, versions = dict[int, list[dict[str, Any]]](), set[str]()
    if batch.get("output_file_id"):
        for row in rows(session, batch["output_file_id"]):
            body = row["response"]["body"]
            answers[int(row["custom_id"])] = body["choices"]
            versions.update(filter(None, [body.get("system_fingerprint")]))
    examples, left_out = list[dict[str, Any]](), list[tuple[int, str]]()
    for number, lesson in lessons.items():
        if number not in answers:
            left_out.append((number, "failed"))
        seen = set[str]()
        for choice in answers.get(number, ()):
            text = choice["message"].get("content") or ""
            if why := _why_not(choice, text, seen):
                left_out.append((number, why))
                continue
            seen.add(text)
            messages = lesson["messages"][1:] if without_system else lesson["messages"]
            examples.append({**lesson, "messages": [*messages, {"role": "assistant", "content": text}]})
    return examples, left_out, sorted(versions)


def _why_not(choice: dict[str, Any], text: str, seen: set[str]) -> str:
    """Why nothing is learnt from an answer, "" if something is."""
    message = choice["message"]
    if message.get("refusal"):
        return "refused"
    if choice.get("finish_reason") not in ("stop", "tool_calls"):
        return "cut off" if choice.get("finish_reason") == "length" else "without an answer"
    if not text.strip():
        return "without an answer"
    return "duplicates" if text in seen else ""


def _counted(left_out: Sequence[tuple[object, str]]) -> str:
    counts = Counter(why for _, why in left_out)
    return ", ".join(f"{counts[why]:,} {why}" for why in _LEFT_OUT if counts[why])


def _write(path: Path, content: bytes) -> None:
    """Raises BadUsage."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise BadUsage(f"cannot write {path}: {error.strerror}") from error
