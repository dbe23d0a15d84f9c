"""`appliance key`: who may use the box over the network."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import Session, examples, for_box, group
from appliance.cli.paths import segment

app = group("API keys: who may use the box over the network. Commands on the box itself need none.")


@app.command(
    epilog=examples(
        "appliance key create --name alice",
        "appliance key create --name ops --scope admin",
        "appliance key create --name alice-laptop --owner alice     shares alice's part of the devices",
        "export OPENAI_API_KEY=$(appliance key create --name ci -o json | jq -r .key)",
    )
)
@for_box
def create(
    session: Session,
    name: Annotated[str, typer.Option("--name", help="Whose key it is; shown in lists and in the audit log.")],
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="inference, fine_tuning or admin; repeatable. Default: the first two."),
    ] = None,
    owner: Annotated[
        str | None, typer.Option("--owner", help="Whose share of the devices its jobs count towards. Default: NAME.")
    ] = None,
) -> None:
    """Make a key and show it once: the box keeps only its SHA-256."""
    body = {"name": name, "scopes": scope or None, "owner": owner}
    answer = session.client.post("/admin/v1/keys", {k: v for k, v in body.items() if v is not None})
    if not session.as_json:
        output.say(f"Key {answer['name']} ({', '.join(answer['scopes'])}). It is not shown again:")
    output.print_json(answer) if session.as_json else print(answer["key"])


@app.command("list", epilog=examples("appliance key list", "appliance key list -o json"))
@for_box
def list_keys(session: Session) -> None:
    """Every key by name, scopes and first characters; the key itself is known only to its owner."""
    session.show(session.client.get("/admin/v1/keys"), _table)


@app.command(epilog=examples("appliance key revoke alice", "appliance key revoke key_4f2a81"))
@for_box
def revoke(session: Session, key: Annotated[str, typer.Argument(metavar="NAME_OR_ID")]) -> None:
    """Make a key worthless at once; requests that are running with it finish."""
    answer = session.client.delete(f"/admin/v1/keys/{segment(key)}")
    session.show(answer, lambda revoked: f"revoked {revoked['name']} ({revoked['id']})")


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("ID", "NAME", "OWNER", "SCOPES", "KEY", "CREATED", "REVOKED"),
        (
            (k["id"], k["name"], k["owner"], ", ".join(k["scopes"]), f"{k['prefix']}…", formats.moment(k["created_s"]),
             formats.moment(k["revoked_s"]))
            for k in answer["data"]
        ),
        empty="no keys; `appliance key create --name NAME` makes one",
    )  # fmt: skip
