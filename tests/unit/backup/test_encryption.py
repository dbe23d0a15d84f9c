"""Encrypted backups: nothing of the box can be read at the place, all comes back with the key, and with no other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.backup import encryption
from appliance.backup import manifest as manifests
from appliance.backup.encryption import HEADER, KeyFile, make_key, opened
from appliance.backup.errors import BackupDamaged, BackupError, NoBackup, WrongKey, WrongPlace
from appliance.backup.restore import restore, verify
from appliance.backup.take import take
from tests.unit.backup.test_backup import colour, paths, place, tree  # noqa: F401 - fixtures
from weights.format.errors import ObjectDamaged
from weights.tiers.objects import DirectoryObjects

CANARY = b"a sentence of the training data that nobody else may read"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key(tmp_path / "backup.key")
    return tmp_path / "backup.key"


def passphrase(tmp_path: Path, text: str = "correct horse battery staple") -> Path:
    path = tmp_path / f"passphrase-{len(list(tmp_path.iterdir()))}"
    path.touch(mode=0o600)
    path.write_text(f"# of the box\n{text}\n")
    return path


@pytest.mark.parametrize("kind", ["key", "passphrase"])
def test_what_comes_back_is_what_was_there_and_the_place_tells_nothing(paths, place, tmp_path, key, kind):  # noqa: F811
    key_file = key if kind == "key" else passphrase(tmp_path)
    (paths.files / "file-9").write_bytes(CANARY)
    made = take(paths, opened(place, key_file, make=True))
    assert restore(opened(place, key_file, make=False), None, tmp_path / "back") == made
    assert (tmp_path / "back/files/file-9").read_bytes() == CANARY and colour(tmp_path / "back") == "blue"
    there = tree(place.root)
    assert HEADER in there and len(there) > 4
    told = b"".join(name.encode() + data for name, data in there.items())
    for word in (
        CANARY,
        b"file-9",
        b"model.safetensors",
        b"SQLite",
        str(paths.data_dir).encode(),
        key_file.read_bytes(),
    ):
        assert word not in told
    known = {made_chunk for file in made.files for made_chunk in file.chunks}
    plain = tmp_path / "plain"
    plain.mkdir()
    take(paths, type(place)(plain))
    assert not known & {chunk for file in manifests.newest(type(place)(plain)).files for chunk in file.chunks}, (
        "whoever has a file could ask whether the box has it"
    )


def test_a_second_backup_writes_only_what_is_new_and_old_ones_go(paths, place, key):  # noqa: F811
    first = take(paths, opened(place, key, make=True), clock=lambda: 1e9)
    second = take(paths, opened(place, key, make=True), keep=1, clock=lambda: 2e9)
    assert second.new_bytes < first.new_bytes - 100_000
    assert manifests.names(place) == [second.name] and verify(opened(place, key, make=False), None) == second
    chunks = {chunk for file in second.files for chunk in file.chunks}
    assert {Path(name).name for name, _ in place.list("chunks/")} == chunks


def test_another_key_is_refused_in_words(paths, place, tmp_path, key):  # noqa: F811
    take(paths, opened(place, key, make=True))
    make_key(tmp_path / "other.key")
    for wrong, words in (
        (tmp_path / "other.key", "the key in .*other.key is not the one that the backups at"),
        (passphrase(tmp_path), "has a passphrase, and the backups at .* were encrypted with a key"),
        (None, "are encrypted: name the key file"),
    ):
        with pytest.raises(WrongKey, match=words):
            opened(place, wrong, make=False)
    elsewhere = type(place)(tmp_path / "elsewhere", create=True)
    take(paths, opened(elsewhere, passphrase(tmp_path), make=True))
    with pytest.raises(WrongKey, match="the passphrase in .* is not the one"):
        opened(elsewhere, passphrase(tmp_path, "another horse battery staple"), make=False)


def test_a_place_is_encrypted_from_its_first_backup_on_or_never(paths, place, key):  # noqa: F811
    with pytest.raises(NoBackup):
        restore(opened(place, key, make=False), None, paths.data_dir.with_name("back"))
    assert not list(place.root.iterdir()), "to look makes nothing"
    take(paths, opened(place, None, make=True))
    with pytest.raises(BackupError, match="has backups that are not encrypted"):
        opened(place, key, make=True)


def test_a_place_that_hides_a_backup_at_first_brings_none_back_that_is_not_sealed(
    paths,  # noqa: F811
    place,  # noqa: F811
    key,
    tmp_path,
):
    """Who keeps the place chooses what it lists, each time that it is asked: a box with keys of his own came back."""
    take(paths, place)
    hides, asked = type(place)(place.root), list[str]()

    def listed(prefix: str) -> Iterator[tuple[str, int]]:
        asked.append(prefix)
        return iter([]) if len(asked) == 1 else place.list(prefix)

    hides.list = listed
    with pytest.raises(BackupDamaged):
        restore(opened(hides, key, make=False), None, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def chunk(place) -> Path:  # noqa: F811
    return max((path for path in place.root.glob("chunks/*/*")), key=lambda path: path.stat().st_size)


def altered(place) -> None:  # noqa: F811
    data = bytearray(chunk(place).read_bytes())
    data[len(data) // 2] ^= 1
    chunk(place).write_bytes(data)


def cut_short(place) -> None:  # noqa: F811
    os.truncate(chunk(place), 1000)


def swapped(place) -> None:  # noqa: F811
    other = next(path for path in place.root.glob("chunks/*/*") if path != chunk(place))
    chunk(place).write_bytes(other.read_bytes())


@pytest.mark.parametrize("how", [altered, cut_short, swapped])
def test_what_was_changed_at_the_place_is_found(paths, place, key, tmp_path, how):  # noqa: F811
    take(paths, opened(place, key, make=True))
    how(place)
    with pytest.raises(BackupDamaged):
        restore(opened(place, key, make=False), None, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_manifest_that_was_changed_or_renamed_is_found(paths, place, key):  # noqa: F811
    made = take(paths, opened(place, key, make=True))
    path = place.root / "backups" / f"{made.name}.json"
    path.rename(path.with_name("2030-01-01T00-00-00Z.json"))
    with pytest.raises(BackupDamaged, match="cannot be read"):
        verify(opened(place, key, make=False), None)
    with pytest.raises(ObjectDamaged):
        opened(place, key, make=False).get("backups/2030-01-01T00-00-00Z.json")


@pytest.mark.parametrize(
    "told",
    [
        "{}",
        "no json",
        '{"format": 2}',
        '{"format": 2, "place": 1}',
        '{"format": 3}',
        '{"format": 1, "kdf": "key", "salt": "zz"}',
    ],
)
def test_a_damaged_header_is_said(paths, place, key, told):  # noqa: F811
    take(paths, opened(place, key, make=True))
    (place.root / HEADER).write_text(told)
    with pytest.raises(BackupDamaged):
        opened(place, key, make=False)


def test_a_place_cannot_make_who_opens_it_work_without_end(paths, place, tmp_path):  # noqa: F811
    key_file = passphrase(tmp_path)
    take(paths, opened(place, key_file, make=True))
    header = json.loads((place.root / HEADER).read_text())
    (place.root / HEADER).write_text(json.dumps(header | {"n": 2**40}))
    with pytest.raises(BackupDamaged):
        opened(place, key_file, make=False)


def test_key_files_that_cannot_be_right_are_refused(tmp_path, key):
    with pytest.raises(BackupError, match="exists; a key is never written over"):
        make_key(key)
    assert key.stat().st_mode & 0o777 == 0o600 and not KeyFile.read(key).is_passphrase
    key.chmod(0o640)
    with pytest.raises(BackupError, match="can be read by others; `chmod 600"):
        KeyFile.read(key)
    for text, words in (
        ("short", "5 characters"),
        ("one line\nand another line", "2 lines"),
        (f"{encryption.KEY_LINE}AAAA", "3 bytes instead of 32"),
        (f"{encryption.KEY_LINE}!", "is damaged"),
    ):
        with pytest.raises(BackupError, match=words):
            KeyFile.read(passphrase(tmp_path, text))
    with pytest.raises(BackupError, match="cannot be read"):
        KeyFile.read(tmp_path / "none")


def test_the_commands_make_and_restore_one_with_the_key(paths, place, tmp_path):  # noqa: F811
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "appliance.cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    key_file, other = str(tmp_path / "k"), str(tmp_path / "o")
    for one in (key_file, other):
        assert run("backup", "keygen", one).returncode == 0
    made = run("backup", "make", str(place.root), "--key-file", key_file, "--data-dir", str(paths.data_dir))
    assert made.returncode == 0, made.stderr
    back = ["--data-dir", str(tmp_path / "back")]
    wrong = run("restore", str(place.root), "--key-file", other, *back)
    assert wrong.returncode == 1 and "is not the one that the backups at" in wrong.stderr
    done = run("restore", str(place.root), "--key-file", key_file, *back)
    assert (
        done.returncode == 0
        and "keys that were revoked or rotated, and people who were forgotten, after" in done.stderr
    )
    assert colour(tmp_path / "back") == "blue"


@pytest.mark.parametrize("kind", ["key", "passphrase"])
def test_who_keeps_two_places_of_one_key_file_does_not_show_one_for_the_other(paths, place, tmp_path, key, kind):  # noqa: F811
    key_file = key if kind == "key" else passphrase(tmp_path)
    other = DirectoryObjects(tmp_path / "box-2", create=True)
    take(paths, opened(place, key_file, make=True))
    take(paths, opened(other, key_file, make=True))
    kept = tmp_path / "kept"
    shutil.copytree(other.root, kept)
    shutil.rmtree(other.root)
    shutil.copytree(place.root, other.root)
    for make in (False, True):
        with pytest.raises(WrongPlace, match="a place called 'place'"):
            opened(other, key_file, make=make)
    # Nor by saying so: the name is sealed with the key.
    header = json.loads((other.root / HEADER).read_text())
    for told in ({**header, "place": "box-2"}, {**header, "format": 1}):
        (other.root / HEADER).write_text(json.dumps(told))
        with pytest.raises(WrongKey):
            opened(other, key_file, make=False)
    # Another mount, with the folder as it was.
    moved = DirectoryObjects(tmp_path / "elsewhere/box-2", create=True)
    shutil.copytree(kept, moved.root, dirs_exist_ok=True)
    assert verify(opened(moved, key_file, make=False), None).files


def test_a_place_that_an_earlier_release_made_is_still_read(paths, place, key, monkeypatch):  # noqa: F811
    monkeypatch.setattr(encryption, "HEADER_FORMAT", encryption.UNBOUND)
    made = take(paths, opened(place, key, make=True))
    monkeypatch.undo()
    assert json.loads((place.root / HEADER).read_text())["format"] == 1
    moved = DirectoryObjects(place.root.rename(place.root.with_name("moved")))
    assert verify(opened(moved, key, make=False), None) == made
