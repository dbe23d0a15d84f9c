"""A bundle says what is wrong with it, and installs itself where there is no network."""

from __future__ import annotations

import email
import io
import json
import os
import re
import shutil
import struct
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

from appliance.bundle import main, signing, wheels
from appliance.bundle.carried import machine
from appliance.bundle.carried.archive import END, MANIFEST, MOST_OF_MANIFEST, SIGNATURE, SIGNER, Bundle, Manifest
from appliance.bundle.carried.errors import BadSignature, CutShort, NotWhole, Refused, Unusable
from appliance.bundle.carried.releases import Release, Releases
from tests.bundle_support import bundle, pip_wheel, run


@pytest.fixture(autouse=True)
def no_modules_of_others(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture(scope="module")
def key():
    return signing.new_key()


@pytest.fixture(scope="module")
def made(tmp_path_factory, key):
    return bundle(tmp_path_factory.mktemp("bundle"), "1.0", key)


def rewritten(made, to, *, drop=(), add=(), change=(), sign=None):
    """A copy of a bundle with other contents behind the same script at its beginning."""
    with Bundle(made) as found:
        header = found.manifest.header
    with zipfile.ZipFile(made) as old, open(to, "wb") as file:
        file.write(header)
        with zipfile.ZipFile(file, "w") as archive:
            for name in old.namelist():
                data = old.read(name)
                if name == SIGNATURE and sign is not None:
                    data = sign.sign(old.read(MANIFEST), "x").text.encode()
                if name not in drop:
                    archive.writestr(name, data + b" " if name in change else data)
            for name in add:
                archive.writestr(name, b"x")
            archive.comment = END
    return to


def problems(path, key):
    with Bundle(path) as found, pytest.raises(NotWhole) as told:
        found.verify([key.public])
    return told.value.problems


def test_a_whole_one_is_whole(made, key):
    with Bundle(made) as found:
        assert found.verify([key.public]) == key.public == found.signer
        assert (found.manifest.version, found.manifest.schema > 40) == ("1.0", True)


def test_changed_missing_and_extra_files_are_named(made, key, tmp_path):
    wheel = next(name for name in zipfile.ZipFile(made).namelist() if name.startswith("wheels/appliance"))
    found = rewritten(made, tmp_path / "b", drop=["signer.pub"], add=["wheels/evil.whl"], change=[wheel, "__main__.py"])
    told = problems(found, key)
    assert [text.split(" has ")[0] for text in told] == [
        "missing: signer.pub",
        "extra: wheels/evil.whl",
        "changed: __main__.py",
        f"changed: {wheel}",
    ]
    with pytest.warns(UserWarning, match="Duplicate name"):
        twice = rewritten(made, tmp_path / "c", add=[wheel])
    assert problems(twice, key)[0] == f"extra: {wheel} is there more than once"


def test_a_bit_anywhere_is_seen(made, key, tmp_path):
    """In the script, in contents, in names, in the end: by the check, or because it is no archive any more."""
    data, wrong = made.read_bytes(), tmp_path / "b"
    seen = []
    for place in range(5, len(data), len(data) // 31):
        wrong.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        try:
            with Bundle(wrong) as found:
                found.verify([key.public])
        except (NotWhole, BadSignature, Unusable):
            seen.append(place)
        else:
            # What may differ: times and the like of the archive, which nobody reads.
            with Bundle(wrong) as found:
                assert all(found._wrong(name, None) == "" for name in found.manifest.files)
    assert len(seen) > 27


def test_the_script_at_the_beginning_counts(made, key, tmp_path):
    changed = made.read_bytes().replace(b"copy it again", b"rm -rf /homes", 1)
    (tmp_path / "b").write_bytes(changed)
    assert problems(tmp_path / "b", key) == ("changed: the script at the beginning of the file",)


def test_an_unknown_signer_is_named_and_a_changed_manifest_refused(made, key, tmp_path):
    other = signing.new_key()
    with Bundle(made) as found:
        with pytest.raises(
            BadSignature, match=f"unknown signer.*{key.public.name}, trusted here is {other.public.name}"
        ):
            found.verify([other.public])
        with pytest.raises(BadSignature, match="trusted here is nobody"):
            found.verify([])
    with Bundle(rewritten(made, tmp_path / "b", sign=other)) as found, pytest.raises(BadSignature, match="unknown"):
        found.verify([key.public])
    with Bundle(rewritten(made, tmp_path / "c", change=[MANIFEST])) as found:
        with pytest.raises(BadSignature, match=f"changed: {MANIFEST}"):
            found.verify([key.public])


def test_the_manifest_that_is_verified_is_the_one_that_is_believed(made, key, tmp_path, monkeypatch):
    """It was read twice: who changed the file in between, on a share of his, had his own files installed."""
    with zipfile.ZipFile(made) as archive:
        signed = archive.read(MANIFEST)
    with Bundle(rewritten(made, tmp_path / "b", change=[MANIFEST])) as found:
        monkeypatch.setattr(found._zip, "read", lambda name: signed)
        with pytest.raises(BadSignature, match="changed: manifest.json"):
            found.verify([key.public])


@pytest.mark.parametrize("name", [MANIFEST, SIGNATURE, SIGNER])
def test_what_is_read_before_it_is_verified_is_bounded(tmp_path, name):
    to = tmp_path / "b"
    with zipfile.ZipFile(to, "w") as archive:
        for one in (MANIFEST, SIGNATURE, SIGNER):
            archive.writestr(one, bytes(MOST_OF_MANIFEST + 1) if one == name else b"{}")
        archive.comment = END
    with pytest.raises(Unusable, match=f"{name} of .* is larger than"):
        Bundle(to)


def test_a_manifest_that_is_nested_without_end_is_refused_in_words(tmp_path):
    with zipfile.ZipFile(tmp_path / "b", "w") as archive:
        for one in (MANIFEST, SIGNATURE, SIGNER):
            archive.writestr(one, "[" * 1_000_000)
        archive.comment = END
    with pytest.raises(Unusable, match="the manifest cannot be read"):
        Bundle(tmp_path / "b")


EVIL = b"\nprint('run though nobody signed it')\nraise SystemExit\n"


def with_longer_code(data, directory):
    """A file of the code that is read as it was signed by who checks it, and whole by who runs it."""
    name = b"appliance/bundle/carried/errors.py"
    entry = data.index(b"PK\1\2" + data[data.index(name, directory) - 42 : data.index(name, directory)], directory)
    (at,) = struct.unpack_from("<L", data, entry + 42)
    (size,) = struct.unpack_from("<L", data, entry + 24)
    more = data[at : at + 30 + len(name) + size] + EVIL
    changed = bytearray(data[:directory] + more + data[directory:])
    struct.pack_into("<L", changed, entry + len(more) + 20, size + len(EVIL))
    struct.pack_into("<L", changed, entry + len(more) + 42, directory)
    struct.pack_into("<L", changed, len(changed) - len(END) - 6, directory + len(more))
    return bytes(changed)


def with_two_directories(data, directory):
    """One that the 64-bit end names, which zipimport does not know, and one that the end names."""
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("__main__.py", EVIL)
    text, second = other.getvalue()[: 30 + 11 + len(EVIL)], bytearray(other.getvalue()[30 + 11 + len(EVIL) : -22])
    first, (count,) = bytearray(data[directory : -22 - len(END)]), struct.unpack_from("<H", data, -12 - len(END))
    struct.pack_into("<H", first, first.rindex(b"PK\1\2") + 32, len(second))  # the comment of the last file
    first += second
    begin, size = directory + len(text), len(second) + 76
    end_64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(first), begin)
    end_64 += struct.pack("<4sLQL", b"PK\6\7", 0, begin + len(first), 1)
    offset = begin + len(first) + 76 - size - directory
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, offset, len(END)) + END
    return data[:directory] + text + bytes(first) + end_64 + end


@pytest.mark.parametrize("attack", [with_longer_code, with_two_directories])
def test_no_code_runs_of_what_was_found_whole(made, key, tmp_path, attack):
    """Code ran that nobody had signed, though the file was whole for `appliance bundle verify`: Python runs an archive
    by zipimport, which reads it in its own way."""
    data = made.read_bytes()
    (directory,) = struct.unpack_from("<L", data, len(data) - len(END) - 6)
    (tmp_path / "b").write_bytes(attack(data, directory))
    assert "though nobody signed it" in run(sys.executable, tmp_path / "b", "verify").stdout, "Python reads it so"
    assert any("in another way" in text for text in problems(tmp_path / "b", key))


def test_one_of_more_than_two_gibibytes_is_whole_too(key, tmp_path, monkeypatch):
    """Its end is written in 64 bits, and places of files are too. Python runs no such archive (zipimport): `sh FILE` of
    a bundle for GPUs, which has several GiB, ended with "can't find '__main__' module"."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100_000)
    path = bundle(tmp_path, "1.0", key)
    with Bundle(path) as found:
        assert found.verify([key.public]) == key.public
    # It starts, and knows no other limit: an end in 64 bits is not what `make` writes for so few bytes.
    assert "read in another way" in run("sh", path, "verify", code=1).stderr


def test_it_runs_nothing_of_where_it_is_called(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("zipfile", "argparse", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this ran')")
    told = run("sh", made, "verify", env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}).stdout
    assert "whole" in told


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_nothing_of_it_is_unpacked(made, tmp_path, method):
    """A file of it that was said to be packed took as long as somebody wished, or ended with a stack trace."""
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(tmp_path / "b", "w", method) as archive:
        for name in (MANIFEST, SIGNATURE, SIGNER):
            archive.writestr(name, old.read(name))
        archive.comment = END
    with pytest.raises(Unusable, match="packed files"):
        Bundle(tmp_path / "b")


def test_what_it_says_shows_a_terminal_nothing_but_text(made, key, tmp_path):
    with pytest.raises(Unusable, match="no names"):
        Bundle(rewritten(made, tmp_path / "b", add=["\x1b[2Jwhole: 15 files as signed"]))
    with Bundle(made) as found:
        told = found.manifest
    evil = {**told.files, "\x1b[2Jwhole": told.files["__main__.py"]}
    for name, value in (("commit", "\x1b[1A"), ("version", 1), ("version", "../../x"), ("made", None), ("files", evil)):
        with pytest.raises(Unusable, match="the manifest cannot be read"):
            Manifest.decoded(replace(told, **{name: value}).encoded())
    with pytest.raises(Unusable) as refused:
        Manifest.decoded(b'{"format": "\\u001b[2J"}')
    assert "\x1b" not in str(refused.value)


def test_one_that_was_cut_short_says_so_itself(made, tmp_path):
    data, cut = made.read_bytes(), tmp_path / "cut.run"
    for size in (len(data) - 1, len(data) // 2, 3000):
        cut.write_bytes(data[:size])
        with pytest.raises(CutShort, match=f"cut short.*{size:,} bytes"):
            Bundle(cut)
        assert "was cut short" in run("sh", cut, "verify", code=1).stderr
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(Unusable, match="not a bundle"):
        Bundle(tmp_path / "other")
    with pytest.raises(Unusable, match="cannot be read"):
        Bundle(tmp_path / "absent")


def test_it_checks_itself_with_nothing_but_python(made, key):
    """No site-packages: neither this environment's, nor those of a user."""
    told = run("sh", made, "verify", env={"PYTHON": f"{sys.base_prefix}/bin/python3", "PATH": os.defpath}).stdout
    assert "whole" in told and key.public.line in told, "whose key it is has to be compared by a person"
    told = run("sh", made, "verify", "--key", key.public.line, "--json", env={"PATH": os.environ["PATH"]}).stdout
    assert json.loads(told)["trusted"]
    assert "unknown signer" in run("sh", made, "verify", "--key", signing.new_key().public.line, code=1).stderr
    assert "needs Python" in run("sh", made, "verify", env={"PYTHON": "false", "PATH": os.defpath}, code=1).stderr


def without_network() -> list[str]:
    """A namespace without any network where this may be made, which takes root."""
    able = os.geteuid() == 0 and shutil.which("unshare") and os.system("unshare -n true 2>/dev/null") == 0
    return ["unshare", "-n"] if able else []


def test_releases_lie_side_by_side(made, key, tmp_path):
    prefix = tmp_path / "opt"
    told = run(*without_network(), "sh", made, "install", prefix).stdout
    assert f"{key.public.name}, the key that comes with it, is trusted from now on" in told
    command = prefix / "bin" / "appliance"
    assert run(command).stdout.strip() == f"appliance of {prefix}/releases/1.0/venv"
    again = run("sh", made, "install", prefix).stdout
    assert "installed already" in again

    newer = bundle(tmp_path, "1.1", key)
    (prefix / "releases" / "1.1").mkdir()  # of an installation that was broken off
    (prefix / "releases" / "1.1" / "left").touch()
    told = json.loads(run("sh", newer, "install", prefix, "--json").stdout)
    assert (told["version"], told["current"]) == ("1.1", "1.0"), "an upgrade makes it current"
    releases = Releases(prefix)
    assert [one.version for one in releases.all()] == ["1.0", "1.1"]
    assert not (prefix / "releases" / "1.1" / "left").exists() and not [*prefix.glob("releases/*/.wheels*")]
    releases.switch("1.1")
    assert run(command).stdout.strip() == f"appliance of {prefix}/releases/1.1/venv"
    assert releases.before == "1.0"

    foreign = bundle(tmp_path / "foreign", "1.2", signing.new_key())
    assert "unknown signer" in run("sh", foreign, "install", prefix, code=1).stderr
    assert "another release 1.1" in run("sh", bundle(tmp_path / "b", "1.1", key), "install", prefix, code=1).stderr


def test_what_is_missing_is_named_before_anything_is_done(key, tmp_path):
    wanted = {
        "libraries": {"libnone.so.9": "'apt-get install libnone9'"},
        "programs": {"no-such|none-such": "'apt-get install such'"},
        "headers": {"None.h": "'apt-get install none-dev'"},
        "driver": {"command": ["echo", "570.1"], "least": 580, "remedy": "update it"},
    }
    path = bundle(tmp_path, "1.0", key, system=wanted)
    told = run("sh", path, "install", tmp_path / "opt", code=1).stderr
    for text in (
        "libnone.so.9 is missing",
        "no-such or none-such is missing",
        "None.h of",
        "driver is 570; needed is 580",
    ):
        assert text in told
    assert not (tmp_path / "opt" / "current").exists() and Releases(tmp_path / "opt").all() == []


def test_a_machine_of_another_kind_is_told(made, tmp_path, monkeypatch):
    with Bundle(made) as found:
        manifest = found.manifest
    assert machine.problems(manifest, tmp_path, "python3") == []
    monkeypatch.setattr(machine.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(machine.platform, "libc_ver", lambda: ("glibc", "2.5"))
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    told = machine.problems(replace(manifest, python="3.99", glibc="2.28"), tmp_path, "python3")
    assert len(told) == 4 and "riscv64" in told[0] and "2.28" in told[1] and "3.99" in told[2] and "GB free" in told[3]


def test_a_release_that_does_not_import_is_none(key, tmp_path):
    path = bundle(tmp_path, "1.0", key, imports=("no_such_module",))
    assert "no_such_module" in run("sh", path, "install", tmp_path / "opt", code=1).stderr
    assert Releases(tmp_path / "opt").all() == [] and Releases(tmp_path / "opt").current is None


def test_the_pages_and_the_unit_come_to_their_places(key, tmp_path):
    (tmp_path / "page").write_text("page")
    (tmp_path / "unit").write_text("ExecStart=/opt/appliance/.venv/bin/appliance up\n")
    names = {"share/appliance.service": "unit", "share/docs/offline.md": "page"}
    further = {name: tmp_path / file for name, file in names.items()}
    run("sh", bundle(tmp_path, "1.0", key, further=further), "install", tmp_path / "opt")
    release = tmp_path / "opt" / "releases" / "1.0"
    assert (release / "share" / "docs" / "offline.md").is_file()
    started = (release / "share" / "appliance.service").read_text()
    assert started == f"ExecStart={tmp_path}/opt/current/venv/bin/appliance up\n"


def test_the_oldest_c_library_is_that_of_the_neediest_wheel():
    names = ["a-1-py3-none-any.whl", "b-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"]
    assert wheels.oldest_glibc(names) == "2.17"
    names.append("c-1-cp311-cp311-manylinux_2_34_x86_64.manylinux_2_28_x86_64.whl")
    assert wheels.oldest_glibc(names) == "2.28"


def test_the_build_and_its_lock_are_those_of_this_environment():
    found = wheels.builds(main.make.PROJECT)
    assert sorted(found) == ["cpu", "cuda"] and all(path.is_file() for path in found.values())
    assert wheels.build_here(main.make.PROJECT) in found


def test_a_bundle_of_this_checkout_has_what_it_takes(key, tmp_path, monkeypatch, capsys):
    """But for the packages of the lock, which are the registry's to give."""
    monkeypatch.setattr(wheels, "collect", lambda lock, folder, work: pip_wheel(folder))
    key.write(tmp_path / "k")
    target = tmp_path / "made.run"
    options = ["--key", str(tmp_path / "k"), "--version", "3.2.1", "--build", "cpu"]
    assert main.main(["--json", "make", str(target), *options]) == 0, capsys.readouterr().err
    told = json.loads(capsys.readouterr().out)
    with Bundle(target) as found, zipfile.ZipFile(target) as archive:
        found.verify([key.public])
        assert (found.manifest.version, found.manifest.build, told["signer"]) == ("3.2.1", "cpu", key.public.name)
        assert "libnuma.so.1" in found.manifest.system["libraries"] and "transformers/models" in found.manifest.skip
        bill = json.loads(archive.read("SBOM.cdx.json"))
        assert bill["metadata"]["component"]["version"] == "3.2.1" and len(bill["components"]) > 100
        assert {"share/docs/offline.md", "share/appliance.service"} <= found.manifest.files.keys()
        with archive.open("wheels/appliance-3.2.1-py3-none-any.whl") as own:
            names = set((wheel := zipfile.ZipFile(own)).namelist())
            metadata = email.message_from_bytes(wheel.read("appliance-3.2.1.dist-info/METADATA"))
    wanted = {
        path.relative_to(main.make.PROJECT).as_posix()
        for package in wheels.PACKAGES
        for path in (main.make.PROJECT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted - names == set(), "every file of the packages is in the appliance's wheel"
    assert set(metadata.get_all("Provides-Extra")) == {"client", "cpu", "cuda", "tracking"}
    asked = [one for one in metadata.get_all("Requires-Dist") if one.endswith('extra == "cpu"')]
    lock = wheels.builds(main.make.PROJECT)["cpu"].read_text()
    pins = re.findall(r"^([\w.-]+)(?:\[.*\])?==([^ ;]+)", lock, re.MULTILINE)
    assert [re.match(r"([\w.-]+)(?:\[.*\])?==([^ ;]+)", one).groups() for one in asked] == pins, "those of the lock"
    assert main.main(["make", str(target), "--key", str(tmp_path / "k"), "--build", "none"]) == 1
    assert "there are cpu, cuda" in capsys.readouterr().err


def test_a_version_is_numbers(tmp_path):
    with pytest.raises(Unusable, match="--version"):
        wheels.copy_sources(main.make.PROJECT, tmp_path, "../../etc")


def test_the_current_release_and_the_one_before_stay(tmp_path):
    releases = Releases(tmp_path)
    for version in ("1", "2", "3"):
        releases.folder(version).mkdir(parents=True)
        releases.add(Release(version, "small", 50, "c", "d", float(version)))
        releases.switch(version)
    with pytest.raises(Refused, match="goes back to"):
        releases.remove("2")
    releases.remove("1")
    assert [one.version for one in releases.all()] == ["2", "3"]
    releases.switch("2", back=True)
    assert (releases.current, releases.before) == ("2", "1"), "not 3: back is no step forward"
    with pytest.raises(Refused, match="not installed"):
        releases.switch("1")


def test_an_appliance_from_a_checkout_has_no_releases(capsys):
    assert main.main(["list"]) == 1
    assert "installed from a checkout" in capsys.readouterr().err


def test_keygen_writes_two_files_and_shows_the_public_one(tmp_path, capsys):
    assert main.main(["--json", "keygen", str(tmp_path / "k")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (tmp_path / "k.pub").read_text().splitlines()[1] == told["key"]
    assert main.main(["keygen", str(tmp_path / "k")]) == 1


def test_a_file_that_is_there_is_not_written_over(made, key):
    with pytest.raises(Refused, match="exists"):
        main.make.write(made, main.make.Parts("1", "small", "c", (), {}, "", {}), key)
