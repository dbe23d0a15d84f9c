"""What every command shares: the options that name the box, the choice of output, and the making of requests."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from appliance.cli import formats, output
from appliance.cli.errors import AuthFailed, BadUsage, CliError, Conflict, NotFound

if TYPE_CHECKING:
    from appliance.cli.client import Client
    from appliance.cli.locate import BoxFile

Format = Literal["table", "json"]
Command = Callable[..., None]
Boxless = str | Callable[[dict[str, Any]], bool] | None

URL = Annotated[str | None, typer.Option("--url", metavar="URL", envvar="APPLIANCE_URL", help="A box elsewhere.")]
API_KEY = Annotated[str | None, typer.Option("--api-key", metavar="KEY", envvar="APPLIANCE_API_KEY", help="For --url.")]
DATA_DIR = Annotated[
    str | None,
    typer.Option("--data-dir", metavar="DIR", envvar="APPLIANCE_DATA_DIR", help="The box on this machine."),
]
OUTPUT = Annotated[Format, typer.Option("--output", "-o", help="table for people, json for scripts")]
WATCH = Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again until Ctrl-C.")]
EVERY = Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Time between two looks of --watch.")]


@dataclass(frozen=True)
class Session:
    """The box that a command talks to, and the form of its answer."""

    box_client: Client | None  # None: the command needs no box
    format: Format
    box_file: BoxFile | None  # None: a box named by URL
    api_key: str | None

    @property
    def client(self) -> Client:
        """Raises BadUsage."""
        if self.box_client is None:
            raise BadUsage("this needs a box, and the options given need none")
        return self.box_client

    @property
    def as_json(self) -> bool:
        return self.format == "json"

    def show(self, answer: Any, render: Callable[[Any], Any]) -> None:
        """Print an answer of the box, as it is or drawn."""
        output.print_json(answer) if self.as_json else output.draw(render(answer))

    def post_each(
        self, path_of: Callable[[str], str], ids: Sequence[str], verb: str, render: Callable[[dict[str, Any]], str]
    ) -> None:
        """Asks this of each, whatever becomes of the others; shows the answers, and then the refusals, of which the
        first is the command's. Raises CliError of what concerns all of them, the key or the box, behind these."""
        answers, refusals = list[dict[str, Any]](), list[CliError]()
        try:
            for one in ids:
                try:
                    answers.append(self.client.post(f"{path_of(one)}/{verb}"))
                except (NotFound, Conflict) as error:
                    refusals.append(error)
        finally:
            if len(ids) > 1 and (answers or refusals):
                self.show({"data": answers}, lambda all_: "\n".join(map(render, all_["data"])))
            elif answers:
                self.show(answers[0], render)
            for refusal in refusals:
                output.say(f"error: {refusal}")
        if refusals:
            raise typer.Exit(refusals[0].exit_code) from refusals[0]

    def own_unless_all(self, everything: Callable[[], Any], own: Callable[[], Any]) -> Any:
        """What an operator sees; with a key that may not, what its owner has. Raises CliError."""
        try:
            return everything()
        except AuthFailed as refused:
            try:
                return own()
            except AuthFailed:
                raise refused from None  # a key of another scope: what it lacks for all of it

    def follow(self, fetch: Callable[[], Any], render: Callable[[Any], Any], watch: bool, every_s: float) -> None:
        """`show`, repeated if `watch`."""
        if watch:
            output.watch(fetch, render, every_s=every_s, as_json=self.as_json)
        else:
            self.show(fetch(), render)


def group(help: str) -> typer.Typer:
    """A Typer with the appearance that all groups share.

    Two settings keep `--help` fast. Without Rich, help is drawn in a third of the time. And with a bool as its default,
    Typer does not check a `--help` that was not given; the check imports pydantic, which costs as much as all else.
    """
    return typer.Typer(
        help=help,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": 110,
            "default_map": {"help": False},
        },
    )


def examples(*lines: str) -> str:
    """An epilogue that keeps its lines."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def box_command(
    app: typer.Typer, *lines: str, name: str | None = None, boxless: Boxless = None
) -> Callable[[Command], Command]:
    """Adds a command to `app` that talks to a box (see `_for_box`). `lines` are its examples; `name` is its own if its
    function cannot have it; `boxless` is the parameter with which it needs no box, or says so of its options."""

    def add(command: Command) -> Command:
        return app.command(name or command.__name__, epilog=examples(*lines))(_for_box(command, boxless))

    return add


def with_options(
    parameter: str, annotations: Mapping[str, Any], collect: Callable[..., Any], **defaults: Any
) -> Callable[[Command], Command]:
    """Puts options in place of a parameter of a command, which gets what `collect` makes of their values. annotations,
    defaults: by name; None where no default is named."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    added = [
        inspect.Parameter(name, kind, default=defaults.get(name), annotation=annotation)
        for name, annotation in annotations.items()
    ]

    def wrap(command: Command) -> Command:
        @functools.wraps(command)
        def collecting(session: Any, **values: Any) -> None:
            own = {name: values.pop(name) for name in annotations if name in values}
            command(session, **{parameter: collect(**own)}, **values)

        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for one in signature.parameters.values():
            parameters += added if one.name == parameter else [one]
        setattr(collecting, "__signature__", signature.replace(parameters=parameters))  # noqa: B010 typing knows no such attribute
        return collecting

    return wrap


def given(**fields: Any) -> dict[str, Any]:
    """The fields of a request that were given: those that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def seconds_given(option: str, text: str) -> float:
    """Raises BadUsage."""
    seconds = formats.seconds_of(text)
    if seconds is None:
        raise BadUsage(f"{option} is {text!r}; expected a time such as 90s, 45m, 9h, 1h30m or 7d")
    return seconds


def _for_box(command: Command, boxless: Boxless) -> Command:
    """Adds --url, --api-key, --data-dir and -o. The command gets a Session as its first argument."""
    signature = inspect.signature(command, eval_str=True)
    own = list(signature.parameters.values())[1:]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, default, annotation in (
            ("output_format", "table", OUTPUT),
            ("url", None, URL),
            ("api_key", None, API_KEY),
            ("data_dir", None, DATA_DIR),
            ("ctx", inspect.Parameter.empty, typer.Context),
        )
    ]

    @functools.wraps(command)
    def with_session(
        *,
        ctx: typer.Context,
        url: str | None,
        api_key: str | None,
        data_dir: str | None,
        output_format: Format,
        **options: Any,
    ) -> None:
        if boxless(options) if callable(boxless) else boxless is not None and options.get(boxless) is not None:
            command(Session(None, output_format, None, None), **options)
        else:
            command(open_session(ctx, url, api_key, data_dir, output_format), **options)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + added
    setattr(with_session, "__signature__", signature.replace(parameters=parameters))  # noqa: B010 typing knows no such attribute
    with_session.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_session


def open_session(
    ctx: typer.Context, url: str | None, api_key: str | None, data_dir: str | None, output_format: Format
) -> Session:
    """The box of these options. Raises BadUsage, and Unreachable when none runs on this machine."""
    # Fenced: HTTP and TLS would add a third to the time of `--help`.
    from appliance.cli.client import Address, Client
    from appliance.cli.locate import BoxFile

    if url and data_dir:
        typed = [name for name in ("url", "data_dir") if _is_typed(ctx, name)]
        if len(typed) == 2:
            raise BadUsage("--url and --data-dir name two boxes; give one of them")
        # What somebody typed wins over the environment; of two variables the URL wins.
        url = None if typed == ["data_dir"] else url
    if url:
        return Session(Client(Address.of_url(url), api_key), output_format, None, api_key)
    box_file = BoxFile.read(data_dir)
    client = Client(Address(socket_path=box_file.controller_socket()), why_silent=box_file.why_silent)
    return Session(client, output_format, box_file, api_key)


def _is_typed(ctx: typer.Context, option: str) -> bool:
    source = ctx.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"
