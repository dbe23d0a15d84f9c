"""Options about the training method, which commands have from the table of methods (train.methods)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import typer

from appliance.cli.command import Command
from appliance.cli.errors import BadUsage
from appliance.cli.jobs.request import auto_or_number
from train.methods.methods import DEFAULT, METHODS

METHOD = Annotated[
    str,
    typer.Option(
        "--method",
        metavar="|".join(METHODS),
        help="; ".join(f"{method.name} {method.summary}" for method in METHODS.values()) + ".",
        autocompletion=lambda: list(METHODS),
    ),
]
USUAL = DEFAULT.name
OWN = Mapping[str, Any]  # hyperparameters that the chosen method alone has
NO_OWN: OWN = MappingProxyType({})


def with_methods(command: Command) -> Command:
    """Adds an option for every hyperparameter that some method alone has (train.methods). The command has an option
    `method`, and gets those that were given as `own`. An option of another method is BadUsage."""
    declared = {option.name: option for method in METHODS.values() for option in method.options}
    owners = {name: [m.name for m in METHODS.values() if name in {o.name for o in m.options}] for name in declared}
    signature = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(
                    _flag(name),
                    metavar="X",
                    help=f"Of --method {' and '.join(owners[name])}: {option.help}. auto ({option.auto:g}) or a number "
                    f"up to {option.high:g}",
                ),
            ],
        )
        for name, option in declared.items()
    ]

    @functools.wraps(command)
    def collecting(session: Any, **options: Any) -> None:
        if options["method"] not in METHODS:
            raise BadUsage(f"--method is {options['method']!r}; expected one of {', '.join(METHODS)}")
        own = {name: auto_or_number(_flag(name), options.pop(name)) for name in declared}
        own = {name: value for name, value in own.items() if value is not None}
        for name in own:
            if options["method"] not in owners[name]:
                raise BadUsage(
                    f"{_flag(name)} belongs to --method {' and '.join(owners[name])}; --method is {options['method']}"
                )
        command(session, own=own, **options)

    kept = [parameter for parameter in signature.parameters.values() if parameter.name != "own"]
    setattr(collecting, "__signature__", signature.replace(parameters=[*kept, *added]))  # noqa: B010 typing knows no such attribute
    return collecting


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
