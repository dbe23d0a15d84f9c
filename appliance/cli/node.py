"""`appliance node`: letting other machines join."""

from __future__ import annotations

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
    # Fenced: cryptography would double the time of `--help`.
    from appliance.authority import Credentials
    from appliance.enrolment import Tokens
    from appliance.paths import BoxPaths

    paths = BoxPaths.of(BoxFile.read(data_dir).data_dir)
    credentials = Credentials(paths.certificates)
    if not credentials.files.certificate.exists():
        raise CommandFailed(
            f"no other machine can join the box on {paths.data_dir}: set node_address in [box] of its appliance.toml, "
            "then start it anew"
        )
    given = Tokens(paths.join_tokens).give(credentials.fingerprint(), minutes * 60).text()
    if output_format == "json":
        output.print_json({"token": given, "minutes": minutes})
    else:
        print(given)
        output.say(f"good for {minutes:g} minutes, once: appliance join NODE_ADDRESS:NODE_PORT --name n1 "
                   "--address ITS_OWN --token TOKEN")  # fmt: skip
