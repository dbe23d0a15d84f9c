"""`appliance model export|quantize`: download a model's files, or make a smaller model from them."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tarfile
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from os.path import commonprefix
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

from appliance.cli import output
from appliance.cli.command import WORK_TIMEOUT_S, Session, command, finish
from appliance.cli.commands.models import CHAT_PATH, endpoint
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.locate import look_for_all, python
from appliance.cli.options import flag, number, opt, text_file
from appliance.cli.resources import MODEL, segment

# Only the package's source archive is used: it has llama.cpp's converter, which runs uncompiled.
_LLAMA_CPP = "llama-cpp-python==0.3.36 --hash=sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"


@command(
    "model export",
    MODEL,
    opt("--to DIR", "A new directory.", type=Path, required=True),
    opt(
        "--format FORMAT",
        "safetensors: the files as they are, of an adapter the adapter. merged: an adapter added to its base. gguf: "
        "merged, as one file for llama.cpp.",
        choices=("safetensors", "merged", "gguf"),
        default="safetensors",
    ),
    opt("--quant TYPE", "Numbers in the GGUF file.", choices=("f32", "f16", "bf16", "q8_0"), default="bf16"),
)
def export(session: Session, args: Namespace) -> None:
    """Download a model in the layout of Hugging Face, each file compared with its checksum.

    transformers, peft and vLLM load the directory as it is. `NAME@VERSION` and a checkpoint's name mean that version.
    gguf runs llama.cpp's own converter, which pip fetches first (80 MB); `llama-quantize` makes q4_k_m of its file.

    Examples:
      appliance model export ft:smollm2-135m:local:sums:a1b2c3d4 --to ./sums
      appliance model export ft:smollm2-135m:local:sums:a1b2c3d4 --to ./sums --format merged
      appliance model export ft:smollm2-135m:local:sums:a1b2c3d4 --to ./sums --format gguf --quant q8_0
    """
    target = args.to.expanduser()
    if target.exists():
        raise BadUsage(f"{target} exists; name a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _checkpoint(session, args.id, target.parent, merged=args.format != "safetensors") as files:
        if args.format == "gguf":
            files = _gguf(files, args.quant)
        files.rename(target)
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
    flag("--as-version", "Make it a version of the same model, for `model canary` or `model rollback --version`."),
    opt("--compare FILE", "Chats, one per line, to measure how far the answers of both models agree.", type=text_file),
    opt("--limit N", "Compare at most N chats.", type=number(int, 1), default=50),
)
def quantize(session: Session, args: Namespace) -> None:
    """Make a smaller model of a model: its linear layers rounded to 8 or 4 bits. It needs the box's own machine.

    An adapter is added to its base first. int8 and int4 run on CPUs and GPUs, fp8 on GPUs. The new model is one of its
    own and, like every import, for everybody until `model share NAME --with all --stop`. A job on it trains an adapter
    beside the few bits (QLoRA): docs/adapters.md. --compare reports both perplexities of the file's answers, the share
    of equal answers, and the share of an answer before its first difference; both models answer without sampling.

    Examples:
      appliance model quantize qwen2.5-7b --form int8
      appliance model quantize ft:smollm2-135m:local:sums:a1b2c3d4 --form int8 --name sums-int8 --compare valid.jsonl
      appliance eval run qwen2.5-7b qwen2.5-7b-int8 --suite prompts.jsonl --grader grader.json     how good it is
    """
    if not session.client.is_local:
        raise BadUsage("this command reads and writes the model's files; run it on the box's own machine")
    if args.as_version and (args.name or args.compare):
        raise BadUsage("--as-version gives the model no other name, and the version answers --compare as a canary only")
    chats = None if args.compare is None else _questions(args.compare, args.limit)
    plain = args.id.removeprefix("ft:").replace(":", "-").replace("@", "-")
    name = args.id if args.as_version else args.name or f"{plain}-{args.form}"
    # The folder is in the data directory, because the box may have a private /tmp.
    below = session.box_file.data_dir if session.box_file else None
    with _checkpoint(session, args.id, below, merged=True) as whole:
        rounded = whole.with_name(args.form)
        output.say(f"rounding to {args.form} ...")
        error = _remake(args.form, whole, rounded)["error"]
        origin = f"{args.id} in {args.form}"
        body = {"source": str(rounded), "origin": origin, "name": name, "as_version": args.as_version}
        # The files are deleted when this command ends, so it waits for the import without a limit.
        waiting = Namespace(wait=True, timeout=None)
        operation = finish(session, session.client.post("/admin/v1/models/import", body), waiting)
    agreement = _agreement(session, (args.id, name), chats) if chats else {}
    session.show({**operation["result"], "weights_error": error, **agreement})


def _gguf(checkpoint: Path, quant: str) -> Path:
    """Convert a checkpoint with llama.cpp's converter; return the new file's directory. Raises CommandFailed."""
    scratch = checkpoint.parent
    source, target = scratch / "llama.cpp", scratch / "gguf"
    target.mkdir()
    output.say("fetching llama.cpp's converter ...")
    (scratch / "requirements.txt").write_text(_LLAMA_CPP)
    fetch = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--require-hashes", "--dest", str(source)]
    _finished("pip download", [*python("pip", *fetch), "-r", str(scratch / "requirements.txt")])
    (packed,) = source.iterdir()
    shutil.unpack_archive(packed, source, filter="data")
    (converter,) = source.glob("*/vendor/llama.cpp/convert_hf_to_gguf.py")
    output.say(f"writing GGUF in {quant} ...")
    arguments = [str(checkpoint), "--outfile", str(target / f"model-{quant}.gguf"), "--outtype", quant]
    _finished("the conversion", [sys.executable, str(converter), *arguments])
    return target


def _questions(text: str, limit: int) -> list[tuple[list[Any], dict[str, Any] | None]]:
    """Return each chat's messages up to its last question, and the answer or None. Raises BadUsage."""
    chats = []
    for line in [line for line in text.split("\n") if line.strip()][:limit]:  # JSON may contain other line separators
        try:
            messages, answer = json.loads(line)["messages"], None
            while messages[-1]["role"] == "assistant":
                answer = messages.pop()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadUsage(f'--compare: expected {{"messages": [...]}} on each line; one is {line[:80]!r}') from error
        chats.append((messages, answer if answer and isinstance(answer.get("content"), str) else None))
    if not chats:
        raise BadUsage('--compare: the file is empty; expected {"messages": [...]} on each line')
    return chats


def _agreement(session: Session, models: tuple[str, str], chats: list[Any]) -> dict[str, Any]:
    """Compare greedy answers of up to 64 tokens: return shares (0 to 1) of equal answers and of equal beginnings. Also
    returns each model's perplexity on the file's answers, if there are any."""
    client, same, shared = endpoint(session), 0, 0.0
    nats, tokens = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0)

    def ask(model: str, messages: list[Any], **more: Any) -> dict[str, Any]:
        body = {"model": model, "messages": messages, "temperature": 0} | more
        return client.send("POST", CHAT_PATH, body=body, timeout_s=WORK_TIMEOUT_S)

    with output.progress("comparing answers") as meter:
        for count, (messages, reference) in enumerate(chats):
            meter("comparing answers", count, len(chats))
            answers = []
            for model in models:
                answers.append(ask(model, messages, max_tokens=64))
                if reference is not None:
                    whole = {"add_generation_prompt": False, "continue_final_message": True}
                    read = ask(model, [*messages, reference], max_tokens=1, prompt_logprobs=0, **whole)
                    of_answer = read["prompt_logprobs"][answers[-1]["usage"]["prompt_tokens"] :]
                    nats[model] -= sum(next(iter(token.values()))["logprob"] for token in of_answer)
                    tokens[model] += len(of_answer)
            first, second = (answer["choices"][0]["message"]["content"] or "" for answer in answers)
            same += first == second
            shared += len(commonprefix([first, second])) / max(len(first), len(second), 1)
    perplexity = {model: math.exp(nats[model] / tokens[model]) for model in models if tokens[model]}
    agreement = {"compared": len(chats), "same_answers": same / len(chats), "same_beginnings": shared / len(chats)}
    return agreement | ({"perplexity": perplexity} if perplexity else {})


@contextmanager
def _checkpoint(session: Session, model: str, below: Path | None, *, merged: bool) -> Iterator[Path]:
    """Download a model into a folder in `below`, which is deleted after the block unless the block moved it. merged:
    add an adapter to its base."""
    if merged:
        look_for_all()  # fail before the download, not after it
    with tempfile.TemporaryDirectory(prefix=".appliance-", dir=below) as scratch:
        checkpoint = Path(scratch, "model")
        _download(session, model, checkpoint)
        if merged and (checkpoint / "adapter_config.json").exists():
            _download(session, model, Path(scratch, "base"), base=True)  # its file may have the base's hub id
            output.say("adding the adapter to its base ...")
            _remake("merged", Path(scratch, "base"), checkpoint, Path(scratch, "merged"))
            checkpoint = Path(scratch, "merged")
        yield checkpoint


def _download(session: Session, model: str, folder: Path, base: bool = False) -> None:
    """Write the files of a model, or of the base of an adapter, into the new `folder`. Raises CommandFailed."""
    from weights.format.errors import IntegrityError
    from weights.format.manifest import Manifest, chunks_of, read_whole
    from weights.format.names import MANIFEST_FILE

    parts = session.client.parts(f"/v1/models/{segment(model)}/archive{'?base=true' if base else ''}")
    done, total = 0, 0
    folder.mkdir()
    with output.progress(f"downloading {model}") as meter:

        def read(_size: int) -> bytes:
            nonlocal done
            done += len(part := next(parts, b""))
            meter(f"downloading {model}", done, total or None)
            return part

        try:
            with tarfile.open(fileobj=cast(IO[bytes], SimpleNamespace(read=read)), mode="r|") as tar:
                for entry in tar:
                    tar.extract(entry, folder, filter="data")
                    total = total or Manifest.read(folder).nbytes  # the manifest comes first
            manifest = Manifest.read(folder)
            read_whole(manifest, partial(chunks_of, folder, manifest), source=folder)
            (folder / MANIFEST_FILE).unlink()
        except (tarfile.TarError, IntegrityError) as error:
            raise CommandFailed(f"the download is damaged ({error}): run it again") from error


def _remake(work: str, *folders: Path) -> dict[str, Any]:
    """Run `train.convert.remake` and return the JSON object that it prints. Raises CommandFailed, BadUsage."""
    answer = json.loads(_finished(work, python("train.convert.remake", work, *map(str, folders))))
    if "refused" in answer:
        raise BadUsage(f"the model cannot become {work}: {answer['refused']}")
    return answer


def _finished(work: str, command: Sequence[str]) -> str:
    """Run a command and return what it printed. Raises CommandFailed with its last line."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CommandFailed(f"{work} failed: {lines[-1]}")
    return done.stdout
