"""`appliance file check|prepare`: what is in training data, and a better file made of it.

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
WORDS = Annotated[
    Path | None, typer.Option("--words", exists=True, dir_okay=False, help="A list of your own, one entry a line.")
]
LIKE = Annotated[
    float | None,
    typer.Option(
        "--like", metavar="SHARE", help="The share of words that near duplicates have in common. Default: 0.8."
    ),
]
_TITLES = {
    "bad_lines": "bad lines",
    "empty": "without an answer",
    "encoding": "oddly encoded",
    "duplicates": "duplicates",
    "near_duplicates": "near duplicates",
    "too_long": "too long",
    "contaminated": "as in the validation set",
    "language": "in a rare language",
    "personal_data": "personal data, secrets",
    "toxic": "listed words",
}
_SHOWN = 3


def _is_here(options: dict[str, Any]) -> bool:
    return Path(options["target"]).expanduser().is_file()


@box_command(
    app,
    "appliance file check train.jsonl",
    "appliance file check train.jsonl --against valid.jsonl --model ./SmolLM2-135M-Instruct",
    "appliance file check file-abc123 --model smollm2-135m         on the box; with the cost of an epoch, once known",
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
    words: WORDS = None,
    like: LIKE = None,
    leave_out: Annotated[
        list[str] | None, typer.Option("--leave-out", metavar="CHECK", help="Leave this check out; repeatable.")
    ] = None,
    at_most: Annotated[
        list[str] | None,
        typer.Option("--at-most", metavar="CHECK=SHARE", help="Fail if a check finds more (1%, 0); repeatable."),
    ] = None,
) -> None:
    """Show what is in training data, in numbers and with examples by line. Changes nothing."""
    limits = dict(map(_limit, at_most or ()))
    chosen = given(max_tokens=max_tokens, method=method, like=like, leave_out=leave_out)
    if session.box_client is None:
        options = chosen | given(model=_directory(model), against=against, words=_text(words))
        report = _here({"files": [str(Path(target).expanduser())], "check": options}, f"reading {target}")
    else:
        body = chosen | given(model=model, against=against, words=_list_of(words))
        with output.progress(f"the box reads {target}"):
            report = _there(session, f"{paths.file(target)}/check", body)
    session.show(report, drawn)
    _fail_beyond(report, limits)


@box_command(
    app,
    "appliance file prepare train.jsonl --dedup --near-dedup --drop-empty --mask-pii      makes train.prepared.jsonl",
    "appliance file prepare train.jsonl --decontaminate valid.jsonl --out clean.jsonl",
    "appliance file prepare train.jsonl --split 0.05            a twentieth goes into train.prepared.valid.jsonl",
    "appliance file prepare a.jsonl --mix a.jsonl=0.7,b.jsonl=0.3 --order length",
    "appliance file prepare file-abc123 --model smollm2-135m --drop-too-long     a new file on the box",
    "",
    "The lineage of a local file (.lineage.json) is written next to it: what it was made of, and every line that was",
    "dropped.",
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
    drop_toxic: Annotated[bool, typer.Option("--drop-toxic", help="Drop examples with listed words.")] = False,
    mask_pii: Annotated[bool, typer.Option("--mask-pii", help="Replace personal data by [EMAIL], [CARD] …")] = False,
    decontaminate: Annotated[
        str | None,
        typer.Option("--decontaminate", metavar="FILE|FILE_ID", help="Drop what this validation set has too."),
    ] = None,
    split: Annotated[
        float | None, typer.Option("--split", metavar="SHARE", help="Put this share into a validation file.")
    ] = None,
    mix: Annotated[
        str | None,
        typer.Option("--mix", metavar="FILE=SHARE,…", help="Mix several files, each by its share of the result."),
    ] = None,
    order: Annotated[str, typer.Option("--order", help="given, shuffled, or length: short examples first.")] = "given",
    seed: Annotated[int, typer.Option("--seed", min=0, help="The seed of every random choice.")] = 0,
    model: MODEL = None,
    max_tokens: MAX_TOKENS = None,
    method: METHOD = None,
    words: WORDS = None,
    like: LIKE = None,
) -> None:
    """Write a new file from one or several. Only what the options ask for is changed."""
    wishes = {
        "duplicates": dedup,
        "near_duplicates": near_dedup,
        "too_long": drop_too_long,
        "empty": drop_empty,
        "bad_lines": drop_bad,
        "toxic": drop_toxic,
        "contaminated": decontaminate is not None,
    }
    if drop_too_long and model is None and max_tokens is None:
        raise BadUsage("--drop-too-long needs --model or --max-tokens, which say what is too long")
    chosen = given(split=split) | {"drop": [n for n, wish in wishes.items() if wish], "mask": mask_pii}
    chosen |= {"order": order, "seed": seed, "mix": _mix(mix)}
    options = given(max_tokens=max_tokens, method=method, like=like)
    if session.box_client is not None:
        if out is not None:
            raise BadUsage("--out is for local files; the box keeps what it makes of its own under an id of its own")
        body = options | chosen | given(model=model, against=decontaminate, words=_list_of(words))
        body["mix"] = [{"file": file, "share": share} for file, share in chosen["mix"]]
        with output.progress(f"the box reads {target}"):
            answer = _there(session, f"{paths.file(target)}/prepare", body)
        session.show(answer, made)
        return
    here = Path(target).expanduser()
    new = out or here.with_name(f"{here.stem}.prepared.jsonl")
    files = [here, *(Path(path) for path, _ in chosen["mix"] if Path(path).resolve() != here.resolve())]
    request = {
        "files": list(map(str, files)),
        "check": options | given(model=_directory(model), against=decontaminate, words=_text(words)),
        "prepare": chosen,
        "target": str(new),
        "validation": str(new.with_name(f"{new.stem}.valid.jsonl")) if split is not None else None,
        "lineage": str(new.with_name(f"{new.stem}.lineage.json")),
    }
    session.show(_here(request, f"reading {target}"), made)


def _there(session: Session, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask the box, which reads whole files for its answer. Raises CliError."""
    from appliance.cli.client import WORK_TIMEOUT_S  # fenced: HTTP would add to the time of every `--help`

    return session.client.send("POST", path, body=body, timeout_s=WORK_TIMEOUT_S)


def _here(request: dict[str, Any], message: str) -> dict[str, Any]:
    """Ask a process of this command. Raises BadUsage, CommandFailed."""
    command = python("train.data_checks.process", json.dumps(request | {"niceness": 0}))
    with output.progress(message):
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


def _mix(text: str | None) -> list[list[Any]]:
    """[[file, share]]."""
    parts = []
    for part in text.split(",") if text else ():
        path, _, share = part.rpartition("=")
        try:
            parts.append([path, float(share)])
        except ValueError:
            path = ""
        if not path:
            raise BadUsage(f"--mix has {part!r}; expected FILE=SHARE, such as b.jsonl=0.3")
    return parts


def _directory(model: str | None) -> str | None:
    """Raises BadUsage."""
    if model is not None and not Path(model).expanduser().is_dir():
        raise BadUsage(
            f"--model is {model!r}; for a local file it is a directory with tokenizer.json. Upload the file to have it "
            "checked with a model of the box"
        )
    return None if model is None else str(Path(model).expanduser())


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _list_of(path: Path | None) -> list[str] | None:
    """Raises BadUsage."""
    try:
        return (
            None if path is None else [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        )
    except (OSError, UnicodeDecodeError) as error:
        raise BadUsage(f"--words {path} cannot be read: {error}") from error


def _fail_beyond(report: dict[str, Any], limits: dict[str, float]) -> None:
    """Raises CommandFailed."""
    faults = []
    for name, most in limits.items():
        found = report["checks"].get(name)
        if found is None:
            raise BadUsage(f"--at-most names {name}, which was not looked for")
        if found["share"] > most:
            faults.append(f"{_TITLES[name]}: {found['count']:,} ({found['share']:.2%}), at most {most:.2%}")
    if not report["usable"]:
        faults.append(f"a job would refuse the file{'' if report['examples'] else ': it has no examples'}")
    if faults:
        raise CommandFailed("; ".join(faults))


def drawn(report: dict[str, Any]) -> Any:
    """A report, for people."""
    rows = [
        (_TITLES[name], f"{found['count']:,}", f"{found['share']:.2%}" if found["count"] else "", _kinds(found))
        for name, found in report["checks"].items()
    ]
    first = [row for name, found in report["checks"].items() for row in _first(name, found)]
    left_out = ", ".join(_TITLES[name] for name in report["left_out"])
    return output.stack(
        output.fields(*_about(report)),
        output.table(("CHECK", ">EXAMPLES", ">SHARE", "WHAT"), rows, empty=""),
        output.table((">LINE", "CHECK", "WHAT"), first, empty="") if first else None,
        f"not looked for: {left_out}" if left_out else None,
    )


def _about(report: dict[str, Any]) -> list[tuple[str, object]]:
    tokens, lengths, epoch = report["tokens"], report["lengths"], report.get("epoch")
    sure = f" (of {tokens['counted_examples']:,} examples counted, of the others estimated)"
    if not tokens["counted_examples"]:
        sure = " (estimated; --model counts them)"
    about: list[tuple[str, object]] = [("file", _named(report["files"]))]
    about += [
        ("examples", f"{report['examples']:,}"),
        ("tokens", f"{tokens['total']:,}" + ("" if tokens["exact"] else sure)),
    ]
    if lengths:
        names = ("shortest", "p5", "p50", "p95", "p99", "longest")
        about.append(("length", ", ".join(f"{name} {lengths[name]:,}" for name in names)))
        about.append(("", f"{lengths['edges'][0]:,} {lengths['curve']} {lengths['edges'][1]:,}"))
    if report["languages"]:
        about.append(("languages", ", ".join(f"{name} {n:,}" for name, n in list(report["languages"].items())[:6])))
    if report.get("keys_left_out"):
        about.append(("left out", ", ".join(f"{name} {n:,}" for name, n in report["keys_left_out"].items())))
    if epoch is not None:
        known = [f"{h:.2g} device hours ({name})" for name, h in epoch["device_hours"].items() if h is not None]
        about.append(("an epoch", ", ".join(known) or "of a speed that this box does not know yet"))
    return about


def _named(files: list[dict[str, Any]]) -> str:
    return ", ".join(f"{file['file']} ({formats.size(file['bytes'])}, {file['shape'] or 'no shape'})" for file in files)


def _kinds(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in list(found.get("kinds", {}).items())[:6])


def _first(name: str, found: dict[str, Any]) -> list[tuple[str, str, str]]:
    first = found["first"]
    if name == "bad_lines":  # one cause of many lines is shown once
        first = list({one["reason"]: one for one in reversed(first)}.values())[::-1]
    rows = [(f"{one['line']}{_in(one, 'source')}", _TITLES[name], _told(one)) for one in first[:_SHOWN]]
    left = found["count"] - len(rows)
    return [*rows, ("…", _TITLES[name], f"and {left:,} more")] if left > 0 else rows


def _told(one: dict[str, Any]) -> str:
    words = []
    if "reason" in one:
        words.append(one["reason"] + (f", near {one['near']!r}" if "near" in one else ""))
    if "likeness" in one or "share" in one:
        words.append(f"{one.get('likeness', one.get('share')):.0%} of")
    if "of" in one:
        words.append(f"line {one['of']}{_in(one, 'of_source')}{' of the validation set' if 'share' in one else ''}")
    words += [str(one[name]) for name in ("kind", "value", "language", "word") if name in one]
    if "tokens" in one:
        words.append(f"{one['tokens']:,} tokens")
    return " ".join(words)


def _in(one: dict[str, Any], name: str) -> str:
    return f" of {one[name]}" if name in one else ""


def made(lineage: dict[str, Any]) -> Any:
    """What a preparation did, for people."""
    rows = [(_TITLES.get(name, name.replace("_", " ")), f"{n:,}") for name, n in lineage["dropped"].items()]
    masked = ", ".join(f"{kind} {n:,}" for kind, n in lineage["masked"].items())
    return output.stack(
        output.table(
            ("MADE", ">EXAMPLES", ">BYTES"),
            ((one["file"], f"{one['examples']:,}", f"{one['bytes']:,}") for one in lineage["made"]),
            empty="",
        ),
        output.table(("DROPPED", ">EXAMPLES"), rows, empty="nothing was dropped"),
        f"masked: {masked}" if masked else None,
        "from: " + ", ".join(f"{one['file']} (sha256 {one['sha256'][:12]}…)" for one in lineage["from"])
        if lineage["from"]
        else None,
        f"of {lineage['read_examples']:,} examples",
    )
