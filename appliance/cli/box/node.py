"""`appliance node`: letting other machines join."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from appliance.cli import output
from appliance.cli.command import DATA_DIR, OUTPUT, examples, group
from appliance.cli.errors import CommandFailed
from appliance.cli.locate import BoxFile

app = group("Nodes: tokens with which other machines may join.")


@app.command(
    epilog=examples(
        "appliance node token",
        "appliance node token --minutes 60",
        "",
        "For the user who runs the box, on its machine. Whoever has the token can make one machine a node, once.",
    )
)
def token(
    data_dir: DATA_DIR = None,
    minutes: Annotated[float, typer.Option("--minutes", min=1, max=1440, help="How long it is good for.")] = 15,
    output_format: OUTPUT = "table",
) -> None:
    """Print a token with which one machine can join, once."""
    # A process of its own, like the box: importing what handles certificates takes longer than all of this command.
    # -P: a folder here that is called `train` or `serve` must not hide ours.
    command = [sys.executable, "-P", "-m", "appliance.nodes.enrolment"]
    options = ["--data-dir", str(BoxFile.read(data_dir).data_dir), "--life-s", str(minutes * 60)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandFailed(done.stderr.strip())
    given = done.stdout.strip()
    if output_format == "json":
        output.print_json({"token": given, "minutes": minutes})
    else:
        print(given)
        join = "appliance join NODE_ADDRESS:NODE_PORT --name n1 --address ITS_OWN --token TOKEN"
        output.say(f"good for {minutes:g} minutes, once: {join}")
