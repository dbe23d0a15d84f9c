"""Make a training file from a model's answers to prompts, or from the model's answers that the box has stored.

    export OPENAI_BASE_URL=http://box:8000/v1 OPENAI_API_KEY=sk-...
    python answers_of_a_teacher.py --teacher qwen3-32b prompts.jsonl > train.jsonl
    python answers_of_a_teacher.py --teacher qwen3-32b --kept > train.jsonl

A line of prompts.jsonl is {"prompt": "..."} or {"messages": [...], "tools": [...]}; the teacher's answer replaces an
assistant's message at the end. Prompts are sent as a batch, which engines answer while they are idle. Answers with tool
calls are used; refusals, truncated answers and duplicates are dropped and counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from openai import OpenAI

Json = dict[str, Any]
Answered = tuple[Json, Json]
"""The request ({"messages", "tools"?}) and a choice of its answer."""


def questions(lines: Iterable[bytes]) -> Iterator[Json]:
    for line in filter(bytes.strip, lines):
        row = json.loads(line)
        messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
        while messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        yield {"messages": messages, "tools": row["tools"]} if row.get("tools") else {"messages": messages}


def ask(client: OpenAI, teacher: str, prompts: list[Json], poll_s: float = 5.0, **sampling: Any) -> Iterator[Answered]:
    """Send prompts to the teacher as a batch; yield the answers. Raises RuntimeError if the batch does not complete."""
    url = "/v1/chat/completions"
    bodies = ({"model": teacher, **prompt, **sampling} for prompt in prompts)
    lines = ({"custom_id": str(at), "method": "POST", "url": url, "body": body} for at, body in enumerate(bodies))
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("questions.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(poll_s)
        batch = client.batches.retrieve(batch.id)
    if batch.status != "completed":
        reason = batch.errors.data[0].message if batch.errors and batch.errors.data else ""
        raise RuntimeError(f"{batch.id} {batch.status}: {reason}")
    answers = client.files.content(batch.output_file_id).content if batch.output_file_id else b""
    for row in map(json.loads, filter(None, answers.split(b"\n"))):
        for choice in row["response"]["body"]["choices"]:
            yield prompts[int(row["custom_id"])], choice


def kept(client: OpenAI, teacher: str, metadata: dict[str, str]) -> Iterator[Answered]:
    """Yield requests and answers of the teacher's chat completions that were requested with `store: true`."""
    completions = client.chat.completions.list(model=teacher, metadata=metadata, extra_query={"messages": True})
    for stored in (completion.to_dict() for completion in completions):
        yield {name: stored[name] for name in ("messages", "tools") if stored.get(name)}, stored["choices"][0]


def examples(answered: Iterable[Answered], left_out: Counter[str]) -> Iterator[Json]:
    """Yield the rows of a training file. left_out: this function counts dropped answers there, by reason."""
    seen = set[str]()
    for request, choice in answered:
        message = choice["message"]
        answer = {name: message[name] for name in ("content", "tool_calls") if message.get(name)}
        row = {**request, "messages": [*request["messages"], {"role": "assistant", **answer}]}
        if message.get("refusal"):
            left_out["refused"] += 1
        elif choice["finish_reason"] == "length":
            left_out["cut off"] += 1
        elif not answer.get("tool_calls") and not answer.get("content", "").strip():
            left_out["empty"] += 1
        elif (text := json.dumps(row, sort_keys=True)) in seen:
            left_out["repeated"] += 1
        else:
            seen.add(text)
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompts", nargs="?", type=Path, help="File of prompts; not with --kept.")
    parser.add_argument("--teacher", required=True, help="Model that answers: NAME or NAME@VERSION.")
    parser.add_argument("--kept", action="store_true", help="Use the answers that the box has stored.")
    parser.add_argument("--metadata", action="append", default=[], metavar="NAME=VALUE", help="Filter for --kept.")
    parser.add_argument("--n", type=int, default=1, help="Number of answers to each prompt.")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=1024, help="Limit per answer; longer answers are dropped.")
    parser.add_argument("--poll", type=float, default=5.0, help="Seconds between two requests for the batch's status.")
    options = parser.parse_args()
    if options.kept == (options.prompts is not None):
        parser.error("expected either a file of prompts or --kept")
    client, left_out = OpenAI(), Counter[str]()
    if options.kept:
        answered = kept(client, options.teacher, dict(pair.split("=", 1) for pair in options.metadata))
    else:
        prompts = list(questions(options.prompts.read_bytes().split(b"\n")))
        sampling = {"n": options.n, "temperature": options.temperature, "max_completion_tokens": options.max_tokens}
        answered = ask(client, options.teacher, prompts, options.poll, **sampling)
    for row in examples(answered, left_out):
        print(json.dumps(row, ensure_ascii=False))
    print("left out:", dict(left_out) or "none", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
