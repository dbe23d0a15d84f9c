"""`appliance model deploy`: how a model is to be served."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import Session, box_command, given, group, with_options
from appliance.cli.errors import BadUsage
from appliance.cli.models import engine_settings
from appliance.cli.models.canary import MODEL

NO_CHANGE: dict[str, Any] = {}
_NULLABLE = ("max_replicas", "ttft_p95_s", "tpot_p95_ms", "idle_sleep_s")


app = group("How models are served; `appliance model` takes this command in.")


@box_command(
    app,
    "appliance model deploy starter --min-replicas 1 --max-replicas 4",
    "appliance model deploy llama-70b --tensor-parallel 4 --ttft-p95-s 2 --tpot-p95-ms 100",
    "appliance model deploy starter --pin               a replica of it is never given to training",
    "appliance model deploy starter --idle-sleep-s none --max-replicas none",
    "appliance model deploy starter --max-model-len 4096 --max-num-seqs 16 --temperature 0.2",
    "appliance model deploy starter --system-prompt 'Answer in one sentence.' --engine-arg block-size=64",
    "appliance model deploy starter --settings 1        the first settings again",
    "appliance model deploy starter                     shows how it is served",
)
@with_options("change", engine_settings.OPTIONS, engine_settings.change)
def deploy(
    session: Session,
    model: MODEL,
    min_replicas: Annotated[int | None, typer.Option("--min-replicas", metavar="N", min=0)] = None,
    max_replicas: Annotated[
        str | None,
        typer.Option("--max-replicas", metavar="N|none", help="The most replicas; none: [serve] max_replicas."),
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", metavar="N", min=1, help="Devices of one replica.")
    ] = None,
    ttft_p95_s: Annotated[
        str | None,
        typer.Option("--ttft-p95-s", metavar="SECONDS|none", help="Target: time to first token of 95 % of requests."),
    ] = None,
    tpot_p95_ms: Annotated[
        str | None, typer.Option("--tpot-p95-ms", metavar="MS|none", help="Target: time per further token.")
    ] = None,
    idle_sleep_s: Annotated[
        str | None,
        typer.Option("--idle-sleep-s", metavar="SECONDS|none", help="Sleep after this long without a request."),
    ] = None,
    pin: Annotated[
        bool | None, typer.Option("--pin/--unpin", help="Its replicas come first and are never given to training.")
    ] = None,
    change: dict[str, Any] = NO_CHANGE,
) -> None:
    """Change how a model is served; only what is given changes, and it takes effect at once.

    A change of the engines' settings is checked by vLLM first; then each engine finishes its requests and is started
    again, while further requests are held. If none starts with them, the box takes the settings back that served last,
    and `appliance status` and `model show` say why.
    """
    body = given(min_replicas=min_replicas, tensor_parallel=tensor_parallel, pinned=pin)
    for name, text in zip(_NULLABLE, (max_replicas, ttft_p95_s, tpot_p95_ms, idle_sleep_s), strict=True):
        if text is not None:
            body[name] = None if text == "none" else _number(name, text)
    path = f"{paths.model(model)}/deployment"
    answer = session.client.send("PATCH", path, body=body) if body else session.client.get(path)
    path = f"{paths.model(model)}/settings"
    found = session.client.send("PATCH", path, body=change) if change else session.client.get(path)
    answer |= {"settings": found["settings"], "settings_number": found["number"], "settings_history": found["history"]}
    answer["settings_note"] = found["history"][0].get("note", "") if found["history"] else ""
    session.show(answer, _deployment)


def _number(name: str, text: str) -> float | int:
    option = "--" + name.replace("_", "-")
    try:
        return int(text) if name == "max_replicas" else float(text)
    except ValueError:
        raise BadUsage(f"{option} is {text!r}; expected a number, or none") from None


def _deployment(answer: dict[str, Any]) -> Any:
    most = answer["max_replicas"]
    return output.fields(
        ("model", answer["model"]),
        ("replicas", f"{answer['min_replicas']} to {'[serve] max_replicas' if most is None else most}"),
        ("tensor parallel", answer["tensor_parallel"]),
        ("TTFT p95", formats.duration(answer["ttft_p95_s"])),
        ("TPOT p95", "-" if answer["tpot_p95_ms"] is None else f"{answer['tpot_p95_ms']:g} ms"),
        ("sleeps after", formats.duration(answer["idle_sleep_s"])),
        ("pinned", "yes" if answer["pinned"] else "no"),
        ("fails", formats.or_dash(answer["failed_reason"])),
        *engine_settings.fields(answer["settings"], answer["settings_number"]),
        *([("set by the box", note)] if (note := answer["settings_note"]) else []),
    )
