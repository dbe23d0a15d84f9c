"""Starting and stopping a box, with a stand-in for the main process that follows the same protocol."""

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from appliance.cli.command import Session
from appliance.cli.commands import box as up
from tests.unit.cli.conftest import no_environment, run, write_box_file  # noqa: F401

PYTHON = sys.executable  # before a fixture replaces it
# Called as `python -m appliance.boot.main up --config FILE`, like the real process, and writes the same box.json.
# `script.json` in the data directory sets its behaviour.
STAND_IN = """\
import json, os, signal, sys, time
config = json.load(open(sys.argv[sys.argv.index("--config") + 1]))
folder = config["box"]["data_dir"]
script = json.load(open(os.path.join(folder, "script.json")))
def write(**fields):
    with open(os.path.join(folder, "box.new"), "w") as out:
        json.dump(fields, out)
    os.replace(os.path.join(folder, "box.new"), os.path.join(folder, "box.json"))
def stop(*_):
    write(state="stopped", pid=None, message=script.get("note", ""))
    os._exit(0)
signal.signal(signal.SIGTERM, stop if not script.get("deaf") else signal.SIG_IGN)
write(state="starting", pid=os.getpid(), message="starting Ray", url="", cwd=os.getcwd())
print("12:00:00 starting Ray", file=sys.stderr, flush=True)
if "exit" in script:
    sys.exit(script["exit"])
url = f"http://127.0.0.1:{config['box']['port']}"
ready = {"state": "ready", "message": "ready", "url": url, "first_key_file": script.get("key_file")}
write(**ready, pid=os.getpid(), cwd=os.getcwd(), config=config)
time.sleep(60)
"""


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory with a stand-in for `python -m appliance.boot.main`, removed after the test."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{PYTHON} -I\n{STAND_IN}")
    stand_in.chmod(0o755)
    monkeypatch.setattr(up.sys, "executable", str(stand_in))
    folder = tmp_path / "box"
    folder.mkdir()
    (folder / "script.json").write_text("{}")
    (folder / "appliance.toml").touch()
    yield folder
    state = folder / "box.json"
    pid = json.loads(state.read_text()).get("pid") if state.exists() else None
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def script(data_dir: Path, **settings) -> None:
    (data_dir / "script.json").write_text(json.dumps(settings))


def box_file(data_dir: Path) -> dict:
    return json.loads((data_dir / "box.json").read_text())


def test_up_detached_then_down_stops_box(data_dir):
    file = data_dir / "first-key"
    file.write_text("sk-first\n")
    script(data_dir, key_file=str(file))
    started = run("up", "--detach", "--data-dir", str(data_dir), "--port", "9123", "--devices", "4")
    assert started.exit_code == 0, started.stderr
    assert "http://127.0.0.1:9123/v1" in started.stdout and str(file) in started.stdout
    assert f"appliance down --data-dir {data_dir}" in started.stdout, "without the option it stops another box"
    assert "sk-first" not in started.stdout + started.stderr, "without a terminal it may be a journal"
    box = box_file(data_dir)
    assert box["config"]["box"]["port"] == 9123 and box["config"]["box"]["devices"] == 4
    assert box["cwd"] == str(data_dir), "a folder called `train` where the command was typed must not be imported"
    assert "starting Ray" in (data_dir / "logs" / "main.log").read_text()
    assert os.getsid(box["pid"]) == box["pid"], "it outlives the terminal"

    again = run("up", "--detach", "--data-dir", str(data_dir))
    assert again.exit_code == 5 and f"already (ready, http://127.0.0.1:9123, pid {box['pid']}" in again.stderr
    assert f"`appliance down --data-dir {data_dir}` stops it" in again.stderr

    stopped = run("down", "--data-dir", str(data_dir))
    assert (stopped.exit_code, stopped.stderr) == (0, "")
    assert "has stopped" in stopped.stdout
    assert not Path(f"/proc/{box['pid']}").exists() or "Z" in Path(f"/proc/{box['pid']}/stat").read_text().split()[2]


def test_copied_directory_is_not_taken_for_running_box(data_dir, tmp_path):
    assert run("up", "--detach", "--data-dir", str(data_dir)).exit_code == 0
    pid = box_file(data_dir)["pid"]
    copy = tmp_path / "copy"
    shutil.copytree(data_dir, copy)
    assert "no box runs" in run("down", "--data-dir", str(copy)).stdout
    assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, "the other box runs on"
    started = run("up", "--detach", "--data-dir", str(copy))
    assert started.exit_code == 0, started.stderr
    assert box_file(copy)["pid"] != pid
    run("down", "--data-dir", str(copy))
    run("down", "--data-dir", str(data_dir))


def test_up_reports_failed_start(data_dir):
    script(data_dir, exit=1)
    failed = run("up", "--detach", "--data-dir", str(data_dir))
    assert failed.exit_code == 1 and "starting Ray" in failed.stderr and "main.log" in failed.stderr
    script(data_dir, exit=5)
    assert run("up", "--detach", "--data-dir", str(data_dir)).exit_code == 5


def test_up_with_impossible_folder_prints_one_line():
    failed = run("up", "--detach", "--data-dir", "/proc/none")
    assert failed.exit_code == 1 and failed.stderr.startswith("error: /proc/none") and failed.stderr.count("\n") == 1


def test_up_with_bad_settings_starts_nothing(data_dir, tmp_path):
    config = tmp_path / "box.toml"
    config.write_text("[box]\nprot = 8000\n")
    wrong = run("up", "--config", str(config), "--data-dir", str(data_dir))
    assert wrong.exit_code == 2
    assert f"{config}: unknown key box.prot; did you mean port?" in wrong.stderr
    assert run("up", "--devices", "many", "--data-dir", str(data_dir)).exit_code == 2
    assert run("up", "--config", str(tmp_path / "none.toml")).exit_code == 2
    assert not (data_dir / "box.json").exists()


def test_down_without_running_box_is_harmless(tmp_path):
    nothing = run("down", "--data-dir", str(tmp_path / "none"))
    assert nothing.exit_code == 0 and "no box runs on" in nothing.stdout
    # Another process has the pid now.
    write_box_file(tmp_path / "stale", pid=os.getpid(), state="ready")
    assert "no box runs on" in run("down", "--data-dir", str(tmp_path / "stale")).stdout


def test_down_times_out_and_force_kills_box(data_dir):
    script(data_dir, deaf=True)
    run("up", "-d", "--data-dir", str(data_dir))
    pid = box_file(data_dir)["pid"]
    slow = run("down", "--data-dir", str(data_dir), "--timeout", "0.2")
    assert slow.exit_code == 124 and "--force" in slow.stderr
    killed = run("down", "--data-dir", str(data_dir), "--force")
    assert killed.exit_code == 0 and "was killed" in killed.stdout
    assert not up.BoxFile.read(data_dir).pid, f"{pid} is gone"


def test_up_in_foreground_becomes_main_process(data_dir, monkeypatch):
    became: list[str] = []
    monkeypatch.setattr(os, "chdir", lambda folder: None)
    monkeypatch.setattr(os, "execv", lambda program, arguments: became.extend(arguments) or sys.exit(0))
    assert run("up", "--data-dir", str(data_dir), "--port", "9123", "-o", "json").exit_code == 0
    assert became[-4:] == ["--config", str(data_dir / "config.json"), "--show", "json"]
    assert json.loads((data_dir / "config.json").read_text())["box"]["port"] == 9123


def test_show_ready_prints_key_file_not_key(tmp_path, capsys):
    file = tmp_path / "first-key"
    file.write_text("sk-first\n")
    box = up.BoxFile(tmp_path, {"url": "http://127.0.0.1:9", "first_key_file": str(file)})
    up.show_ready(Session(None, False), box, detached=False)
    shown = capsys.readouterr().out
    assert str(file) in shown and "Ctrl-C" in shown and "sk-first" not in shown, "under systemd it is a journal"


def test_up_refuses_world_writable_directory(data_dir: Path):
    """Others may have put files in it: a Ray token that they know, or a replaced program."""
    data_dir.chmod(0o777)
    done = run("up", "--detach", "--data-dir", str(data_dir))
    assert done.exit_code == 1 and "chmod o-w" in done.stderr
    assert not (data_dir / "box.json").exists() and data_dir.stat().st_mode & 0o777 == 0o777


def test_up_refuses_directory_without_box(data_dir: Path):
    (data_dir / "appliance.toml").unlink()
    data_dir.chmod(0o755)
    done = run("up", "--detach", "--data-dir", str(data_dir))
    assert done.exit_code == 1 and "not a box's" in done.stderr
    assert data_dir.stat().st_mode & 0o777 == 0o755
