"""`appliance model catalog`, and how an import finds a model by the name that it has there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from appliance.cli import formats, output
from appliance.cli.command import OUTPUT, examples, group
from appliance.cli.errors import CommandFailed
from appliance.cli.models import catalog_models as catalog

app = group("")

_FIELDS = ("name", "licence", "parameters", "download_bytes", "context_tokens", "weight_bytes", "origin", "tried")
_COLUMNS = ("NAME", "LICENCE", ">PARAMETERS", ">DOWNLOAD", ">CONTEXT", ">WEIGHTS", "FROM", "TRIED")


@app.command(
    name="catalog",
    epilog=examples("appliance model catalog", "appliance model catalog -o json | jq -r '.data[].name'"),
)
def show_catalog(output_format: OUTPUT = "table") -> None:
    """List models known to work here, with licence and size; `model import NAME` brings one in. Needs no box."""
    rows = [{name: getattr(model, name) for name in _FIELDS} for model in catalog.CATALOG]
    if output_format == "json":
        output.print_json({"data": rows})
        return
    output.draw(output.table(_COLUMNS, map(_cells, rows), empty=""))
    output.say("WEIGHTS: on the devices, in bfloat16. TRIED: the model itself, or a tiny one of its architecture.")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    drawn = {"parameters": formats.count, "download_bytes": formats.size, "weight_bytes": formats.size}
    return tuple(drawn.get(name, str)(value) for name, value in row.items())


class Fetched(NamedTuple):
    """temporary: `source` is there only until the block ends, so the import must have ended before. origin: what the
    model says of where it came from, in place of a path that will be gone."""

    source: str
    name: str | None
    temporary: bool
    origin: str | None = None


@contextmanager
def fetched(source: str, name: str | None, is_local: bool) -> Iterator[Fetched]:
    """What the box imports where a user said `source`: a name of the catalog stands for a hub id or a downloaded file.
    Raises CommandFailed."""
    model = None if Path(source).expanduser().exists() else catalog.find(source)
    if model is None:
        yield Fetched(source, name, False)
        return
    if isinstance(model.source, str):
        yield Fetched(model.source, name or model.name, False)
        return
    if not is_local:
        raise CommandFailed(f"{model.origin} is downloaded by the CLI: run this command on the box's own machine")
    with tempfile.TemporaryDirectory(prefix="appliance-catalog-") as folder:
        Path(folder).chmod(0o755)  # the box may run as another user
        output.say(f"downloading {formats.size(model.download_bytes)}, {model.origin} ({model.licence})")
        file = catalog.fetch(model.source, Path(folder), model.sampling)
        yield Fetched(str(file), name or model.name, True, model.origin)
