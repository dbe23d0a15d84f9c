"""Results on stdout: tables for people, JSON with stable keys for scripts. Progress on stderr, on a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from appliance.cli import formats

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Rich is imported inside the functions that draw, because it would double the time of `--help`.
_CONTROLS = {number: f"\\u{number:04x}" for number in (0x7F, *range(0x80, 0xA0))}
"""`json.dumps` escapes none of these: U+009B begins a command to a terminal, as ESC [ does."""


def json_text(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent).translate(_CONTROLS)


def print_json(value: Any) -> None:
    print(json_text(value, 2 if sys.stdout.isatty() else None), flush=True)


def say(message: str) -> None:
    """Print a remark for a person, which is never part of a result."""
    print(formats.printable(message), file=sys.stderr, flush=True)


def column(spec: str) -> tuple[str, Callable[[Any], str]]:
    """The title and the cell of a row, by "[>][?]TITLE=path|path:format".

    path: names with dots between; of several the first that has something. format: of `formats.FORMATS`, else by the
    path's name. >: aligned to the right. ?: left out where no row has something. TITLE: with underscores for spaces;
    without it the path's last name.
    """
    title, _, source = spec.rpartition("=")
    if not title:
        marks = spec[: len(spec) - len(spec.lstrip(">?"))]
        source = spec.lstrip(">?")
        title = marks + formats.label(source.partition(":")[0].partition("|")[0].rpartition(".")[2])
    paths, _, form = source.partition(":")

    def cell(row: Any) -> str:
        name, value = "", None
        for path in paths.split("|"):
            name, value = path.rpartition(".")[2], row
            for key in path.split("."):
                value = (value or {}).get(key)
            if value not in NOTHING:
                break
        if value is None:
            return "-"
        return formats.FORMATS[form](value) if form else formats.by_name(name, value)

    return title.replace("_", " "), cell


NOTHING = (None, "", [], {})
_ONE_LINE_CHARACTERS = 100  # a part of an object that needs more is shown below it


def listing(columns: str, rows: Sequence[Any], *, empty: str = "") -> RenderableType:
    """A table with a line for each row. columns: as `column` has them, with spaces between; "": all that the rows
    have."""
    if not columns:
        names = dict.fromkeys(name for row in rows for name in row if name != "object")
        columns = " ".join(f"?{name}" for name in names)
    drawn = []
    for title, cell in map(column, columns.split()):
        cells = [cell(row) for row in rows]
        if "?" not in title or any(text not in ("-", "") for text in cells):
            drawn.append((title.replace("?", ""), cells))
    return table([title.upper() for title, _ in drawn], zip(*(cells for _, cells in drawn), strict=True), empty=empty)


def view(answer: Mapping[str, Any], label: Callable[[str], str] = formats.label) -> RenderableType:
    """Any object of the box: its fields in their order, each in the unit of its name, and below them its lists and
    larger parts. What has no value is left out. label: of a field's name."""
    pairs, parts, remarks = [], [], []
    for name, value in answer.items():
        if value in NOTHING or name == "object":
            continue
        if name in ("notes", "warnings"):
            remarks += [f"{of}: {text}" for of, text in value.items()] if isinstance(value, dict) else value
        elif rows := _rows(value):
            parts.append(stack(f"{label(name)}:", listing("", rows), gap=False))
        elif isinstance(value, dict) and len(formats.by_name(name, value)) > _ONE_LINE_CHARACTERS:
            parts.append(stack(f"{label(name)}:", view(value, formats.label_of_parts(name)), gap=False))
        else:
            pairs.append((label(name), formats.by_name(name, value)))
    told = "\n".join(f"! {one}" for one in remarks) or None
    return stack(table(("", ""), pairs) if pairs else None, *parts, told)


def _rows(value: Any) -> list[Any]:
    """The rows of a list of objects, or of objects by their names."""
    if isinstance(value, dict) and "data" in value:
        value = value["data"]
    if isinstance(value, dict) and len(value) > 1 and all(isinstance(one, dict) for one in value.values()):
        value = [{"name": name, **one} for name, one in value.items()]
    return value if isinstance(value, list) and all(isinstance(one, dict) for one in value) else []


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str = "") -> RenderableType:
    """A table. Columns whose name begins with ">" are aligned to the right; without names there is no header."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(columns))
    for name in columns:
        # Long cells are folded and never shortened: half an id is no id.
        drawn.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(formats.printable(cell)) for cell in row))
    return drawn if drawn.row_count else Text(empty)


def stack(*parts: RenderableType | None, gap: bool = True) -> RenderableType:
    """Parts below each other; None is left out. gap: with a blank line in between."""
    from rich.console import Group
    from rich.text import Text

    shown: list[RenderableType] = []
    for part in parts:
        if part is not None:
            shown += [Text("")] if shown and gap else []
            shown.append(Text(formats.printable(part)) if isinstance(part, str) else part)
    return Group(*shown)


def draw(renderable: RenderableType) -> None:
    if isinstance(renderable, str):
        renderable = formats.printable(renderable)
    if sys.stdout.isatty():
        _console().print(renderable)
        return
    # In a pipe there is no width to fold to, and no padding trails.
    console = _console(width=10_000)
    with console.capture() as captured:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")), flush=True)


def watch(fetch: Callable[[], Any], render: Callable[[Any], RenderableType], *, every_s: float, as_json: bool) -> None:
    """Fetch and show again and again until Ctrl-C: in place on a terminal, else one after the other.

    fetch: None while the box is away; what was shown last stays.
    """
    from rich.live import Live

    in_place = not as_json and sys.stdout.isatty()
    with Live(console=_console(), screen=True, auto_refresh=False) if in_place else nullcontext() as live:
        while True:
            if (answer := fetch()) is not None:
                if live:
                    live.update(render(answer), refresh=True)
                else:
                    print(json_text(answer), flush=True) if as_json else draw(render(answer))
            time.sleep(every_s)


@contextmanager
def progress(message: str) -> Iterator[Callable[..., None]]:
    """A bar on stderr that lives while the work does, only on a terminal. What it yields is called with the message,
    how much is done, and of how much, as far as they are known."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    parts = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(30), TimeElapsedColumn())
    with Progress(*parts, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task(message, total=None)
        yield lambda now=None, done=None, total=None: bar.update(task, description=now, completed=done, total=total)


def opened(path: Path) -> AbstractContextManager[BinaryIO]:
    """A file to be sent; on a terminal a bar shows how much of it was read. Raises OSError."""
    from rich import progress

    told = "sending the file, which the box then checks"
    hidden, console = not sys.stderr.isatty(), _console(stderr=True)
    return progress.open(path, "rb", description=told, console=console, transient=True, disable=hidden)


def _console(width: int | None = None, *, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(width=width, stderr=stderr, highlight=False, markup=False, emoji=False)
