"""`appliance file check|prepare`: report on training data, and write a better file.

A local file is read here, in a process of its own, and needs no box; a file that the box has is read there.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import Session, box_command, given, group
from appliance.cli.complete import models as complete_models
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.jobs.hyperparameters import METHOD_NAMES
from appliance.cli.own_process import python, why_it_failed

app = group("Checks of training data; `appliance file` takes these commands in.")

TARGET = Annotated[str, typer.Argument(metavar="FILE|FILE_ID", help="On this machine, or one that the box has.")]
MODEL = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="DIR|NAME",
        help="Count tokens as this model does, and find examples too long for it: a directory, or a model of the box.",
        autocompletion=complete_models,
    ),
]
MAX_TOKENS = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", metavar="N", min=1, help="Longer examples are too long. Default: the model's context."
    ),
]
METHOD = Annotated[
    str | None, typer.Option("--method", metavar="NAME", help=f"What it is for: {', '.join(METHOD_NAMES)}.")
]
_TITLES = {
    "bad_lines": "bad lines",
    "empty": "without an answer",
    "duplicates": "duplicates",
    "near_duplicates": "near duplicates",
    "too_long": "too long",
    "contaminated": "as in the validation set",
    "personal_data": "personal data, secrets",
}
_SHOWN = 3


def _is_here(options: dict[str, Any]) -> bool:
    return Path(options["target"]).expanduser().is_file()


@box_command(
    app,
    "appliance file check train.jsonl",
    "appliance file check train.jsonl --against valid.jsonl --model ./SmolLM2-135M-Instruct",
    "appliance file check file-abc123 --model smollm2-135m         on the box",
    "appliance file check train.jsonl --at-most duplicates=1% --at-most personal_data=0    for scripts",
    "",
    "Exit code: 0; 1 if a job would refuse the file, or if there is more of something than --at-most allows.",
    boxless=_is_here,
)
def check(
    session: Session,
    target: TARGET,
    model: MODEL = None,
    max_tokens: MAX_TOKENS = None,
    method: METHOD = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="FILE|FILE_ID", help="The validation set, which training must not have seen."
        ),
    ] = None,
    at_most: Annotated[
        list[str] | None,
        typer.Option("--at-most", metavar="CHECK=SHARE", help="Fail if a check finds more (1%, 0); repeatable."),
    ] = None,
) -> None:
    """Show what is in training data, in numbers and with examples by line. Changes nothing."""
    limits = dict(map(_limit, at_most or ()))
    options = given(model=model, max_tokens=max_tokens, method=method, against=against)
    report = _run(session, target, "check", options, {})
    session.show(report, drawn)
    _fail_beyond(report, limits)


@box_command(
    app,
    "appliance file prepare train.jsonl --dedup --near-dedup --drop-empty --mask-pii      makes train.prepared.jsonl",
    "appliance file prepare train.jsonl --decontaminate valid.jsonl --out clean.jsonl",
    "appliance file prepare train.jsonl --split 0.05            a twentieth goes into train.prepared.valid.jsonl",
    "appliance file prepare file-abc123 --model smollm2-135m --drop-too-long     a new file on the box",
    "",
    "The lineage of a local file (.lineage.json) is written next to it: its source, and how much was dropped.",
    boxless=_is_here,
)
def prepare(
    session: Session,
    target: TARGET,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write a local file. Default: next to it, as NAME.prepared.jsonl."),
    ] = None,
    dedup: Annotated[bool, typer.Option("--dedup", help="Drop what repeats an earlier example.")] = False,
    near_dedup: Annotated[bool, typer.Option("--near-dedup", help="Drop what nearly repeats an earlier one.")] = False,
    drop_too_long: Annotated[
        bool, typer.Option("--drop-too-long", help="Drop examples that are too long; needs --model or --max-tokens.")
    ] = False,
    drop_empty: Annotated[bool, typer.Option("--drop-empty", help="Drop examples without an answer.")] = False,
    drop_bad: Annotated[bool, typer.Option("--drop-bad", help="Drop lines that no job would take.")] = False,
    mask_pii: Annotated[bool, typer.Option("--mask-pii", help="Replace personal data by [EMAIL], [CARD] …")] = False,
    decontaminate: Annotated[
        str | None,
        typer.Option("--decontaminate", metavar="FILE|FILE_ID", help="Drop what this validation set has too."),
    ] = None,
    split: Annotated[
        float | None, typer.Option("--split", metavar="SHARE", help="Put this share into a validation file.")
    ] = None,
    model: MODEL = None,
    max_tokens: MAX_TOKENS = None,
    method: METHOD = None,
) -> None:
    """Write a new file. Only what the options ask for is changed."""
    drops = {
        "duplicates": dedup,
        "near_duplicates": near_dedup,
        "too_long": drop_too_long,
        "empty": drop_empty,
        "bad_lines": drop_bad,
        "contaminated": decontaminate is not None,
    }
    if drop_too_long and model is None and max_tokens is None:
        raise BadUsage("--drop-too-long needs --model or --max-tokens, which say what is too long")
    if split is not None and not 0 < split < 1:
        raise BadUsage(f"--split is {split}; expected more than 0 and less than 1")
    if session.box_client is not None and out is not None:
        raise BadUsage("--out is for local files; the box stores the new file under an id of its own")
    options = given(model=model, max_tokens=max_tokens, method=method, against=decontaminate)
    chosen = {"drop": [name for name, wanted in drops.items() if wanted], "mask": mask_pii, "split": split}
    session.show(_run(session, target, "prepare", options, chosen, out), made)


def _run(
    session: Session, target: str, act: str, options: dict[str, Any], chosen: dict[str, Any], out: Path | None = None
) -> dict[str, Any]:
    """Let the box, or a process of this command, `check` or `prepare` the file. Raises CliError."""
    if session.box_client is not None:
        from appliance.cli.client import WORK_TIMEOUT_S  # fenced: HTTP would add to the time of every `--help`

        with output.progress(f"the box reads {target}"):
            path, body = f"{paths.file(target)}/{act}", options | {k: v for k, v in chosen.items() if v is not None}
            return session.client.send("POST", path, body=body, timeout_s=WORK_TIMEOUT_S)
    here, model = Path(target).expanduser(), options.get("model")
    if model is not None and not Path(model).expanduser().is_dir():
        raise BadUsage(
            f"--model is {model!r}; for a local file it is a directory with tokenizer.json. Upload the file to have it "
            "checked with a model of the box"
        )
    names = {name: str(Path(options[name]).expanduser()) for name in ("model", "against") if name in options}
    request: dict[str, Any] = {"file": str(here), "check": options | names, "niceness": 0}
    if act == "prepare":
        new = out or here.with_name(f"{here.stem}.prepared.jsonl")
        targets = [new, new.with_name(f"{new.stem}.valid.jsonl")][: 1 if chosen["split"] is None else 2]
        lineage = str(new.with_name(f"{new.stem}.lineage.json"))
        request |= {"prepare": chosen, "targets": list(map(str, targets)), "lineage": lineage}
    with output.progress(f"reading {target}"):
        command = python("train.data_checks.process", json.dumps(request))
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        why = why_it_failed(done.stderr, done.returncode)
        raise CommandFailed(f"the file could not be read to its end: {why}") from None
    if "error" in answer:
        raise (BadUsage if answer["bad_option"] else CommandFailed)(answer["error"])
    return answer


def _limit(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        most = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        most = -1
    if name not in _TITLES or not 0 <= most <= 1:
        raise BadUsage(
            f"--at-most is {text!r}; expected CHECK=SHARE, such as duplicates=1%, with one of {', '.join(_TITLES)}"
        )
    return name, most


def _fail_beyond(report: dict[str, Any], limits: dict[str, float]) -> None:
    """Raises CommandFailed."""
    faults = []
    for name, most in limits.items():
        found = report["checks"].get(name)
        if found is None:
            raise BadUsage(f"--at-most has {name}, which was not checked; it needs --against, --model or --max-tokens")
        if found["share"] > most:
            faults.append(f"{_TITLES[name]}: {found['count']:,} ({found['share']:.2%}), at most {most:.2%}")
    if not report["usable"]:
        faults.append(f"a job would refuse the file{'' if report['examples'] else ': it has no examples'}")
    if faults:
        raise CommandFailed("; ".join(faults))


def drawn(report: dict[str, Any]) -> Any:
    """A report, for people."""
    rows = [
        (_TITLES[name], f"{found['count']:,}", f"{found['share']:.2%}" if found["count"] else "", _counts(found))
        for name, found in report["checks"].items()
    ]
    lines = [row for name, found in report["checks"].items() for row in _lines(name, found)]
    file, tokens, lengths, left_out = (report[name] for name in ("file", "tokens", "lengths", "keys_left_out"))
    sure = "" if tokens["exact"] else " (estimated; --model counts them)"
    about = [
        ("file", f"{file['file']} ({formats.size(file['bytes'])}, {file['shape'] or 'no shape'})"),
        ("examples", f"{report['examples']:,}"),
        ("tokens", f"{tokens['total']:,}{sure}"),
        ("length", ", ".join(f"{name} {value:,}" for name, value in lengths.items())),
        ("left out", ", ".join(f"{name} {n:,}" for name, n in left_out.items())),
    ]
    return output.stack(
        output.fields(*[pair for pair in about if pair[1]]),
        output.table(("CHECK", ">EXAMPLES", ">SHARE", "KINDS"), rows, empty=""),
        output.table((">LINE", "CHECK", "WHAT"), lines, empty="") if lines else None,
    )


def _counts(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in found.get("kinds", {}).items())


def _lines(name: str, found: dict[str, Any]) -> list[tuple[str, str, str]]:
    first = found["first"]
    if name == "bad_lines":  # one cause of many lines is shown once
        first = list({one["reason"]: one for one in reversed(first)}.values())[::-1]
    rows = [(str(one["line"]), _TITLES[name], _told(one)) for one in first[:_SHOWN]]
    left = found["count"] - len(rows)
    return [*rows, ("…", _TITLES[name], f"and {left:,} more")] if left > 0 else rows


def _told(one: dict[str, Any]) -> str:
    part = one.get("likeness", one.get("share"))
    of = f"line {one.get('of')}{' of the validation set' if 'share' in one else ''}"
    words = [one[name] for name in ("reason", "kind", "value") if name in one]
    words += [of if part is None else f"{part:.0%} of {of}"] if "of" in one else []
    return " ".join([*words, *([f"{one['tokens']:,} tokens"] if "tokens" in one else [])])


def made(lineage: dict[str, Any]) -> Any:
    """The outcome of a preparation, for people."""
    dropped = ((_TITLES[name], f"{n:,}") for name, n in lineage["dropped"].items())
    masked, source = ", ".join(f"{kind} {n:,}" for kind, n in lineage["masked"].items()), lineage["from"]
    return output.stack(
        output.table(
            ("MADE", ">EXAMPLES", ">BYTES"),
            ((one["file"], f"{one['examples']:,}", f"{one['bytes']:,}") for one in lineage["made"]),
            empty="",
        ),
        output.table(("DROPPED", ">EXAMPLES"), dropped, empty="nothing was dropped"),
        f"masked: {masked}" if masked else None,
        f"from: {source['file']} (sha256 {source['sha256'][:12]}…), {source['examples']:,} examples",
    )
