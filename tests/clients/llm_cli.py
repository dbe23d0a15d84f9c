"""https://llm.datasette.io/en/stable/other-models.html#openai-compatible-models: an entry in
extra-openai-models.yaml."""

import json
import os
import pathlib
import subprocess
import tempfile

from report import BASE_URL, CITY_SCHEMA, KEY, MODEL, QUESTION, tried

folder = pathlib.Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(folder)
ROW = f"""
- model_id: box
  model_name: {MODEL}
  api_base: {BASE_URL}
  api_key_name: box
  supports_tools: true
  supports_schema: true
"""
(folder / "extra-openai-models.yaml").write_text(ROW)
(folder / "keys.json").write_text(json.dumps({"box": KEY}))


def llm(*arguments):
    done = subprocess.run(["llm", *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-400:]
    return done.stdout


def plain():
    assert llm("-m", "box", "--no-stream", "-o", "max_tokens", "10", QUESTION).strip()


def stream():
    assert llm("-m", "box", "-o", "max_tokens", "10", QUESTION).strip()


def schema():
    asked = llm("-m", "box", "--schema", json.dumps(CITY_SCHEMA), "-o", "max_tokens", "40", QUESTION)
    assert json.loads(asked)["city"]


def tools():
    assert llm("-m", "box", "-T", "llm_version", "-o", "max_tokens", "10", QUESTION) is not None


tried(plain, stream, tools, schema)
