"""`appliance model export|quantize`: takes a model's files home, or makes a smaller model of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.cli import output
from appliance.cli.command import Session, command, finish
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.locate import look_for_all, python
from appliance.cli.options import opt
from appliance.cli.resources import MODEL, segment

ADAPTER_FILE = "adapter_config.json"
# Only its source archive is used: llama.cpp's converter is in it, and runs without being compiled.
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
)
def quantize(session: Session, args: Namespace) -> None:
    """Make a smaller model of a model: its linear layers rounded to 8 or 4 bits. It needs the box's own machine.

    An adapter is added to its base first. int8 and int4 run on CPUs and GPUs, fp8 on GPUs. The new model is one of its
    own and, like every import, for everybody until `model share NAME --with all --stop`. A job on it trains an adapter
    beside the few bits (QLoRA): docs/adapters.md.

    Examples:
      appliance model quantize qwen2.5-7b --form int8
      appliance model quantize ft:smollm2-135m:local:sums:a1b2c3d4 --form int8 --name sums-int8
      appliance eval run qwen2.5-7b qwen2.5-7b-int8 --suite prompts.jsonl --grader grader.json     how good it is
    """
    if not session.client.is_local:
        raise BadUsage("this command reads and writes the model's files; run it on the box's own machine")
    plain = args.id.removeprefix("ft:").replace(":", "-").replace("@", "-")
    name = args.name or f"{plain}-{args.form}"
    # In the data directory: the box may have a /tmp of its own.
    below = session.box_file.data_dir if session.box_file else None
    with _checkpoint(session, args.id, below, merged=True) as whole:
        rounded = whole.with_name(args.form)
        output.say(f"rounding to {args.form} ...")
        error = _remake(args.form, whole, rounded)["error"]
        body = {"source": str(rounded), "origin": f"{args.id} in {args.form}", "name": name}
        # The files are deleted when this command ends, so it waits for however long the import takes.
        waiting = Namespace(wait=True, timeout=None)
        operation = finish(session, session.client.post("/admin/v1/models/import", body), waiting)
    session.show({**operation["result"], "weights_error": error})


def _gguf(checkpoint: Path, quant: str) -> Path:
    """Convert a checkpoint by llama.cpp's converter; return the new directory with the file. Raises CommandFailed."""
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


@contextmanager
def _checkpoint(session: Session, model: str, below: Path | None, *, merged: bool) -> Iterator[Path]:
    """Download a model into a folder in `below` that is deleted after the block, unless it was moved. merged: add an
    adapter to its base."""
    if merged:
        look_for_all()  # before the download, not after it
    with tempfile.TemporaryDirectory(prefix=".appliance-", dir=below) as scratch:
        checkpoint = Path(scratch, "model")
        _download(session, model, checkpoint)
        if merged and (checkpoint / ADAPTER_FILE).exists():
            _download(session, model, Path(scratch, "base"), "?base=true")  # the file may name the base as a hub does
            output.say("adding the adapter to its base ...")
            _remake("merged", Path(scratch, "base"), checkpoint, Path(scratch, "merged"))
            checkpoint = Path(scratch, "merged")
        yield checkpoint


def _download(session: Session, model: str, folder: Path, query: str = "") -> None:
    """Write the files of a model into the new `folder`. Raises CommandFailed."""
    from weights.format.errors import IntegrityError
    from weights.tiers.archive import unpack

    parts = session.client.parts(f"/v1/models/{segment(model)}/archive{query}")
    with output.progress(f"downloading {model}") as meter:
        try:
            unpack(parts, folder, lambda done, total: meter(f"downloading {model}", done, total))
        except IntegrityError as error:
            raise CommandFailed(
                f"the download is damaged ({error}): run it again; `appliance model verify` checks the box's copy"
            ) from error


def _remake(work: str, *folders: Path) -> dict[str, Any]:
    """Run `train.convert.remake` and return the object that it prints. Raises CommandFailed, BadUsage."""
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
