"""Options about the method of training and its hyperparameters, which `job submit` and `plan job` share. Those that one
method alone has come from the table of methods (train.methods)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from appliance.cli.command import Command, given, with_options
from appliance.cli.errors import BadUsage
from appliance.cli.jobs.request import pairs
from train.methods.method import Option
from train.methods.methods import DEFAULT, METHODS

_AUTO = "auto or a number"


class _Option:
    """of_type: str takes `auto` too."""

    def __init__(self, of_type: Any, flag: str, **shown: Any) -> None:
        self.of_type, self.flag = of_type, flag
        self.annotation = Annotated[of_type | None, typer.Option(flag, **shown)]

    def read(self, value: Any) -> Any:
        return _auto_or_number(self.flag, value) if self.of_type is str else value


# Options by their names in the request.
_COMMON = {
    "n_epochs": _Option(str, "--epochs", metavar="N", help=f"{_AUTO}; passes over the data"),
    "batch_size": _Option(str, "--batch-size", metavar="N", help=f"{_AUTO}; sequences per step, over all devices"),
    "learning_rate_multiplier": _Option(str, "--learning-rate-multiplier", metavar="X", help=_AUTO),
    "lora_rank": _Option(int, "--lora-rank", metavar="R", help="Train adapters of this rank."),
    "full": _Option(bool, "--full/--lora", help="Train every weight, or adapters. Default: by the model's size."),
    "zero_stage": _Option(int, "--zero-stage", min=0, max=3, help="DeepSpeed ZeRO."),
    "tensor_parallel": _Option(
        int, "--tensor-parallel", metavar="N", min=1, help="Devices that share one copy of the model."
    ),
    "max_length": _Option(int, "--max-length", metavar="TOKENS"),
    "set_": _Option(list[str], "--set", metavar="NAME=VALUE", help="Any other hyperparameter; repeatable."),
}
_METHOD = Annotated[
    str,
    typer.Option(
        "--method",
        metavar="|".join(METHODS),
        help="; ".join(f"{method.name} {method.summary}" for method in METHODS.values()) + ".",
        autocompletion=lambda: list(METHODS),
    ),
]


@dataclass(frozen=True, slots=True)
class Training:
    """What was asked for. options: hyperparameters that were given, each by its own option; texts: with --set."""

    method: str
    options: dict[str, Any]
    texts: tuple[str, ...] = ()

    @property
    def judged_by(self) -> str:
        """Who judges what the model answers: "grader", "teacher", or nobody."""
        return METHODS[self.method].judged_by

    def hyperparameters(self, **more: Any) -> dict[str, Any]:
        """All hyperparameters. Values of --set are JSON if they can be (numbers, true, lists), otherwise text. more:
        further ones, None if not given. Raises BadUsage for a name given twice."""
        merged = self.options | given(**more)
        for name, text in pairs("--set", list(self.texts)):
            if name in merged:
                raise BadUsage(f"{name} is given twice: once as an option and once with --set")
            try:
                merged[name] = json.loads(text)
            except ValueError:
                merged[name] = text
        return merged


NO_TRAINING = Training(DEFAULT.name, {})
METHOD_NAMES = tuple(METHODS)


def judged_by(judge: str) -> list[str]:
    """The methods whose answers this one judges."""
    return [method.name for method in METHODS.values() if method.judged_by == judge]


def with_training(command: Command) -> Command:
    """Puts --method and an option for every hyperparameter in place of the parameter `training` of a command, which
    gets them as one Training. An option of another method is BadUsage."""
    owners: dict[str, dict[str, Option]] = {}
    for row in METHODS.values():
        for own in row.options:
            owners.setdefault(own.name, {})[row.name] = own
    options = _COMMON | {name: _own(name, by_method) for name, by_method in owners.items()}

    def training(method: str, set_: list[str] | None = None, **values: Any) -> Training:
        if method not in METHODS:
            raise BadUsage(f"--method is {method!r}; expected one of {', '.join(METHODS)}")
        chosen = {}
        for name, value in given(**values).items():
            if method not in owners.get(name, METHODS):
                theirs = " and ".join(owners[name])
                raise BadUsage(f"{options[name].flag} belongs to --method {theirs}; --method is {method}")
            chosen[name] = options[name].read(value)
        return Training(method, chosen, tuple(set_ or ()))

    annotations: dict[str, Any] = {name: option.annotation for name, option in options.items()}
    return with_options("training", {"method": _METHOD, **annotations}, training, method=DEFAULT.name)(command)


def _own(name: str, by_method: dict[str, Option]) -> _Option:
    """The command's option for a hyperparameter that methods declare (train.methods.method.Option), each with its own
    numbers and meaning."""
    told = "; ".join(
        f"Of --method {method}: {option.help}. auto ({option.auto:g}) or a number up to {option.high:g}"
        for method, option in by_method.items()
    )
    return _Option(str, "--" + name.replace("_", "-"), metavar="X", help=told)


def _auto_or_number(option: str, text: str) -> int | float | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            raise BadUsage(f"{option} is {text!r}; expected auto or a number") from None
