"""`appliance model export|quantize`: takes a model's files home, or makes a smaller model of them."""

from __future__ import annotations

import json
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import commonprefix
from pathlib import Path
from typing import Any

from appliance.cli import output
from appliance.cli.command import TIMEOUT, Session, command, finish
from appliance.cli.commands.chat import PATH as CHAT_PATH
from appliance.cli.commands.chat import TIMEOUT_S as ANSWER_TIMEOUT_S
from appliance.cli.commands.chat import endpoint
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.locate import python
from appliance.cli.options import number, opt
from appliance.cli.resources import MODEL, segment

ADAPTER_FILE = "adapter_config.json"


@command(
    "model export",
    MODEL,
    opt("--to DIR", "A new directory.", type=Path, required=True),
    opt(
        "--format FORMAT",
        "safetensors: the files as they are, of an adapter the adapter. merged: an adapter added to its base.",
        choices=("safetensors", "merged"),
        default="safetensors",
    ),
)
def export(session: Session, args: Namespace) -> None:
    """Download a model in the layout of Hugging Face, each file compared with its checksum.

    transformers, peft and vLLM load the directory as it is. `NAME@VERSION` and a checkpoint's name mean that version.
    A connection that breaks is resumed.

    Examples:
      appliance model export ft:smollm2-135m:local:sums:a1b2c3d4 --to ./sums
      appliance model export ft:smollm2-135m:local:sums:a1b2c3d4 --to ./sums --format merged
    """
    target = args.to.expanduser()
    if target.exists():
        raise BadUsage(f"{target} exists; name a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _downloaded(session, args.id, target.parent, merged=args.format == "merged") as made:
        made.rename(target)
    nbytes = sum(path.stat().st_size for path in target.iterdir())
    files = sorted(path.name for path in target.iterdir())
    session.show({"to": str(target), "files": files, "bytes": nbytes}, lambda _: f"{target}: {output.size(nbytes)}")


@command(
    "model quantize",
    MODEL,
    opt(
        "--form FORM", "int8 and fp8: half the memory; int4: a quarter.", choices=("int8", "fp8", "int4"), required=True
    ),
    opt("--name NAME", "The new model's name. Default: NAME-FORM."),
    opt(
        "--compare FILE",
        "Chats, one per line, which both models answer; shown is how far they agree.",
        type=Path,
    ),
    opt("--limit N", "Compare at most so many.", type=number(int, 1), default=50),
    TIMEOUT,
)
def quantize(session: Session, args: Namespace) -> None:
    """Make a smaller model of a model: its linear layers rounded to 8 or 4 bits. It needs the box's own machine.

    An adapter is added to its base first. int8 runs on CPUs and GPUs, fp8 and int4 on GPUs. The new model is one of its
    own and, like every import, for everybody until `model share NAME --with all --stop`.

    Examples:
      appliance model quantize qwen2.5-7b --form int8
      appliance model quantize ft:smollm2-135m:local:sums:a1b2c3d4 --form int8 --name sums-int8 --compare valid.jsonl
    """
    if not session.client.is_local:
        raise BadUsage("this command reads and writes the model's files; run it on the box's own machine")
    asked = _questions(args.compare, args.limit) if args.compare else []
    plain = args.id.removeprefix("ft:").replace(":", "-").replace("@", "-")
    name = args.name or f"{plain}-{args.form}"
    with _downloaded(session, args.id, None, merged=True) as made:
        output.say(f"rounding to {args.form} ...")
        error = _remade(args.form, made, made.with_name(args.form))["error"]
        body = {"source": str(made.with_name(args.form)), "origin": f"{args.id} in {args.form}", "name": name}
        args.wait = True  # the files go with this command
        operation = finish(session, session.client.post("/admin/v1/models/import", body), args)
    shown = {**operation["result"], "weights_error": error}
    if asked:
        shown |= _agreement(session, (args.id, name), asked)
    session.show(shown, output.view)


def _questions(path: Path, limit: int) -> list[list[dict[str, Any]]]:
    """The messages of each chat before its last answer."""
    found = []
    for line in path.read_text().split("\n")[:limit]:  # JSON may have other ends of lines inside
        try:
            messages = json.loads(line or "{}").get("messages") or []
        except (ValueError, AttributeError) as error:
            raise BadUsage(f"{path} has a line that is not a JSON object: {line[:80]!r}") from error
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        if messages:
            found.append(messages)
    if not found:
        raise BadUsage(f'{path} has no chats ({{"messages": [...]}} on each line)')
    return found


def _agreement(session: Session, models: tuple[str, str], asked: list[list[dict[str, Any]]]) -> dict[str, float]:
    """How far greedy answers of 64 tokens are the same: the share of whole answers, and of characters before the first
    difference."""
    client, same, shared = endpoint(session), 0, 0.0
    with output.progress("comparing answers") as told:
        for count, messages in enumerate(asked):
            told("comparing answers", count, len(asked))
            one, other = (
                client.send(
                    "POST",
                    CHAT_PATH,
                    body={"model": model, "messages": messages, "max_tokens": 64, "temperature": 0},
                    timeout_s=ANSWER_TIMEOUT_S,
                )["choices"][0]["message"]["content"]
                or ""
                for model in models
            )
            same += one == other
            shared += len(commonprefix([one, other])) / max(len(one), len(other), 1)
    return {"compared": len(asked), "same_answers": same / len(asked), "same_beginnings": shared / len(asked)}


@contextmanager
def _downloaded(session: Session, model: str, below: Path | None, *, merged: bool) -> Iterator[Path]:
    """The files of a model in a folder that goes with the block, unless it was moved; `merged`: an adapter's added to
    those of its base."""
    with tempfile.TemporaryDirectory(prefix=".appliance-", dir=below) as folder:
        made = Path(folder, "model")
        _download(session, model, made)
        if merged and (made / ADAPTER_FILE).exists():
            base = json.loads((made / ADAPTER_FILE).read_text())["base_model_name_or_path"]
            _download(session, base, Path(folder, "base"))
            output.say(f"adding the adapter to {base} ...")
            _remade("merge", Path(folder, "base"), made, Path(folder, "merged"))
            made = Path(folder, "merged")
        yield made


def _download(session: Session, model: str, folder: Path) -> None:
    """Write the files of a model into the new `folder`. Raises CommandFailed."""
    from weights.format.errors import IntegrityError
    from weights.tiers.archive import unpack

    parts = session.client.parts(f"/v1/models/{segment(model)}/archive")
    with output.progress(f"downloading {model}") as show:
        try:
            unpack(parts, folder, lambda done, total: show(f"downloading {model}", done, total))
        except IntegrityError as error:
            raise CommandFailed(f"the download was damaged on the way ({error}); run the command again") from error


def _remade(work: str, *folders: Path) -> dict[str, Any]:
    """What `train.convert.remake` prints. Raises CommandFailed, BadUsage."""
    done = subprocess.run(python("train.convert.remake", work, *map(str, folders)), capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CommandFailed(f"it did not work: {lines[-1]}")
    answer = json.loads(done.stdout)
    if "refused" in answer:
        raise BadUsage(f"the model cannot become {work}: {answer['refused']}")
    return answer
