"""Results on stdout: tables for people, JSON with stable keys for scripts. Progress on stderr."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Rich is imported inside the functions that draw, because importing it would double the time of `--help`.
_CONTROLS = {number: f"\\u{number:04x}" for number in (0x7F, *range(0x80, 0xA0))}
"""`json.dumps` escapes none of these: U+009B begins a command to a terminal, as ESC [ does."""


def json_text(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent).translate(_CONTROLS)


def print_json(value: Any) -> None:
    print(json_text(value, 2 if sys.stdout.isatty() else None), flush=True)


def say(message: str) -> None:
    """Print a remark for a person to stderr; it is never part of a result."""
    print(printable(message), file=sys.stderr, flush=True)


def column(spec: str) -> tuple[str, Callable[[Any], str]]:
    """Return a column's title and its cell function, from "[>][?]TITLE=path|path:format".

    path: field names joined by dots; the first path with a value counts. format: key of `FORMATS`, else chosen by the
    path's name. >: aligned to the right. ?: omitted if no row has a value. TITLE: with underscores for spaces; the
    path's last name by default.
    """
    title, _, source = spec.rpartition("=")
    if not title:
        marks = spec[: len(spec) - len(spec.lstrip(">?"))]
        source = spec.lstrip(">?")
        title = marks + label(source.partition(":")[0].partition("|")[0].rpartition(".")[2])
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
        return FORMATS[form](value) if form else by_name(name, value)

    return title.replace("_", " "), cell


NOTHING = (None, "", [], {})
LINE_EVERY_S = 30.0
REFRESH_EVERY_S = 2.0
_ONE_LINE_CHARACTERS = 100  # a longer part of an object is shown below its fields


def listing(columns: str, rows: Sequence[Any], *, empty: str = "") -> RenderableType:
    """Return a table with a line for each row. columns: specs as in `column`, separated by spaces; "": all fields."""
    if not columns:
        names = dict.fromkeys(name for row in rows for name in row if name != "object")
        columns = " ".join(f"?{name}" for name in names)
    drawn = []
    for title, cell in map(column, columns.split()):
        cells = [cell(row) for row in rows]
        if "?" not in title or any(text not in ("-", "") for text in cells):
            drawn.append((title.replace("?", ""), cells))
    return table([title.upper() for title, _ in drawn], zip(*(cells for _, cells in drawn), strict=True), empty=empty)


def view(answer: Mapping[str, Any], named: Callable[[str], str] | None = None) -> RenderableType:
    """Show any object of the box: its fields in order, each in the unit of its name, then its lists and larger parts.
    Fields without a value are omitted. named: returns the shown form of a field's name."""
    shown = named or label
    pairs, parts, remarks = [], [], []
    for name, value in answer.items():
        twin = f"{name.removesuffix('_at')}_s"  # the same time as another field, with fractions
        if value in NOTHING or name == "object" or (twin in answer and name.endswith("_at")):
            continue
        if name in ("notes", "warnings"):
            remarks += [f"{of}: {text}" for of, text in value.items()] if isinstance(value, dict) else value
        elif rows := _rows(value):
            parts.append(stack(f"{shown(name)}:", listing("", rows), gap=False))
        elif isinstance(value, dict) and len(by_name(name, value)) > _ONE_LINE_CHARACTERS:
            parts.append(stack(f"{shown(name)}:", view(value, label_of_parts(name)), gap=False))
        elif (text := by_name(name, value)) != "-":
            pairs.append((shown(name), text))
    notes = "\n".join(f"! {remark}" for remark in remarks) or None
    return stack(table(("", ""), pairs) if pairs else None, *parts, notes)


def _rows(value: Any) -> list[Any]:
    """Return the rows of a list of objects, or of a mapping from names to objects."""
    if isinstance(value, dict) and "data" in value:
        value = value["data"]
    if isinstance(value, dict) and len(value) > 1 and all(isinstance(row, dict) for row in value.values()):
        value = [{"name": name, **row} for name, row in value.items()]
    return value if isinstance(value, list) and all(isinstance(row, dict) for row in value) else []


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str = "") -> RenderableType:
    """Return a table. A column with ">" before its name is aligned right; without names there is no header."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(columns))
    for name in columns:
        # Long cells are folded and never shortened: half an id is no id.
        drawn.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    return drawn if drawn.row_count else Text(empty)


def stack(*parts: RenderableType | None, gap: bool = True) -> RenderableType:
    """Stack parts below each other, omitting None. gap: put a blank line between parts."""
    from rich.console import Group
    from rich.text import Text

    shown: list[RenderableType] = []
    for part in parts:
        if part is not None:
            shown += [Text("")] if shown and gap else []
            shown.append(Text(printable(part)) if isinstance(part, str) else part)
    return Group(*shown)


def draw(renderable: RenderableType) -> None:
    if isinstance(renderable, str):
        renderable = printable(renderable)
    if sys.stdout.isatty():
        _console().print(renderable)
        return
    # Output to a pipe has no width to fold to and no trailing padding.
    console = _console(width=10_000)
    with console.capture() as captured:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")), flush=True)


def watch(answer: Any, fetch: Callable[[], Any], render: Callable[[Any], RenderableType], *, as_json: bool) -> None:
    """Show an answer, then fetch and show new ones until Ctrl-C: in place on a terminal, else one below another.

    fetch: returns the next answer; None while the box is away, which leaves the last answer on screen.
    """
    from rich.live import Live

    in_place = not as_json and sys.stdout.isatty()
    with Live(console=_console(), screen=True, auto_refresh=False) if in_place else nullcontext() as live:
        while True:
            if live and answer is not None:
                live.update(render(answer), refresh=True)
            elif answer is not None:
                print(json_text(answer), flush=True) if as_json else draw(render(answer))
            time.sleep(REFRESH_EVERY_S)
            answer = fetch()


@contextmanager
def progress(message: str) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr during the block; off a terminal, for logs, print a line every LINE_EVERY_S seconds. Yields
    a function of the message, the amount done and the total amount, each None if unknown."""
    if not sys.stderr.isatty():
        yield _lines(message)
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    parts = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(30), TimeElapsedColumn())
    with Progress(*parts, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task(message, total=None)
        yield lambda now=None, done=None, total=None: bar.update(task, description=now, completed=done, total=total)


def _lines(message: str) -> Callable[..., None]:
    began_s = said_s = time.monotonic()

    def update(now: str | None = None, done: float | None = None, total: float | None = None) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= LINE_EVERY_S:
            said_s = time.monotonic()
            share = f", {100 * (done or 0) / total:.0f} %" if total else ""
            say(f"{now or message}{share}, after {duration(said_s - began_s)}")

    return update


def _console(width: int | None = None, *, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(width=width, stderr=stderr, highlight=False, markup=False, emoji=False)


# Formats of numbers, times and texts for people

REASON_CHARACTERS = 160
_KEYED_BY_NAMES = frozenset("bounds hyperparameters idle jobs metadata models standby waiting".split())


def _scaled(value: float | None, unit: str) -> str:
    """Format a value in decimal units, as sizes of disks are: 1,234,567 "B" is "1.2 MB"."""
    if value is None:
        return "-"
    prefix = ""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            break
        value /= 1000
    return f"{value:.{0 if not prefix or value >= 99.95 else 1}f} {prefix}{unit}"


def size(count_bytes: float | None) -> str:
    return _scaled(count_bytes, "B")


def count(number: float | None) -> str:
    """Format a number of parameters: 1,234 or 7.2 B."""
    if number is None:
        return "-"
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:,.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def seconds_of(text: str) -> float | None:
    """Parse 9h, 90m, 1h30m, 2d or 45s to seconds; None for other texts."""
    if not re.fullmatch(r"(\d+(\.\d+)?[dhms])+", text, re.ASCII):
        return None
    units = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)(.)", text)) or None


def moment(unix_s: float) -> str:
    """Format a Unix time as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def printable(text: object) -> str:
    """Remove control characters: text that others wrote must not control the terminal."""
    return "".join(char for char in str(text) if char.isprintable() or char in "\n\t")


def short(reason: object) -> str:
    """Shorten a reason for a table; views of one object show its full text."""
    text = " ".join(by_name("", reason).split())
    return text if len(text) <= REASON_CHARACTERS else f"{text[: REASON_CHARACTERS - 1]}…"


def by_name(name: str, value: Any) -> str:
    """Format a value in the unit that ends its name; each part of a mapping or list in the part's unit."""
    if isinstance(value, dict):
        if value.keys() == {"kind", "id"}:
            return f"{value['kind']} {value['id']}"
        unit = f"_{name}" if any(name.endswith(end) for end, _ in UNITS[:-1]) else ""  # for parts named without a unit
        parts = {part: by_name(part + unit, one) for part, one in value.items()}
        shown = label_of_parts(name)
        return ", ".join(f"{shown(part)} {text}" for part, text in parts.items() if text != "-") or "-"
    if isinstance(value, list):
        sentences = any(isinstance(one, str) and " " in one for one in value)
        return ("\n" if sentences else ", ").join(by_name(name, one) for one in value) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, str):
        return value or "-"
    return next(shown for end, shown in UNITS if name.endswith(end))(value)


def label(name: str) -> str:
    """Return a field's name without its unit."""
    return re.sub(r"_(bytes(/s)?|s|at|w|c)$", "", re.sub("_per_s$", "/s", name)).replace("_", " ")


def label_of_parts(name: str) -> Callable[[str], str]:
    """Return the format for the keys of this field's mapping: unchanged if people choose or type them."""
    return str if name in _KEYED_BY_NAMES else label


def number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"  # g has powers of ten from 10,000 on


UNITS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    *(("bytes_per_s", lambda value: f"{size(value)}/s"), ("bytes", size), ("bytes_read", size), ("per_s", number)),
    *(
        (end, lambda value: moment(value) if value > 1e9 else duration(value or None))
        for end in ("_s", "seconds", "_at", "created", "finish")
    ),
    *((end, lambda part: f"{100 * part:.1f} %") for end in ("share", "busy")),
    ("joules", lambda value: _scaled(value, "J")),
    *(("loss", lambda value: f"{value:.4f}"), ("_w", lambda value: f"{value:.0f} W"), ("_c", lambda c: f"{c} °C")),
    *(("seed", str), ("", number)),
)
"""How numbers are shown, by the ends of their names; the first that fits counts."""
FORMATS: dict[str, Callable[[Any], str]] = {
    "count": count,
    "names": lambda rows: ", ".join(one["name"] for one in rows),
    "short": short,
    "total": lambda rows: str(len(rows)),
    "yes": lambda value: "yes" if value else "-",
}
"""By their names in a column (appliance.cli.output)."""
