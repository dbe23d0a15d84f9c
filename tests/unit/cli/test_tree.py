"""The tree of commands, frozen: what is here is what scripts and documents may rely on. And its help is quick."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import metadata

import pytest
import typer.main

from appliance.cli.main import COMMANDS, SINGLE_COMMANDS, app
from tests.unit.cli.conftest import run
from train.methods.methods import METHODS

# A method brings its options into the tree: the promise is that all of them are there.
METHOD = ["--method", *{f"--{option.name}".replace("_", "-") for m in METHODS.values() for option in m.options}]
BOX = ["--api-key", "--data-dir", "--help", "--output", "--url"]
FROZEN = {
    "init": ["--data-dir", "--force", "--help", "--output", "--template", "FILE"],
    "up": ["--config", "--data-dir", "--detach", "--devices", "--help", "--host", "--output", "--port"],
    "join": ["--data-dir", "--devices", "--help", "INVITATION"],
    "down": ["--data-dir", "--force", "--help", "--timeout"],
    "status": [*BOX, "--every", "--watch"],
    "top": [*BOX, "--every", "--once"],
    "usage": [*BOX, "--by", "--since"],
    "power": [*BOX, "--since"],
    "forget": [*BOX, "--cancel", "--models", "--owner", "--yes"],
    "doctor": ["--all", "--config", "--data-dir", "--help", "--output"],
    "support bundle": ["--config", "--data-dir", "--help", "--hours", "--output", "--to"],
    "backup make": ["--config", "--data-dir", "--help", "--keep", "--output", "PLACE"],
    "backup list": ["--config", "--data-dir", "--help", "--output", "PLACE"],
    "restore": ["--config", "--data-dir", "--help", "--name", "--output", "PLACE"],
    "audit": [*BOX, "--limit"],
    "chat": [*BOX, "--max-tokens", "--system", "--temperature", "MODEL", "PROMPT"],
    "node invite": ["--data-dir", "--help", "ADDRESS", "NODE"],
    "node list": [*BOX],
    "node remove": ["--data-dir", "--help", "--output", "NODE"],
    "gpu list": [*BOX, "--every", "--watch"],
    "gpu drain": [*BOX, "--reason", "--timeout", "--wait", "DEVICE"],
    "gpu forget": [*BOX, "NODE"],
    "gpu undrain": [*BOX, "DEVICE"],
    "model deploy": [
        *BOX,
        "--chat-template",
        "--draft",
        "--dtype",
        "--engine-arg",
        "--gpu-memory",
        "--kv-cache-bytes",
        "--kv-cache-dtype",
        "--max-model-len",
        "--max-num-seqs",
        "--max-tokens",
        "--min-p",
        "--reasoning-parser",
        "--repetition-penalty",
        "--settings",
        "--system-prompt",
        "--temperature",
        "--tool-parser",
        "--top-k",
        "--top-p",
        "--idle-sleep-s",
        "--max-replicas",
        "--min-replicas",
        "--pin",
        "--tensor-parallel",
        "--tpot-p95-ms",
        "--ttft-p95-s",
        "MODEL",
    ],
    "mode show": [*BOX, "--every", "--watch"],
    "mode set": [*BOX, "--floor", "--timeout", "--train", "--wait", "POLICY"],
    "mode plan": [*BOX, "--dry-run", "--floor", "--train", "POLICY"],
    "mode schedule add": [*BOX, "--floor", "--for", "--train", "--tz", "--until", "CRON", "MODE"],
    "mode schedule list": BOX,
    "mode schedule remove": [*BOX, "WINDOW"],
    "mode schedule preview": [*BOX, "--hours"],
    "mode history": [*BOX, "--limit", "HANDOVER"],
    "model import": [*BOX, "--base", "--name", "--revision", "--timeout", "--wait", "SOURCE"],
    "model catalog": ["--help", "--output"],
    "model list": [*BOX, "--every", "--watch"],
    "model show": [*BOX, "MODEL"],
    "model rm": [*BOX, "MODEL"],
    "model verify": [*BOX, "--timeout", "--wait", "MODEL"],
    "model canary": [*BOX, "--auto", "--for", "--min-requests", "--share", "MODEL", "VERSION"],
    "model promote": [*BOX, "MODEL"],
    "model rollback": [*BOX, "--version", "MODEL"],
    "model share": [*BOX, "--stop", "--with", "MODEL"],
    "model pin": [*BOX, "--off", "MODEL", "VERSION"],
    "tier list": [*BOX, "--every", "--watch"],
    "tier verify": [*BOX, "--timeout", "--wait"],
    "job submit": [
        *BOX,
        "--activate",
        *METHOD,
        "--batch-size",
        "--deadline",
        "--epochs",
        "--file",
        "--full",
        "--gate",
        "--grader",
        "--hold",
        "--learning-rate-multiplier",
        "--lora-rank",
        "--max-devices",
        "--max-length",
        "--metadata",
        "--min-devices",
        "--model",
        "--pass-rate-at-least",
        "--preemptible",
        "--priority",
        "--publish",
        "--publish-as",
        "--response-format",
        "--seed",
        "--set",
        "--sizes",
        "--suffix",
        "--teacher",
        "--tensor-parallel",
        "--validation-file",
        "--wait",
        "--zero-stage",
    ],
    "job queue": [*BOX, "--every", "--watch"],
    "job update": [
        *BOX,
        "--deadline",
        "--max-devices",
        "--min-devices",
        "--preemptible",
        "--priority",
        "--sizes",
        "JOB_ID",
    ],
    "job hold": [*BOX, "JOB_IDS"],
    "job release": [*BOX, "JOB_IDS"],
    "job list": [*BOX, "--every", "--limit", "--watch"],
    "job get": [*BOX, "--every", "--watch", "JOB_ID"],
    "job logs": [*BOX, "--follow", "JOB_ID"],
    "job wait": [*BOX, "--timeout", "JOB_ID"],
    "job pause": [*BOX, "JOB_IDS"],
    "job resume": [*BOX, "JOB_IDS"],
    "job cancel": [*BOX, "JOB_IDS"],
    "job tensorboard": ["--data-dir", "--help", "--port", "JOB_IDS"],
    "profile engine": [*BOX, "--steps", "MODEL"],
    "profile job": [*BOX, "--steps", "--timeout", "JOB_ID"],
    "plan serve": [*BOX, "--accelerator", "--config", "--devices", "--replicas", "--tensor-parallel", "MODEL"],
    "plan job": [
        *BOX,
        *METHOD,
        "--accelerator",
        "--batch-size",
        "--config",
        "--device-kind",  # the old name of --accelerator, which warns
        "--devices",
        "--epochs",
        "--examples",
        "--file",
        "--full",
        "--learning-rate-multiplier",
        "--lora-rank",
        "--max-length",
        "--model",
        "--set",
        "--tensor-parallel",
        "--zero-stage",
    ],
    "eval run": [
        *BOX,
        "--eval",
        "--grader",
        "--max-tokens",
        "--seed",
        "--suite",
        "--temperature",
        "--timeout",
        "--wait",
        "MODELS",
    ],
    "eval list": BOX,
    "eval show": [*BOX, "--items", "EVAL_ID"],
    "batch create": [*BOX, "--endpoint", "--timeout", "--wait", "PATH"],
    "batch list": BOX,
    "batch show": [*BOX, "BATCH_ID"],
    "batch cancel": [*BOX, "BATCH_ID"],
    "file upload": [*BOX, "--purpose", "PATH"],
    "file list": [*BOX, "--purpose"],
    "file get": [*BOX, "--errors", "--lineage", "--report", "--save", "FILE_ID"],
    "file rm": [*BOX, "FILE_IDS"],
    "file check": [
        *BOX,
        "--against",
        "--at-most",
        "--max-tokens",
        "--method",
        "--model",
        "TARGET",
    ],
    "file prepare": [
        *BOX,
        "--decontaminate",
        "--dedup",
        "--drop-bad",
        "--drop-empty",
        "--drop-too-long",
        "--mask-pii",
        "--max-tokens",
        "--method",
        "--model",
        "--near-dedup",
        "--out",
        "--split",
        "TARGET",
    ],
    "key create": [
        *BOX,
        "--bound",
        "--expires",
        "--max-deadlines",
        "--max-held",
        "--max-non-preemptible",
        "--max-priority",
        "--model",
        "--name",
        "--owner",
        "--requests-per-minute",
        "--scope",
        "--tokens-per-day",
        "--tokens-per-minute",
        "--tokens-per-month",
    ],
    "key limit": [
        *BOX,
        "--bound",
        "--expires",
        "--lift",
        "--max-deadlines",
        "--max-held",
        "--max-non-preemptible",
        "--max-priority",
        "--model",
        "--requests-per-minute",
        "--tokens-per-day",
        "--tokens-per-minute",
        "--tokens-per-month",
        "KEY",
    ],
    "key list": [*BOX, "--all"],
    "key revoke": [*BOX, "KEY"],
    "key rotate": [*BOX, "KEY"],
}


def is_command(words: str) -> bool:
    """Whether `appliance WORDS` is a command, and no group of them, with options that it has."""
    told = words.split()
    name = next((" ".join(told[:n]) for n in (3, 2, 1) if " ".join(told[:n]) in FROZEN), None)
    return name is not None and {word for word in told if word.startswith("--")} <= set(FROZEN[name])


def commands() -> dict:
    """Full name -> command, of every command there is."""
    root = typer.main.get_group(app)

    def below(name: str, command) -> dict:
        subs = getattr(command, "commands", None)
        if not subs:
            return {name: command}
        return {full: c for sub, one in subs.items() for full, c in below(f"{name} {sub}", one).items()}

    return {full: c for name in COMMANDS for full, c in below(name, root.get_command(None, name)).items()}


def test_the_tree_is_as_promised():
    shown = {}
    for name, command in commands().items():
        options = [o for p in command.params if p.param_type_name == "option" for o in p.opts if o.startswith("--")]
        arguments = [p.name.upper() for p in command.params if p.param_type_name == "argument"]
        shown[name] = sorted({*options, *arguments, "--help"})
    assert shown == {name: sorted(options) for name, options in FROZEN.items()}


def test_no_command_of_a_module_is_missing_from_the_tree():
    """`join` once was: written, documented, and not to be called."""
    for module in {module for module, _ in COMMANDS.values()}:
        own = typer.main.get_group(importlib.import_module(f"appliance.cli.{module}").app)
        named = {name for name, (where, _) in COMMANDS.items() if where == module}
        # A module is the commands of its name, or the commands themselves.
        assert named == {module.rpartition(".")[2]} or named == set(own.commands), module


def test_short_forms():
    short = {
        name: sorted(o for p in command.params for o in p.opts if len(o) == 2) for name, command in commands().items()
    }
    assert short["job logs"] == ["-f", "-o"] and short["status"] == ["-o", "-w"] and short["up"] == ["-d", "-o"]


def test_the_command_says_which_release_it_is_of():
    assert run("--version").stdout == f"appliance {metadata.version('appliance')}\n"


@pytest.mark.parametrize("name", FROZEN)
def test_every_help_says_what_and_shows_examples(name):
    result = run(*name.split(), "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout and f"appliance {name}" in result.stdout.split("Examples:")[1]


def test_the_overview_tells_the_truth():
    """The root's list of commands stands in a table, so that showing it loads none of them."""
    root = typer.main.get_group(app)
    for name, (_, text) in COMMANDS.items():
        assert root.get_command(None, name).help.splitlines()[0].startswith(text.removesuffix(".")), name
    groups = {name for name in COMMANDS if getattr(root.get_command(None, name), "commands", None)}
    assert groups == set(COMMANDS) - set(SINGLE_COMMANDS)


HEAVY = ("torch", "vllm", "ray", "openai", "fastapi", "deepspeed", "transformers", "numpy", "pydantic", "rich", "httpx")


@pytest.mark.parametrize("arguments", [["--help"], ["job", "submit", "--help"], ["up", "--help"], ["mode", "-h"]])
def test_help_imports_nothing_heavy(arguments):
    program = (
        "import sys\nfrom appliance.cli.main import run\n"
        "try: run()\nexcept SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "appliance.cli.main" in loaded
    assert not loaded.intersection(HEAVY) and "appliance.config" not in loaded
    # A generous bound on how much is loaded stands in for the time, which on a busy machine says little.
    assert len(loaded) < 290, sorted(loaded)


def test_commands_import_neither_ray_nor_torch():
    names = [f"appliance.cli.{module}" for module in ("client", "locate", "box.up", *{m for m, _ in COMMANDS.values()})]
    program = f"import sys, {', '.join(names)}, rich.table\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()).intersection(
        ("torch", "vllm", "ray", "openai", "fastapi", "deepspeed", "numpy")
    )


def test_completion_knows_commands_and_asks_the_box_for_names(box):
    completing = {"_APPLIANCE_COMPLETE": "complete_bash", "COMP_WORDS": "appliance mo", "COMP_CWORD": "1"}
    from typer.testing import CliRunner

    assert CliRunner().invoke(app, env=completing, prog_name="appliance").stdout.split() == ["mode", "model"]
    completing = {
        "_APPLIANCE_COMPLETE": "complete_bash",
        "COMP_WORDS": "appliance model show st",
        "COMP_CWORD": "3",
        "APPLIANCE_DATA_DIR": str(box.data_dir),
    }
    assert CliRunner().invoke(app, env=completing, prog_name="appliance").stdout.split() == ["starter"]
    completing["APPLIANCE_DATA_DIR"] = "/nonexistent"
    assert CliRunner().invoke(app, env=completing, prog_name="appliance").output.split() == []
