"""https://aider.chat/docs/llms/openai-compat.html: two variables, and the model with the prefix `openai/`."""

import os
import pathlib
import re
import subprocess
import tempfile

from report import BASE_URL, KEY, MODEL, tried

os.environ |= {"OPENAI_API_BASE": BASE_URL, "OPENAI_API_KEY": KEY}
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "settings.yml").write_text(
    f"- name: openai/{MODEL}\n  edit_format: ask\n  extra_params:\n    max_tokens: 12\n"
)
QUIET = ["--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"]


def ask(*more):
    command = ["aider", "--model", f"openai/{MODEL}", "--model-settings-file", "settings.yml", *QUIET, *more]
    done = subprocess.run(
        [*command, "--message", "Say hello."], cwd=folder, capture_output=True, text=True, timeout=150
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0 and re.search(r"Tokens: \d+ sent, [1-9]\d* received", told), told[-600:]


def plain():
    ask("--no-stream")


def stream():
    ask("--stream")


tried(plain, stream)
