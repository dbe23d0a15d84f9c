"""Try a checkpoint's chat templates, tokenizer and architecture in separate processes that can be killed.

Libraries read untrusted files only in such processes: modules of the box that set their own limits and print JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from appliance.models.checkpoint import chat_templates
from appliance.models.errors import TemplateRefused, TrialEnded
from appliance.models.template_trial import CPU_S, MEMORY_BYTES, Tried
from runtime.processes.kernel import how_it_ended
from weights.checkpoint.folder import SPECIAL_TOKENS, NotACheckpoint, read_json, read_tokenizer_config
from weights.format.tool_template import with_tools

MAX_TEMPLATE_CHARACTERS = 200_000
TEMPLATE_S, LOAD_S = 30.0, 3600.0
ROLES = frozenset({"bos_token", "eos_token", "unk_token", "pad_token"})


class TrialFailed(Exception):
    """The process ended without a result; the text has how it ended and the end of its stderr."""


def run_trial(
    subject: str,
    module: str,
    *options: str,
    stdin_text: str = "",
    limit_s: float = LOAD_S,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> dict[str, Any]:
    """Run `module`; return the JSON of its last line and pass each earlier line to `on_event`.

    Args:
        subject: the file that a TrialEnded names.
        stdin_text: text for its standard input.

    Raises TrialEnded, TrialFailed.
    """
    quiet = {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command, ends_s, last = [sys.executable, "-P", "-m", module, *options], time.monotonic() + limit_s, ""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **quiet, "RUST_BACKTRACE": "0"},
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        limit = threading.Timer(limit_s, process.kill)
        limit.start()
        try:
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(stdin_text)  # end of input answers no to questions whether to run a model's code
            for line in process.stdout:
                if last:
                    on_event(json.loads(last))
                last = line
            code = process.wait()
        finally:
            limit.cancel()
            process.kill()
        with suppress(ValueError):
            if (result := json.loads(last)).pop("event", "done") == "done":
                return result
        if time.monotonic() >= ends_s:
            raise TrialEnded(subject, f"its check took more than {limit_s:.0f} s: try again")
        if code == -signal.SIGKILL:
            ended = "its check was killed, probably because memory was short: try again"
            raise TrialEnded(subject, ended)
        errors.seek(0)
        text = errors.read().strip()[-1000:]
        raise TrialFailed(how_it_ended(code) + (f": {text}" if text else ""))


def compare(directory: Path, arch: str) -> Mapping[str, Any]:
    """Compare the checkpoint's files with transformers' classes (`train.convert.checkpoint_trial`). Raises
    NotACheckpoint, TrialEnded."""
    try:
        result = run_trial("config.json", "train.convert.checkpoint_trial", str(directory), arch)
    except TrialFailed as error:
        reason = str(error).splitlines()[-1][:300]
        raise NotACheckpoint(
            "config.json",
            f"transformers cannot read its tokenizer, or compare its architecture with the tensors: {reason}",
        ) from error
    if "unfit" in result:
        raise NotACheckpoint("config.json", result["unfit"].replace(f"{directory}/", ""))  # it is temporary
    return result


def try_folder(directory: Path) -> Tried:
    """Try all chat templates; return the result for plain conversations. Raises CheckpointRefused."""
    template, others = chat_templates(directory)
    tried, roles = Tried(), directory / SPECIAL_TOKENS
    named = {**(read_json(roles, SPECIAL_TOKENS) if roles.is_file() else {}), **read_tokenizer_config(directory)}
    texts = {role: token.get("content") if isinstance(token, dict) else token for role, token in named.items()}
    special = {role: text for role, text in texts.items() if role in ROLES and isinstance(text, str)}
    if template is not None:
        tried = try_template(template, special)
        if (rendered := with_tools(template)) != template:  # engines and ranks use this form of the template
            tried = Tried(tried.warning, try_template(str(rendered), special).rendered)
    for other in others:
        try_template(other, special)
    return tried


def try_template(template: str, special: Mapping[str, str] | None = None) -> Tried:
    """Render `template`. special: texts of `bos_token`, `eos_token` and the like.

    Raises TemplateRefused if it does not compile or exceeds a limit on time, memory or output.
    """
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise TemplateRefused(
            "chat template", f"{len(template)} characters long; at most {MAX_TEMPLATE_CHARACTERS} are accepted"
        )
    text = json.dumps({"template": template, "special": dict(special or {})})
    try:
        result = run_trial("chat template", "appliance.models.template_trial", stdin_text=text, limit_s=TEMPLATE_S)
    except TrialFailed as error:
        raise TemplateRefused(
            "chat template",
            f"rendering short conversations took more than {CPU_S} s of CPU or {MEMORY_BYTES >> 20} MB of memory",
        ) from error
    if "refused" in result:
        raise TemplateRefused("chat template", result["refused"])
    return Tried(**result)
