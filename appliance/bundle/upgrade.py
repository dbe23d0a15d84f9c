"""Moves a box to another release, or back: stops one release, switches `current`, starts the other, which must answer.

Requests that run finish before the box stops; jobs are suspended, and resumed by the other release. Requests that come
in between are refused, because nobody listens: an explicit error after which clients try again. If the newer release
does not answer, the older one comes back, with the database from before if the schema changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from appliance.bundle.carried.errors import Refused
from appliance.bundle.carried.releases import Releases
from appliance.bundle.rollback import WayBack, restore, way_back
from appliance.bundle.running import NotUp, Running
from appliance.cli.locate import data_dir_option

Say = Callable[[str], None]


def upgrade(releases: Releases, version: str, data_dir: Path, timeout_s: float, say: Say) -> None:
    """If it raises Refused, nothing was changed, or everything is as before."""
    with releases.alone():
        current = releases.current
        if version == current:
            raise Refused(f"release {version} is the current one already")
        releases.known(version)
        if current is None:
            raise Refused(f"{releases.prefix} has no current release: install one again, which makes it current")
        if way_back(releases, data_dir, version).copy is not None:
            raise Refused(
                f"the database on {data_dir} is of a newer release than {version}: `appliance rollback` goes back"
            )
        running = Running.on(data_dir)
        # The switch comes first: a supervisor starts what is current as soon as the box has ended.
        releases.switch(version)
        if running is None:
            say(f"release {version} is current; no box runs on {data_dir}")
            return
        try:
            say("stopping the box: requests finish, jobs are suspended")
            running.stop(releases.command(current), timeout_s)
            say(f"starting release {version}")
            running.start(releases.command(version), version, timeout_s)
        except NotUp as error:
            say(f"release {version} does not come up ({error}); going back to {current}")
            _return(releases, current, way_back(releases, data_dir, current), data_dir, running, timeout_s)
            raise Refused(
                f"release {version} did not come up: {error}\nrelease {current} runs again as before"
            ) from error
        say(f"release {version} is current and answers; `appliance rollback` goes back to {current}")


def rollback(releases: Releases, data_dir: Path, way: WayBack, timeout_s: float, say: Say) -> None:
    """Raises Refused."""
    with releases.alone():
        current, running = releases.current, Running.on(data_dir)
        assert current is not None, "there is a release before it"
        if running is not None:
            say("stopping the box: requests finish, jobs are suspended")
        aside = _return(releases, way.version, way, data_dir, running, timeout_s)
        if aside is not None:
            say(f"the database of {current} is kept: {aside}")
        say(f"release {way.version} is current{'' if running is None else ' and answers'}")


def _return(
    releases: Releases, version: str, way: WayBack, data_dir: Path, running: Running | None, timeout_s: float
) -> Path | None:
    """Raises Refused."""
    current = releases.current
    assert current is not None
    try:
        if running is not None and not running.detached:
            # A supervisor would start a box onto the database that is being exchanged.
            releases.switch(version, back=True)
        if running is not None:
            running.stop(releases.command(current), timeout_s)
        aside = restore(way, data_dir)
        releases.switch(version, back=True)
        if running is not None:
            running.start(releases.command(version), version, timeout_s)
        return aside
    except NotUp as error:
        raise Refused(
            f"release {version} is current and its database in place, but it does not come up: {error}; "
            f"`appliance up{data_dir_option(data_dir)}` tries again"
        ) from error
