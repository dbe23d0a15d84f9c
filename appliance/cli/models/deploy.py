"""`appliance model deploy`: how a model is to be served."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import Session, box_command, given, group
from appliance.cli.errors import BadUsage
from appliance.cli.models import engine_settings
from appliance.cli.models.canary import MODEL
from appliance.cli.models.engine_settings import ENGINE

_NULLABLE = ("max_replicas", "ttft_p95_s", "tpot_p95_ms", "idle_sleep_s")


def _engine(flag: str, metavar: str, text: str = "") -> Any:
    """An option that sets a model's engines up."""
    return typer.Option(flag, metavar=metavar, help=text or None, rich_help_panel=ENGINE)


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
    max_model_len: Annotated[str | None, _engine("--max-model-len", "TOKENS|none")] = None,
    dtype: Annotated[
        str | None,
        _engine("--dtype", "TYPE|none", "bfloat16, float16 or float32."),
    ] = None,
    kv_cache_dtype: Annotated[str | None, _engine("--kv-cache-dtype", "TYPE|none", "auto, fp8, ...")] = None,
    kv_cache_bytes: Annotated[str | None, _engine("--kv-cache-bytes", "BYTES|none", "Per device.")] = None,
    gpu_memory: Annotated[
        str | None,
        _engine("--gpu-memory", "FRACTION|none", "Of a GPU, for one engine."),
    ] = None,
    max_num_seqs: Annotated[str | None, _engine("--max-num-seqs", "N|none", "Requests at once.")] = None,
    tool_parser: Annotated[
        str | None,
        _engine("--tool-parser", "NAME|auto|none", "vLLM's name; auto: by the model's family."),
    ] = None,
    reasoning_parser: Annotated[
        str | None, _engine("--reasoning-parser", "NAME|auto|none", "As --tool-parser.")
    ] = None,
    chat_template: Annotated[str | None, _engine("--chat-template", "FILE|none", "A Jinja file.")] = None,
    system_prompt: Annotated[
        str | None,
        _engine("--system-prompt", "TEXT|none", "For conversations that bring none."),
    ] = None,
    temperature: Annotated[
        str | None,
        _engine("--temperature", "X|none", "Of requests that name none; as the next five."),
    ] = None,
    top_p: Annotated[str | None, _engine("--top-p", "X|none")] = None,
    top_k: Annotated[str | None, _engine("--top-k", "N|none")] = None,
    min_p: Annotated[str | None, _engine("--min-p", "X|none")] = None,
    repetition_penalty: Annotated[str | None, _engine("--repetition-penalty", "X|none")] = None,
    max_tokens: Annotated[str | None, _engine("--max-tokens", "N|none")] = None,
    draft: Annotated[
        str | None,
        _engine("--draft", "N|none", "Tokens guessed from the prompt and checked together."),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        _engine("--engine-arg", "KEY=VALUE|KEY=none", "One of vLLM's arguments; may be repeated."),
    ] = None,
    settings_number: Annotated[
        int | None,
        typer.Option(
            "--settings", metavar="N", min=0, help="Go back to settings number N; 0: to none.", rich_help_panel=ENGINE
        ),
    ] = None,
) -> None:
    """Change how a model is served; only what is given changes, and it takes effect at once.

    A change of the engines' settings is checked by vLLM first; then each engine finishes its requests and is started
    again, while further requests are held.
    """
    texts = {
        "max_model_len": max_model_len,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "kv_cache_bytes": kv_cache_bytes,
        "gpu_memory": gpu_memory,
        "max_num_seqs": max_num_seqs,
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser,
        "chat_template": chat_template,
        "system_prompt": system_prompt,
        "draft_tokens": draft,
    }
    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "max_tokens": max_tokens,
    }
    change = engine_settings.change(texts, sampling, engine_arg or [], settings_number)
    body = given(min_replicas=min_replicas, tensor_parallel=tensor_parallel, pinned=pin)
    for name, text in zip(_NULLABLE, (max_replicas, ttft_p95_s, tpot_p95_ms, idle_sleep_s), strict=True):
        if text is not None:
            body[name] = None if text == "none" else _number(name, text)
    path = f"{paths.model(model)}/deployment"
    answer = session.client.send("PATCH", path, body=body) if body else session.client.get(path)
    path = f"{paths.model(model)}/settings"
    told = session.client.send("PATCH", path, body=change) if change else session.client.get(path)
    answer |= {"settings": told["settings"], "settings_number": told["number"], "settings_history": told["history"]}
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
    )
