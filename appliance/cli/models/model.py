"""`appliance model`: bring models in, look at them, roll back, remove."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import EVERY, WATCH, Session, box_command, given, group
from appliance.cli.models import engine_settings
from appliance.cli.models.canary import MODEL
from appliance.cli.models.canary import app as canary
from appliance.cli.models.canary import fields as canary_fields
from appliance.cli.models.catalog import app as catalog
from appliance.cli.models.catalog import fetched
from appliance.cli.models.deploy import app as deploy
from appliance.cli.operations import TIMEOUT, WAIT, finish

app = group("Models: base models, fine-tuned ones, and their versions.")
app.registered_commands += [*deploy.registered_commands, *canary.registered_commands, *catalog.registered_commands]


@box_command(
    app,
    "appliance model import ./Llama-3.2-1B-Instruct --name llama-1b",
    "appliance model import ./Qwen3-8B-Q4_K_M.gguf      a file of llama.cpp's, dequantised to bfloat16",
    "appliance model import smollm2-135m                by its name in `appliance model catalog`",
    "appliance model import Qwen/Qwen3-0.6B             from a hub, where the box may go online",
    "appliance model import ./my-lora --base smollm2-135m    a LoRA adapter, as peft writes it",
    "",
    "A directory needs config.json, tokenizer files and *.safetensors. A box is offline unless its configuration",
    "says hub_offline = false. Packages are downloaded by pip, as its settings say. An adapter, a directory or hub",
    "id too, has adapter_config.json and adapter_model.safetensors; it is served on the engines of its base.",
    name="import",
)
def import_model(
    session: Session,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Directory, .gguf file, name in the catalog, or hub id.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="The name for clients. Default: from the source.")] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="NAME", help="The base of an adapter. Default: what the adapter names."),
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")] = None,
    wait: WAIT = True,
    timeout: TIMEOUT = None,
) -> None:
    """Copy a model in, checked tensor by tensor; it can be called and fine-tuned from then on."""
    is_local = session.client.address.is_local
    if is_local and Path(source).expanduser().exists():
        source = str(Path(source).expanduser().resolve())
    with fetched(source, name, is_local) as found:
        body = given(source=found.source, name=found.name, base=base, revision=revision, origin=found.origin)
        started = session.client.post("/admin/v1/models/import", body)
        session.show(finish(session, started, wait or found.temporary, timeout), _operation)


@box_command(app, "appliance model list", "appliance model list -o json | jq -r '.data[].name'", name="list")
def list_models(session: Session, watch: WATCH = False, every: EVERY = 2.0) -> None:
    """List models: the version that answers, its challenger (a canary), and whether it is awake.

    A key without the scope read gets the names that it may ask, as OpenAI's API has them.
    """
    session.follow(
        lambda: session.own_unless_all(
            lambda: session.client.listed("/admin/v1/models"), lambda: session.client.get("/v1/models")
        ),
        _table,
        watch,
        every,
    )


@box_command(app, "appliance model show starter", "appliance model show ft:starter:local:gsm8k:a1b2c3d4")
def show(session: Session, model: MODEL) -> None:
    """Show one model with all its versions and the tiers that each is in."""
    answer = session.own_unless_all(
        lambda: session.client.get(paths.model(model)),
        lambda: session.client.get(f"/v1/models/{paths.segment(model)}"),
    )
    session.show(answer, _one)


@box_command(app, "appliance model rm ft:starter:local:gsm8k:a1b2c3d4")
def rm(session: Session, model: MODEL) -> None:
    """Delete a model with all its versions. Exit code 5 if a job uses it."""
    session.show(session.client.delete(paths.model(model)), lambda answer: f"deleted {answer['name']}")


@box_command(app, "appliance model verify starter", "appliance model verify starter -o json")
def verify(session: Session, model: MODEL, wait: WAIT = True, timeout: TIMEOUT = None) -> None:
    """Compare every tensor of every version with its checksum. Exit code 1 names what is damaged."""
    started = session.client.post(f"{paths.model(model)}/verify")
    session.show(finish(session, started, wait, timeout), _operation)


@box_command(
    app,
    "appliance model rollback ft:starter:local:gsm8k:a1b2c3d4",
    "appliance model rollback ft:starter:local:gsm8k:a1b2c3d4 --version step-120",
)
def rollback(
    session: Session,
    model: MODEL,
    version: Annotated[
        str | None, typer.Option("--version", help="The version to serve. Default: the one before.")
    ] = None,
) -> None:
    """Serve an older version, swapped in under running requests; a model that has a canary loses that instead."""
    answer = session.client.send("POST", f"{paths.model(model)}/rollback", body=given(version=version), timeout_s=600)
    session.show(answer, _rolled_back)


def _rolled_back(done: dict[str, Any]) -> str:
    swap, text = done["swap"], f"{done['model']}: {done['from']} -> {done['to']}"
    if swap.get("how") is None:
        return text
    return (
        f"{text}, {swap['how']}: {formats.size(swap['bytes'])} in {formats.duration(swap['seconds'])}, "
        f"streams paused {formats.duration(swap['pause_s'])}"
    )


@box_command(
    app,
    "appliance model pin ft:starter:local:gsm8k:a1b2c3d4 step-120",
    "appliance model pin ft:starter:local:gsm8k:a1b2c3d4 step-120 --off",
)
def pin(
    session: Session,
    model: MODEL,
    version: Annotated[str, typer.Argument(metavar="VERSION")],
    off: Annotated[bool, typer.Option("--off", help="Leave it to the retention rules again.")] = False,
) -> None:
    """Keep a version in every tier, whatever the retention rules say."""
    answer = session.client.post(f"{paths.model(model)}/pin", {"version": version, "pinned": not off})
    session.show(answer, lambda done: f"{done['model']} {done['version']} is {'' if done['pinned'] else 'not '}pinned")


@box_command(
    app,
    "appliance model share ft:starter:local:gsm8k:a1b2c3d4 --with bob",
    "appliance model share ft:starter:local:gsm8k:a1b2c3d4 --with all",
    "appliance model share starter --with all --stop               for its owner and operators alone from now on",
    "",
    "A model that a job makes is for the owner of its key alone; one that was imported is for everybody. With a",
    "key of the scope fine_tuning an owner shares his own models, an operator any.",
)
def share(
    session: Session,
    model: MODEL,
    with_: Annotated[list[str], typer.Option("--with", metavar="OWNER|all", help="Owners of keys; repeatable.")],
    stop: Annotated[bool, typer.Option("--stop", help="Stop sharing it with them.")] = False,
) -> None:
    """Let other owners use a model, its versions and checkpoints; `model show` says whom it is shared with."""
    body = {"owners": [owner for owner in with_ if owner != "all"], "everybody": "all" in with_, "stop": stop}
    answer = session.client.post(f"/v1/models/{paths.segment(model)}/share", body)
    session.show(answer, lambda made: f"{made['id']} is for {_audience(made)}")
    if not stop and (nobody := answer.get("without_key")):
        output.say(f"note: no key has the owner {', '.join(nobody)} yet (`appliance key list` shows owners)")


def _audience(made: dict[str, Any]) -> str:
    if made["shared_with_everybody"]:
        return "everybody"
    names = [name for name in (made["owner"], *made["shared_with"]) if name]
    return f"{', '.join(names)} and operators" if names else "operators alone"


def _operation(operation: dict[str, Any]) -> Any:
    result = operation.get("result") or {}
    rows: list[tuple[str, object]] = [("operation", operation["id"]), ("state", operation["state"])]
    checked = None
    for name, value in result.items():
        if name == "versions" and value and isinstance(value[0], dict):
            checked = output.table(
                ("VERSION", ">TENSORS", ">SIZE", "PLACE"),
                ((v["version"], v["tensors"], formats.size(v["bytes"]), v["path"]) for v in value),
                empty="",
            )
        elif name == "warnings":
            continue
        elif name == "bytes":
            rows.append(("size", formats.size(value)))
        elif name == "params":
            rows.append(("parameters", formats.count(value)))
        else:
            rows.append((name, formats.or_dash(value)))
    return output.stack(output.fields(*rows), checked, output.notes(result.get("warnings", ())))


def _table(answer: dict[str, Any]) -> Any:
    if any(map(_is_callable, answer["data"])):
        return output.table(
            ("MODEL", "OF", ">CONTEXT", "CREATED", "STATE"),
            ((m["id"], m["owned_by"], formats.count(m["max_model_len"]), *_since(m)) for m in answer["data"]),
            empty="",
        )
    troubles = [f"{m['name']}: {m['message']}" for m in answer["data"] if m.get("message")]
    table = output.table(
        ("MODEL", "KIND", "ARCHITECTURE", ">PARAMS", ">SIZE", "VERSION", "CHALLENGER", "STATE"),
        (
            (
                m["name"],
                _kind(m),
                m["arch"],
                formats.count(m["params"]),
                formats.size(m["bytes"]),
                formats.or_dash(m["active_version"]),
                formats.or_dash((m.get("aliases") or {}).get("challenger")),
                m["state"],
            )
            for m in answer["data"]
        ),
        empty="no models; `appliance model import` brings one, `appliance model catalog` names some",
    )
    return output.stack(table, output.notes(troubles))


def _is_callable(model: dict[str, Any]) -> bool:
    """Whether it is OpenAI's object, which keys without the scope read get."""
    return model.get("object") == "model"


def _since(model: dict[str, Any]) -> tuple[str, str]:
    return formats.moment(model["created"]), formats.or_dash(model["state_details"] or model["state"])


def _kind(model: dict[str, Any]) -> str:
    adapter = model.get("adapter")
    return f"adapter of {adapter['base']}" if adapter else model["kind"]


def _one(model: dict[str, Any]) -> Any:
    if _is_callable(model):
        return _one_of_another(model)
    last = model.get("canary")
    return output.stack(
        _about(model),
        _versions(model),
        canary_fields(last) if last else None,
        output.notes((model.get("info") or {}).get("warnings", ())),
    )


def _one_of_another(model: dict[str, Any]) -> Any:
    created, state = _since(model)
    context = formats.count(model["max_model_len"])
    return output.fields(
        ("model", model["id"]),
        ("of", model["owned_by"]),
        ("context", f"{context} tokens"),
        ("created", created),
        ("state", state),
    )


def _about(model: dict[str, Any]) -> Any:
    adapter = model.get("adapter")
    return output.fields(
        ("model", model["name"]),
        (
            "kind",
            f"adapter of {adapter['base']} {adapter['base_version']}, rank {adapter['rank']}"
            if adapter
            else model["kind"] + (f" of {model['base']}" if model.get("base") else ""),
        ),
        ("architecture", model["arch"]),
        ("parameters", formats.count(model["params"])),
        ("size", formats.size(model["bytes"])),
        ("context", _context(model)),
        ("source", formats.or_dash(model.get("source"))),
        ("for", _for_whom(model)),
        *engine_settings.parsers(model.get("info") or {}),
        *engine_settings.fields(model.get("settings") or {}, model.get("settings_number") or 0),
        *([("set by the box", note)] if (note := model.get("settings_note")) else []),
        *([("challenger", challenger)] if (challenger := (model.get("aliases") or {}).get("challenger")) else []),
        ("state", model["state"] + (f": {model['message']}" if model.get("message") else "")),
        *([("versions by", note)] if (note := model.get("reload_note")) else []),
    )


def _versions(model: dict[str, Any]) -> Any:
    return output.table(
        ("VERSION", "CREATED", ">SIZE", "IN", "PINNED", "SOURCE"),
        (
            (
                v["version"] + (" *" if v["version"] == model["active_version"] else ""),
                formats.moment(v["created_s"]),
                formats.size(v["bytes"]),
                _places(v),
                "yes" if v["pinned"] else "-",
                formats.or_dash(v["source"]),
            )
            for v in model["versions"]
        ),
        empty="no versions",
    )


def _context(model: dict[str, Any]) -> str:
    note = model.get("context_note")
    return f"{formats.or_dash(model.get('max_model_len'))} tokens" + (f": {note}" if note else "")


def _for_whom(model: dict[str, Any]) -> str:
    return _audience({**model, "shared_with_everybody": "*" in model["shared_with"]})


def _places(version: dict[str, Any]) -> str:
    return " + ".join(version["tiers"]) or "-"
