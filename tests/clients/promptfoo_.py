"""https://www.promptfoo.dev/docs/providers/openai/: `openai:chat:MODEL` with apiBaseUrl; the key by variable."""

import json
import os
import pathlib
import subprocess
import tempfile

from report import BASE_URL, CITY_SCHEMA, MODEL, QUESTION, tried

folder = pathlib.Path(tempfile.mkdtemp())
os.environ |= {"PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1", "PROMPTFOO_CONFIG_DIR": str(folder)}


def evaluate(kind, check, **config):
    provider = {"id": f"openai:{kind}:{MODEL}", "config": {"apiBaseUrl": BASE_URL, **config}}
    asked = {"prompts": [QUESTION], "providers": [provider], "tests": [{"assert": [check]}]}
    (folder / "promptfooconfig.json").write_text(json.dumps(asked))
    command = ["promptfoo", "eval", "-c", "promptfooconfig.json", "-o", "out.json", "--no-cache", "--no-progress-bar"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    (row,) = json.loads((folder / "out.json").read_text())["results"]["results"]
    assert row["success"], (row.get("error") or done.stdout)[-600:]


ANYTHING = {"type": "javascript", "value": "output.length > 0"}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY_SCHEMA}}


def plain():
    evaluate("chat", ANYTHING, max_tokens=8)


def tools():
    evaluate("chat", {"type": "is-valid-openai-tools-call"}, max_tokens=64, tools=[WEATHER], tool_choice="required")


def schema():
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA, "strict": True}}
    evaluate("chat", {"type": "is-json", "value": CITY_SCHEMA}, max_tokens=40, response_format=form)


def responses():
    evaluate("responses", ANYTHING, max_output_tokens=16)


tried(plain, tools, schema, responses)
