"""The way back: what it restores, what it says is lost, and where it refuses."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest

from appliance.backup import DATABASE
from appliance.bundle import running, upgrade
from appliance.bundle.carried.errors import Refused
from appliance.bundle.carried.releases import Release, Releases
from appliance.bundle.rollback import restore, way_back
from appliance.bundle.running import NotUp, Running
from appliance.store import migrator
from appliance.store.copies import FOLDER, kept_copies
from appliance.store.database import Database
from appliance.store.objects import models, responses
from appliance.store.rows import ResponseRow
from tests.unit.controller.conftest import insert_model

SCHEMA = max(migrator.migrations())


@pytest.fixture
def releases(tmp_path):
    made = Releases(tmp_path / "opt")
    for version, schema in (("1", SCHEMA), ("2", 900)):
        made.folder(version).mkdir(parents=True)
        made.add(Release(version, "small", schema, "c", "d", float(version)))
        made.switch(version)
    return made


@pytest.fixture
def data_dir(tmp_path):
    folder = tmp_path / "box?of #1"  # addresses of databases have them in quotes
    (folder / "files").mkdir(parents=True)
    with Database(folder / DATABASE) as db:
        key(db, "kept")
        key(db, "stolen")
        for name in ("file-stays", "file-goes"):
            (folder / "files" / name).touch()
            file(db, name)
    return folder


def key(db, name):
    db.execute(
        "INSERT INTO keys (id, name, sha256, prefix, scopes, created_s) VALUES (?, ?, ?, 'p', '[]', 1)",
        [name, name, name],
    )


def file(db, name):
    db.execute(
        "INSERT INTO files (id, filename, purpose, bytes, sha256, status, created_s) VALUES (?, '', '', 0, '', '', 1)",
        [name],
    )


def migrated(data_dir, monkeypatch):
    """As the newer release leaves it: its schema, a further key, one revoked, a file deleted."""
    with monkeypatch.context() as patch:
        scripts = {**migrator.migrations(), 900: "CREATE TABLE newest (x);\n"}
        patch.setattr(migrator, "migrations", lambda: scripts)
        with Database(data_dir / DATABASE) as db:
            key(db, "made-since")
            file(db, "file-new")
            db.execute("UPDATE keys SET revoked_s = 77 WHERE id = 'stolen'")
            db.execute("DELETE FROM files WHERE id = 'file-goes'")
    (data_dir / "files" / "file-goes").unlink()


def rows(path, sql):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def test_with_the_same_schema_nothing_is_lost(releases, data_dir):
    way = way_back(releases, data_dir)
    assert (way.version, way.copy) == ("1", None) and "nothing is lost" in way.words()
    assert restore(way, data_dir) is None


def test_the_database_of_before_comes_back(releases, data_dir, monkeypatch):
    migrated(data_dir, monkeypatch)
    way = way_back(releases, data_dir)
    assert way.lost == {"API keys": 1, "files": 1} and way.revoked == {"stolen": 77} and way.back == {}
    words = way.words()
    assert "1 API keys, 1 files" in words and "1 keys revoked since stay revoked" in words
    aside = restore(way, data_dir)
    with Database(data_dir / DATABASE) as db:  # the release of before opens it
        found = dict(db.execute("SELECT id, revoked_s FROM keys").fetchall())
    assert found == {"kept": None, "stolen": 77.0}, "who had stolen it must not have it again"
    assert rows(data_dir / DATABASE, "SELECT id FROM files") == [("file-stays",)], "no file without its bytes"
    assert rows(aside, "SELECT count(*) FROM keys") == [(3,)] and kept_copies(data_dir / DATABASE) == [way.copy]
    assert not [name for name in os.listdir(data_dir) if "restoring" in name]


def test_a_key_that_was_revoked_or_deleted_after_the_question_stays_so(releases, data_dir, monkeypatch):
    """The box goes on while a person reads what is lost, and until its last request has ended."""
    with Database(data_dir / DATABASE) as db:
        key(db, "of-a-command")
    migrated(data_dir, monkeypatch)
    with closing(sqlite3.connect(data_dir / DATABASE)) as connection, connection:
        connection.execute("DELETE FROM keys WHERE id = 'of-a-command'")
    way = way_back(releases, data_dir)
    assert set(way.revoked) == {"stolen", "of-a-command"}
    with closing(sqlite3.connect(data_dir / DATABASE)) as connection, connection:
        connection.execute("UPDATE keys SET revoked_s = 99 WHERE id = 'kept'")
    restore(way, data_dir)
    live = rows(data_dir / DATABASE, "SELECT id FROM keys WHERE revoked_s IS NULL")
    assert live == [] and rows(data_dir / DATABASE, "SELECT revoked_s FROM keys WHERE id = 'kept'") == [(99,)]


def test_a_secret_that_was_replaced_since_does_not_come_back(releases, data_dir, monkeypatch):
    """Whoever had seen the old one could ask again, and its owner, with the new one, could not; a quota that was
    lowered since was the old one."""
    migrated(data_dir, monkeypatch)
    with closing(sqlite3.connect(data_dir / DATABASE)) as connection, connection:
        connection.execute("UPDATE keys SET sha256 = 'new', prefix = 'sk-new', tokens_per_day = 7 WHERE id = 'kept'")
    way = way_back(releases, data_dir)
    assert "keys keep the secrets, scopes and limits" in way.words() and "(settings, shares, progress" in way.words()
    restore(way, data_dir)
    found = rows(data_dir / DATABASE, "SELECT sha256, prefix, tokens_per_day FROM keys WHERE id = 'kept'")
    assert found == [("new", "sk-new", 7)]


def test_what_was_deleted_cut_or_forgotten_since_does_not_come_back(releases, data_dir, monkeypatch):
    """A response that its owner had deleted was there again, and a key that was an administrator's once was one."""
    with Database(data_dir / DATABASE) as db:
        db.execute("UPDATE keys SET scopes = '[\"admin\"]', owner = 'annabel' WHERE id = 'kept'")
        db.execute("UPDATE keys SET scopes = '[\"inference\"]', owner = 'ben' WHERE id = 'stolen'")
        insert_model(db, "m")
        for owner in ("ben", "carl"):
            models.share(db, "m", owner)
        for name in ("resp_stays", "resp_goes"):
            row = ResponseRow(name, "kept", "completed", created_s=1.0, used_s=1.0, bytes=3, input="[]", response="{}")
            assert responses.insert(db, row)
        assert db.value("SELECT number FROM held WHERE kind = 'responses'") == 2
    migrated(data_dir, monkeypatch)
    with closing(sqlite3.connect(data_dir / DATABASE)) as connection, connection:
        connection.execute("DELETE FROM responses WHERE id = 'resp_goes'")
        connection.execute("DELETE FROM model_shares WHERE owner != 'ben'")
        new = """["read", "inference", "of-the-newer-release"]"""
        connection.execute(
            "UPDATE keys SET scopes = ?, models = '[\"m\"]', owner = 'forgotten-1' WHERE id = 'kept'", [new]
        )
    way = way_back(releases, data_dir)
    assert way.back == {} and way.forgotten == ("annabel",) and "annabel (`appliance forget` again)" in way.words()
    restore(way, data_dir)
    found = rows(data_dir / DATABASE, "SELECT id, scopes, models FROM keys ORDER BY id")
    assert found == [("kept", '["inference"]', '["m"]'), ("stolen", '["inference"]', None)]
    assert rows(data_dir / DATABASE, "SELECT owner FROM model_shares") == [("ben",)]
    assert rows(data_dir / DATABASE, "SELECT id FROM responses") == [("resp_stays",)]
    assert rows(data_dir / DATABASE, "SELECT number FROM held WHERE kind = 'responses'") == [(1,)]


def test_whose_access_was_revoked_since_they_first_came_does_not_come_back(releases, data_dir, monkeypatch):
    """A person whom a login provider knows got another key: that they had been shut out was lost with theirs."""
    migrated(data_dir, monkeypatch)
    with closing(sqlite3.connect(data_dir / DATABASE)) as connection, connection:
        connection.execute("UPDATE keys SET subject = 'ann', revoked_s = 88 WHERE id = 'made-since'")
    restore(way_back(releases, data_dir), data_dir)
    found = rows(data_dir / DATABASE, "SELECT subject, revoked_s FROM keys WHERE id = 'made-since'")
    assert found == [("ann", 88.0)]


def test_a_copy_of_a_release_that_had_less_in_it_comes_back_too(releases, data_dir, monkeypatch):
    migrated(data_dir, monkeypatch)
    (kept,) = kept_copies(data_dir / DATABASE)
    with closing(sqlite3.connect(kept.path)) as connection, connection:
        for table in ("eval_runs", "model_shares", "permissions"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("ALTER TABLE keys DROP COLUMN models")
    assert restore(way_back(releases, data_dir), data_dir) is not None
    assert rows(data_dir / DATABASE, "SELECT count(*) FROM keys") == [(2,)]


def test_a_key_that_was_given_an_end_since_keeps_it_or_is_named(releases, data_dir, monkeypatch):
    """It lasted for ever again, or until the end that it had before."""
    migrated(data_dir, monkeypatch)
    until_s = time.time() + 99
    with closing(sqlite3.connect(data_dir / DATABASE)) as connection, connection:
        connection.execute("UPDATE keys SET expires_s = ? WHERE id = 'kept'", (until_s,))
    (kept,) = kept_copies(data_dir / DATABASE)
    older = kept.path.read_bytes()
    way = way_back(releases, data_dir)
    assert way.endless == () and "--expires" not in way.words()
    aside = restore(way, data_dir)
    assert rows(data_dir / DATABASE, "SELECT expires_s FROM keys WHERE id = 'kept'") == [(until_s,)]

    aside.replace(data_dir / DATABASE)
    kept.path.write_bytes(older)
    with closing(sqlite3.connect(kept.path)) as connection, connection:
        connection.execute("DROP INDEX keys_expiring")
        connection.execute("DROP INDEX keys_expired")
        connection.execute("ALTER TABLE keys DROP COLUMN expires_s")
        key(connection, "over")
    with closing(sqlite3.connect(data_dir / DATABASE)) as connection, connection:
        key(connection, "over")
        connection.execute("UPDATE keys SET expires_s = 5 WHERE id = 'over'")
    way = way_back(releases, data_dir)
    assert way.endless == ("kept",) and "last for ever, though given an end since: kept" in way.words()
    restore(way, data_dir)
    live = rows(data_dir / DATABASE, "SELECT id FROM keys WHERE revoked_s IS NULL")
    assert live == [("kept",)], "what has ended stays so"


def test_without_a_copy_or_with_a_damaged_one_it_refuses(releases, data_dir, monkeypatch):
    migrated(data_dir, monkeypatch)
    (kept,) = kept_copies(data_dir / DATABASE)
    data = kept.path.read_bytes()
    kept.path.write_bytes(data[:4096] + b"\xff" * 8192 + data[12288:])
    with pytest.raises(Refused, match="damaged"):
        way_back(releases, data_dir)
    kept.path.unlink()
    with pytest.raises(Refused, match=f"schema 900, release 1 knows it up to {SCHEMA}, and there is no copy"):
        way_back(releases, data_dir)


def test_without_a_release_before_it_refuses(releases, data_dir):
    (releases.folder("1") / "release.json").unlink()
    with pytest.raises(Refused, match="not installed any more"):
        way_back(releases, data_dir)
    (releases.prefix / "switches.json").unlink()
    with pytest.raises(Refused, match="none before it"):
        way_back(releases, data_dir)


class Box:
    """Stands in for Running: what is called, and which releases come up."""

    def __init__(self, data_dir, releases, well, detached=True):
        self.calls, self.detached, self._well, self._releases, self._data_dir = [], detached, well, releases, data_dir

    def stop(self, command, timeout_s):
        self.calls.append(("stop", command.parts[-4], self._releases.current))

    def start(self, command, version, timeout_s):
        self.calls.append(("start", version))
        if version not in self._well:
            raise NotUp("its port is taken")


@pytest.fixture
def box(monkeypatch, data_dir, releases):
    def make(*well, detached=True):
        made = Box(data_dir, releases, well, detached)
        monkeypatch.setattr(upgrade, "Running", type("R", (), {"on": staticmethod(lambda _: made)}))
        return made

    return make


def test_an_upgrade_switches_before_the_box_ends_and_starts_it_again(releases, data_dir, box):
    releases.switch("1", back=True)
    found = box("1", "2")
    upgrade.upgrade(releases, "2", data_dir, 5, lambda _: None)
    assert found.calls == [("stop", "1", "2"), ("start", "2")], "a supervisor starts what is current"
    assert (releases.current, releases.before) == ("2", "1")
    with pytest.raises(Refused, match="current one already"):
        upgrade.upgrade(releases, "2", data_dir, 5, lambda _: None)


@pytest.mark.parametrize("detached", [True, False])
def test_a_release_that_does_not_come_up_gives_way_to_the_one_before(releases, data_dir, box, monkeypatch, detached):
    releases.switch("1", back=True)
    found = box("1", detached=detached)
    with pytest.raises(Refused, match="its port is taken\nrelease 1 runs again as before"):
        upgrade.upgrade(releases, "2", data_dir, 5, lambda _: migrated_once(data_dir, monkeypatch))
    assert found.calls[-2:] == [("stop", "2", "2" if detached else "1"), ("start", "1")]
    assert releases.current == "1" and releases.before is None
    assert rows(data_dir / DATABASE, "PRAGMA user_version") == [(SCHEMA,)], "the older release can open it again"


def migrated_once(data_dir, monkeypatch):
    if not (data_dir / FOLDER).is_dir():
        migrated(data_dir, monkeypatch)


def test_a_rollback_stops_restores_switches_and_starts(releases, data_dir, box, monkeypatch):
    migrated(data_dir, monkeypatch)
    found = box("1")
    upgrade.rollback(releases, data_dir, way_back(releases, data_dir), 5, lambda _: None)
    assert found.calls == [("stop", "2", "2"), ("start", "1")] and releases.current == "1"
    assert rows(data_dir / DATABASE, "PRAGMA user_version") == [(SCHEMA,)]


def test_an_older_release_is_no_upgrade(releases, data_dir, box, monkeypatch):
    migrated(data_dir, monkeypatch)
    box("1")
    with pytest.raises(Refused, match="appliance rollback"):
        upgrade.upgrade(releases, "1", data_dir, 5, lambda _: None)
    with pytest.raises(Refused, match="3 is not installed"):
        upgrade.upgrade(releases, "3", data_dir, 5, lambda _: None)


def test_one_change_of_releases_at_a_time(releases, data_dir):
    with releases.alone(), pytest.raises(Refused, match="another installation"):
        upgrade.upgrade(releases, "1", data_dir, 5, lambda _: None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_what_root_restores_is_the_boxs_users(releases, data_dir, monkeypatch, tmp_path):
    migrated(data_dir, monkeypatch)
    above = Path(tempfile.gettempdir()).resolve()
    for folder in [tmp_path, *tmp_path.parents]:  # a parallel run has a level more
        if above in folder.parents:
            folder.chmod(0o755)
    for path in [data_dir, *data_dir.rglob("*")]:
        os.chown(path, 4321, 4321)
    assert restore(way_back(releases, data_dir), data_dir) is not None
    assert {path.stat().st_uid for path in [data_dir, *data_dir.rglob("*")]} == {4321} and os.geteuid() == 0


def process(tmp_path, data_dir, monkeypatch, errors, group="0::/user.slice/session-1.scope"):
    """A box's main process as /proc shows it."""
    config = f'{{"box": {{"data_dir": "{data_dir}", "host": "0.0.0.0", "port": 9000, "devices": 4}}}}'
    folder = tmp_path / "proc" / "77"
    (folder / "fd").mkdir(parents=True)
    (folder / "cmdline").write_bytes(b"\0".join([b"python", b"--config-json", config.encode(), b""]))
    (folder / "environ").write_bytes(b"PATH=/bin\0APPLIANCE_SCHEDULER__DRAIN_TIMEOUT_S=60\0")
    (folder / "cgroup").write_text(group)
    (folder / "fd" / "2").symlink_to(errors)
    monkeypatch.setattr(running, "PROC", tmp_path / "proc")
    monkeypatch.setattr(running.BoxFile, "pid", 77)


def test_a_box_is_started_again_as_it_was(tmp_path, data_dir, monkeypatch):
    process(tmp_path, data_dir, monkeypatch, data_dir / "logs" / "main.log")
    found = Running.on(data_dir)
    assert found == Running(
        data_dir,
        os.geteuid(),
        ("--host", "0.0.0.0", "--port", "9000", "--devices", "4"),
        {"APPLIANCE_SCHEDULER__DRAIN_TIMEOUT_S": "60"},
        detached=True,
    )


def test_a_supervised_box_is_left_to_its_supervisor_and_one_in_a_terminal_refused(tmp_path, data_dir, monkeypatch):
    process(tmp_path, data_dir, monkeypatch, "/dev/null", "0::/system.slice/appliance.service")
    assert Running.on(data_dir).detached is False
    (tmp_path / "proc" / "77" / "cgroup").write_text("0::/user.slice/user@1000.service/app.slice/terminal-1.scope\n")
    with pytest.raises(Refused, match="in the foreground"):
        Running.on(data_dir)


def test_a_command_of_a_release_that_fails_says_why(tmp_path, data_dir, monkeypatch):
    monkeypatch.setattr(running, "_LOOK_EVERY_S", 0.01)
    command = tmp_path / "appliance"
    command.write_text(
        '#!/bin/sh\n[ "$1" = status ] && echo \'{"box": {"version": "1"}}\' || { echo no >&2; exit 1; }\n'
    )
    command.chmod(0o755)
    box = Running(data_dir, os.geteuid(), (), {}, detached=False)
    box.start(command, "1", 5)
    with pytest.raises(NotUp, match="release 2 does not answer: release 1 answers"):
        box.start(command, "2", 0.05)
    with pytest.raises(NotUp, match="no"):
        box.stop(command, 1)
    with pytest.raises(NotUp, match="no"):
        Running(data_dir, os.geteuid(), (), {}, detached=True).start(command, "1", 5)
