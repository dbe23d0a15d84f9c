"""`appliance model import|catalog|deploy|canary|share`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from appliance.cli import output, views
from appliance.cli.command import (
    OUTPUT,
    Option,
    Session,
    auto_or,
    command,
    either,
    flag,
    given,
    named,
    number,
    opt,
    part,
    picked,
    seconds,
)
from appliance.cli.commands import catalog
from appliance.cli.errors import BadUsage
from appliance.cli.resources import MODEL, segment
from appliance.cli.waiting import TIMEOUT, WAIT, finish


def _path(model: str) -> str:
    return f"/admin/v1/models/{segment(model)}"


@command(
    "model import",
    opt("source SOURCE", "Directory, .gguf file, name in the catalog, or hub id."),
    opt("--name NAME", "The name for clients. Default: from the source."),
    opt("--base NAME", "The base of an adapter. Default: what the adapter names."),
    opt("--revision REVISION", "Branch, tag or commit on the hub."),
    *WAIT,
    TIMEOUT,
)
def import_model(session: Session, args: Namespace) -> None:
    """Copy a model in, checked tensor by tensor; it can be called and fine-tuned from then on.

    A directory needs config.json, tokenizer files and *.safetensors. A box is offline unless its configuration
    says hub_offline = false. Packages are downloaded by pip, as its settings say. An adapter, a directory or hub
    id too, has adapter_config.json and adapter_model.safetensors; it is served on the engines of its base.

    Examples:
      appliance model import ./Llama-3.2-1B-Instruct --name llama-1b
      appliance model import ./Qwen3-8B-Q4_K_M.gguf      a file of llama.cpp's, dequantised to bfloat16
      appliance model import smollm2-135m                by its name in `appliance model catalog`
      appliance model import Qwen/Qwen3-0.6B             from a hub, where the box may go online
      appliance model import ./my-lora --base smollm2-135m    a LoRA adapter, as peft writes it
    """
    is_local = session.client.is_local
    if is_local and (args.source.startswith((".", "/", "~")) or Path(args.source).exists()):
        args.source = str(Path(args.source).expanduser().resolve())
    with catalog.fetched(args.source, args.name, is_local) as found:
        args.wait |= "origin" in found  # its file goes with this command
        started = session.client.post("/admin/v1/models/import", picked(args, "base revision") | given(**found))
        session.show(finish(session, started, args), views.operation)


@command("model catalog", OUTPUT, needs="")
def show_catalog(session: Session, args: Namespace) -> None:
    """List models known to work here, with licence and size; `model import NAME` brings one in. Needs no box.

    Examples:
      appliance model catalog
      appliance model catalog -o json | jq -r '.data[].name'
    """
    rows = [model.row() for model in catalog.CATALOG]
    columns = (
        "name licence >parameters:count >download=download_bytes >context=context_tokens >weights=weight_bytes "
        "from=origin tried"
    )
    session.show({"data": rows}, lambda answer: output.listing(columns, answer["data"]))
    if not session.as_json:
        output.say("WEIGHTS: on the devices, in bfloat16. TRIED: the model itself, or a tiny one of its architecture.")


def _template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadUsage(f"--chat-template {path!r} cannot be read: {error}") from None


def _settings(*rows: tuple[str, Any, str, str]) -> tuple[Option, ...]:
    return tuple(opt(f"{name} {value}|none", help, type=auto_or(kind, "none")) for name, kind, value, help in rows)


def _values(args: Namespace, options: tuple[Option, ...]) -> dict[str, Any]:
    """Of those that were given; null for `none`."""
    names = [one.settings.get("dest") or one.flags[0].lstrip("-").replace("-", "_") for one in options]
    return {name: None if value == "none" else value for name, value in picked(args, " ".join(names)).items()}


_SERVED = _settings(
    ("--max-replicas", int, "N", "The most replicas; none: [serve] max_replicas."),
    ("--ttft-p95-s", float, "SECONDS", "Target: time to first token of 95 % of requests."),
    ("--tpot-p95-ms", float, "MS", "Target: time per further token."),
    ("--idle-sleep-s", float, "SECONDS", "Sleep after this long without a request."),
)
_ENGINE = _settings(
    ("--max-model-len", int, "TOKENS", "Prompt and answer together."),
    ("--dtype", str, "TYPE", "bfloat16, float16 or float32."),
    ("--kv-cache-dtype", str, "TYPE", "auto, fp8, ..."),
    ("--kv-cache-bytes", int, "BYTES", "Per device."),
    ("--gpu-memory", float, "FRACTION", "Of a GPU, for one engine."),
    ("--max-num-seqs", int, "N", "Requests at once."),
    ("--tool-parser", str, "NAME|auto", "vLLM's name; auto: by the model's family."),
    ("--reasoning-parser", str, "NAME|auto", "As --tool-parser."),
    ("--chat-template", _template, "FILE", "A Jinja file."),
    ("--system-prompt", str, "TEXT", "For conversations that bring none."),
    ("--draft", int, "N", "Tokens guessed from the prompt and checked together."),
)
_SAMPLING = _settings(
    ("--temperature", float, "X", "Of requests that name none; as the next five."),
    ("--top-p", float, "X", ""),
    ("--top-k", int, "N", ""),
    ("--min-p", float, "X", ""),
    ("--repetition-penalty", float, "X", ""),
    ("--max-tokens", int, "N", ""),
)


@command(
    "model deploy",
    MODEL,
    opt("--min-replicas N", "Replicas that are always awake.", type=number(int, 0)),
    opt("--tensor-parallel N", "Devices of one replica.", type=number(int, 1)),
    *either("--pin", "--unpin", "Its replicas come first and are never given to training."),
    *_SERVED,
    *_ENGINE,
    *_SAMPLING,
    opt("--engine-arg KEY=VALUE", "One of vLLM's arguments; KEY=none removes it.", type=named(), action="append"),
    opt("--settings N", "Go back to settings number N; 0: to none.", type=number(int, 0)),
)
def deploy(session: Session, args: Namespace) -> None:
    """Change how a model is served; only what is given changes, and it takes effect at once.

    A change of the engines' settings is checked by vLLM first; then each engine finishes its requests and is started
    again, while further requests are held. If none starts with them, the box takes the settings back that served last,
    and `appliance status` and `model show` say why.

    Examples:
      appliance model deploy starter --min-replicas 1 --max-replicas 4
      appliance model deploy llama-70b --tensor-parallel 4 --ttft-p95-s 2 --tpot-p95-ms 100
      appliance model deploy starter --pin               a replica of it is never given to training
      appliance model deploy starter --idle-sleep-s none --max-replicas none
      appliance model deploy starter --max-model-len 4096 --max-num-seqs 16 --temperature 0.2
      appliance model deploy starter --system-prompt 'Answer in one sentence.' --engine-arg block-size=64
      appliance model deploy starter --settings 1        the first settings again
      appliance model deploy starter                     shows how it is served
    """
    body = picked(args, "min_replicas tensor_parallel") | _values(args, _SERVED)
    if args.pin is not None:
        body["pinned"] = args.pin
    changes = _values(args, _ENGINE)
    for parser in ("tool_parser", "reasoning_parser"):
        if changes.get(parser) == "auto" or getattr(args, parser) == "none":
            changes[parser] = None if changes[parser] == "auto" else "none"
    if "draft" in changes:
        changes["draft_tokens"] = changes.pop("draft")
    if sampling := _values(args, _SAMPLING):
        changes["sampling"] = sampling
    if args.engine_arg:
        changes["engine_args"] = {name: None if value == "none" else value for name, value in args.engine_arg}
    if args.settings is not None and changes:
        raise BadUsage("--settings takes over earlier settings as a whole; give the others in a command of their own")
    change = {"set": changes} if changes else {"number": args.settings} if args.settings is not None else None

    def done(below: str, body: dict[str, Any] | None) -> Any:
        return session.client.send("PATCH" if body else "GET", f"{_path(args.id)}/{below}", body=body or None)

    answer, found = done("deployment", body), done("settings", change)
    answer |= {"settings": found["settings"], "settings_number": found["number"], "settings_history": found["history"]}
    answer["settings_note"] = found["history"][0].get("note", "") if found["history"] else ""
    session.show(answer, output.view)


@command(
    "model canary",
    MODEL,
    opt("version VERSION", "Default: show the canary that is there.", nargs="?"),
    opt("--share PERCENT", "At most 90%. Default: 10%.", type=part),
    flag("--auto", "Promote it or roll it back without being asked."),
    opt("--for TIME", "How long it is watched: 10m, 2h. Default: 10m.", dest="watch_s", type=seconds),
    opt("--min-requests N", "Requests that each version must have had. Default: 50.", type=number(int, 1)),
)
def canary(session: Session, args: Namespace) -> None:
    """Give a version a share of a model's requests and compare it with the one before; without VERSION, show that.

    Compared are errors, time to first byte and duration. A conversation stays on one version, so a few prompts may all
    reach the other. With --auto, more errors, times beyond 1.5 x or an engine that does not start roll it back;
    otherwise it is promoted when its time is over.

    Examples:
      appliance model canary ft:starter:local::a1b2c3d4 step-120 --share 10%
      appliance model canary ft:starter:local::a1b2c3d4 step-120 --share 5% --auto --for 30m
      appliance model canary ft:starter:local::a1b2c3d4           how it does
      appliance model promote ft:starter:local::a1b2c3d4          gives it all requests, `model rollback` none
    """
    path, settings = f"{_path(args.id)}/canary", picked(args, "min_requests share watch_s")
    if args.version is None:
        if settings or args.auto:
            raise BadUsage(f"give the VERSION to begin a canary of; `appliance model show {args.id}` lists versions")
        answer = session.client.get(path)
    else:
        answer = session.client.send("PUT", path, body=settings | picked(args, "version auto"))
    session.show(answer, output.view)


@command(
    "model share",
    MODEL,
    opt("--with OWNER|all", "Owners of keys; repeatable.", dest="owners", action="append", required=True),
    flag("--stop", "Stop sharing it with them."),
)
def share(session: Session, args: Namespace) -> None:
    """Let other owners use a model, its versions and checkpoints; `model show` says whom it is shared with.

    A model that a job makes is for the owner of its key alone; one that was imported is for everybody. With a
    key of the scope fine_tuning an owner shares his own models, an operator any.

    Examples:
      appliance model share ft:starter:local:gsm8k:a1b2c3d4 --with bob
      appliance model share ft:starter:local:gsm8k:a1b2c3d4 --with all
      appliance model share starter --with all --stop               for its owner and operators alone from now on
    """
    owners = [owner for owner in args.owners if owner != "all"]
    body = {"owners": owners, "everybody": "all" in args.owners, "stop": args.stop}
    answer = session.client.post(f"/v1/models/{segment(args.id)}/share", body)
    session.show(answer, lambda made: f"{made['id']} is for {views.audience(made)}")
    if not args.stop and (missing := answer.get("without_key")):
        output.say(f"note: no key has the owner {', '.join(missing)} yet (`appliance key list` shows owners)")
