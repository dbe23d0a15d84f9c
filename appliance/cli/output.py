"""Results on stdout: tables for people, JSON with stable keys for scripts. Progress on stderr: in place on a terminal,
else a line now and then."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from appliance.cli import formats

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Rich is imported inside the functions that draw, because it would double the time of `--help`.

_UNBOUNDED_COLUMNS = 10_000
LINE_EVERY_S = 30.0
"""Off a terminal: of work that takes less, nothing is said."""


_CONTROLS = {number: f"\\u{number:04x}" for number in (0x7F, *range(0x80, 0xA0))}
"""`json.dumps` escapes none of these: U+009B begins a command to a terminal, as ESC [ does."""


def json_text(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent).translate(_CONTROLS)


def print_json(value: Any) -> None:
    print(json_text(value, 2 if sys.stdout.isatty() else None), flush=True)


def say(message: str) -> None:
    """Print a remark for a person, which is never part of a result."""
    print(formats.printable(message), file=sys.stderr, flush=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> RenderableType:
    """A table. Columns whose name begins with ">" are aligned to the right."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        # Long cells are folded and never shortened: half an id is no id.
        drawn.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    found = False
    for row in rows:
        found = True
        drawn.add_row(*(Text(formats.printable(cell)) for cell in row))
    return drawn if found else Text(empty)


def fields(*pairs: tuple[str, object]) -> RenderableType:
    """One thing, with a name and a value per line."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in pairs:
        drawn.add_row(Text(name), Text(formats.printable(value)))
    return drawn


def stack(*parts: RenderableType | None) -> RenderableType:
    """Parts below each other with a blank line in between; None is left out."""
    from rich.console import Group
    from rich.text import Text

    shown: list[RenderableType] = []
    for part in parts:
        if part is not None:
            part = formats.printable(part) if isinstance(part, str) else part
            shown += [Text(""), part] if shown else [part]
    return Group(*shown)


def above(title: str, part: RenderableType) -> RenderableType:
    """A part under its title."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(formats.printable(title)), part)


def notes(sentences: Iterable[str]) -> str | None:
    """Remarks for a person, a line each; None if there are none."""
    return "\n".join(f"! {sentence}" for sentence in sentences) or None


def draw(renderable: RenderableType) -> None:
    if isinstance(renderable, str):
        renderable = formats.printable(renderable)
    if sys.stdout.isatty():
        _console().print(renderable)
        return
    # In a pipe there is no width to fold to, and no padding trails.
    console = _console(width=_UNBOUNDED_COLUMNS)
    with console.capture() as captured:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")), flush=True)


def watch(fetch: Callable[[], Any], render: Callable[[Any], RenderableType], *, every_s: float, as_json: bool) -> None:
    """Fetch and show again and again until Ctrl-C: in place on a terminal, else one after the other."""
    if as_json or not sys.stdout.isatty():
        while True:
            answer = fetch()
            print(json_text(answer), flush=True) if as_json else draw(render(answer))
            time.sleep(every_s)
    from rich.live import Live

    with Live(render(fetch()), console=_console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(render(fetch()), refresh=True)


class Meter(Protocol):
    """Shows how far a piece of work is."""

    def update(self, message: str | None = None, *, done: float | None = None, total: float | None = None) -> None: ...


class _Silent:
    def update(self, message: str | None = None, *, done: float | None = None, total: float | None = None) -> None:
        return


class Lines:
    """For logs and pipes: how far the work is, at most every LINE_EVERY_S. now_s: of a clock."""

    def __init__(self, message: str, now_s: Callable[[], float] = time.monotonic):
        self._message, self._now_s = message, now_s
        self._began_s = self._said_s = now_s()

    def update(self, message: str | None = None, *, done: float | None = None, total: float | None = None) -> None:
        self._message = message or self._message
        now_s = self._now_s()
        if now_s - self._said_s < LINE_EVERY_S:
            return
        self._said_s = now_s
        share = f", {100 * (done or 0) / total:.0f} %" if total else ""
        say(f"{self._message}{share}, after {formats.duration(now_s - self._began_s)}")


@contextmanager
def quiet() -> Iterator[Meter]:
    """A meter that shows nothing."""
    yield _Silent()


@contextmanager
def progress(message: str) -> Iterator[Meter]:
    """A line on stderr that lives while the work does; `Lines` when stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield Lines(message)
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task(message, total=None)

        class Bar:
            def update(
                self, message: str | None = None, *, done: float | None = None, total: float | None = None
            ) -> None:
                bar.update(task, description=message, completed=done, total=total)

        yield Bar()


def _console(width: int | None = None, *, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(width=width, stderr=stderr, highlight=False, markup=False, emoji=False)
