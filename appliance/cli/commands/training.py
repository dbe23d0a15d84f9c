"""Options of a fine-tuning job that several commands share: the method and its hyperparameters, and the devices. Those
that one method alone has come from the table of methods (train.methods)."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from appliance.cli.command import Option, auto_or, either, named, number, opt, picked
from appliance.cli.errors import BadUsage
from appliance.cli.formats import seconds_of
from train.methods.method import Method
from train.methods.methods import DEFAULT, METHODS

_AUTO_OR_NUMBER = auto_or(number(lambda text: int(text) if text.isdigit() else float(text)))
_COMMON = (
    opt("--epochs N", "auto or a number; passes over the data.", dest="n_epochs", type=_AUTO_OR_NUMBER),
    opt("--batch-size N", "auto or a number; sequences per step, on all devices.", type=_AUTO_OR_NUMBER),
    opt("--learning-rate-multiplier X", "auto or a number.", type=_AUTO_OR_NUMBER),
    opt("--lora-rank R", "Train adapters of this rank.", type=int),
    *either("--full", "--lora", "Train every weight, or adapters. Default: by the model's size."),
    opt("--zero-stage N", "DeepSpeed ZeRO, 0 to 3.", type=number(int, 0, 3)),
    opt("--tensor-parallel N", "Devices that share one copy of the model.", type=number(int, 1)),
    opt("--max-length TOKENS", "Longest sequence of training.", type=int),
    opt("--set NAME=VALUE", "Any other hyperparameter; repeatable.", dest="set_", type=named(), action="append"),
)
DEVICES = (
    opt("--min-devices N", "Never on fewer.", type=number(int, 1)),
    opt("--max-devices N", "Never on more.", type=number(int, 1)),
    opt("--sizes N,N,…", "Only on these numbers of devices, e.g. 2,4,8."),
    opt("--priority N", "Higher goes first. Default: 0.", type=int),
    opt("--deadline TIME", "8h from now, or 2026-11-22T06:00; the job goes first when the deadline is near."),
    *either("--preemptible", "--no-preemptible", "May it be suspended for others? Default: yes."),
)
"""How a job may use the devices."""


def options(methods: Mapping[str, Method] = METHODS) -> tuple[Option, ...]:
    """--method, and an option for every hyperparameter."""
    kinds = "; ".join(f"{method.name}: {method.summary}" for method in methods.values())
    of_methods = []
    for name, owners in _owners(methods).items():
        told = "; ".join(
            f"Of --method {method}: {one.help}. auto ({one.auto:g}) or a number up to {one.high:g}"
            for method, one in owners.items()
        )
        of_methods.append(opt("--" + name.replace("_", "-"), metavar="X", type=_AUTO_OR_NUMBER, help=told))
    named = opt("--method METHOD", f"{kinds}.", choices=tuple(methods), default=DEFAULT.name)
    return (named, *_COMMON, *of_methods)


def _owners(methods: Mapping[str, Method]) -> dict[str, dict[str, Any]]:
    """Hyperparameter -> method -> its declaration, of those that some methods alone have."""
    found: dict[str, dict[str, Any]] = {}
    for method in methods.values():
        for one in method.options:
            found.setdefault(one.name, {})[method.name] = one
    return found


def hyperparameters(args: Namespace, methods: Mapping[str, Method] = METHODS) -> dict[str, Any]:
    """Those that were given. Values of --set are JSON if they can be (numbers, true, lists), otherwise text. Raises
    BadUsage for an option of another method, and for a name given twice."""
    owners = _owners(methods)
    common = "n_epochs batch_size learning_rate_multiplier lora_rank full zero_stage tensor_parallel max_length"
    values = picked(args, " ".join([common, *owners]))
    for name in values:
        if args.method not in owners.get(name, methods):
            theirs = " and ".join(owners[name])
            raise BadUsage(f"--{name.replace('_', '-')} belongs to --method {theirs}; --method is {args.method}")
    if values.get("full") and "lora_rank" in values:
        raise BadUsage("--full and --lora-rank exclude each other")
    for name, text in args.set_ or ():
        if name in values:
            raise BadUsage(f"{name} is given twice: once as an option and once with --set")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def judged_by(judge: str) -> str:
    """The methods whose answers a "grader" or a "teacher" judges, in words."""
    return " and ".join(method.name for method in METHODS.values() if method.judged_by == judge)


def device_fields(args: Namespace) -> dict[str, Any]:
    """Fields of a request, as `DEVICES` were given; sizes or deadline "none" are null. Raises BadUsage."""
    fields = picked(args, "min_devices max_devices priority preemptible")
    for option, field, read in (("sizes", "allowed_sizes", _sizes), ("deadline", "deadline_s", _deadline)):
        if (text := getattr(args, option)) is not None:
            fields[field] = None if text in ("none", "any") else read(text)
    return fields


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise BadUsage(f"--sizes is {text!r}; expected numbers of devices with commas between, e.g. 2,4,8")
    return [int(part) for part in parts]


def _deadline(text: str) -> float:
    return moment_to_come("--deadline", text)


def moment_to_come(option: str, text: str) -> float:
    """Seconds since 1970 of a time from now (8h) or of a date with a time, local unless it says otherwise. Raises
    BadUsage."""
    try:
        moment = datetime.fromisoformat(text).timestamp()
    except OverflowError:
        raise BadUsage(f"{option} is {text!r}, later than a calendar goes") from None
    except ValueError:
        seconds = seconds_of(text)
        if seconds is None:
            raise BadUsage(
                f"{option} is {text!r}; expected a time from now such as 8h, or a date such as 2026-11-22T06:00"
            ) from None
        moment = time.time() + seconds
    if moment <= time.time():
        raise BadUsage(f"{option} is {text!r}, which is past; expected a future time, such as 8h from now")
    return moment


def json_file(option: str, path: str) -> Any:
    """Raises BadUsage."""
    try:
        return json.loads(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise BadUsage(f"{option} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadUsage(f"{option} {path} is not JSON: {error}") from error
