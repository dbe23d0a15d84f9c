"""Reports the results of a client's script to the runner: one line of JSON per check.

A script runs in an environment with only its client, so this file imports only the standard library.
"""

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

MODEL = os.environ["MODEL"]
EMBEDDING_MODEL = os.environ.get("EMBEDDING_MODEL", "")
BASE_URL = os.environ["OPENAI_BASE_URL"]
KEY = os.environ["OPENAI_API_KEY"]
QUESTION = "What is the capital of France? Answer in one sentence."
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


def tried(*checks: Callable[[], Any]) -> None:
    """Run each check, named like a column of the table (table.py); an exception is a failure."""
    for check in checks:
        try:
            check()
        except Exception as error:  # noqa: BLE001, whatever a client raises is its verdict
            traceback.print_exc()
            _say(check=check.__name__, failed=f"{type(error).__name__}: {error}"[:600])
        else:
            _say(check=check.__name__, failed="")


def _say(**line: str) -> None:
    print("\n@@" + json.dumps(line), flush=True)
