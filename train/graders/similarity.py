"""The metrics of `text_similarity` graders: the similarity of two texts, from 0 to 1.

Words are runs of letters and digits; each Chinese, Japanese or Korean character is a word. BLEU (Papineni et al., 2002;
smoothed by method 1 of Chen and Cherry, 2014, since a single sentence often shares no 4-gram), GLEU (Wu et al., 2016)
and METEOR (Banerjee and Lavie, 2005) come from nltk; METEOR matches words and their stems, but not synonyms, which need
WordNet. ROUGE (Lin, 2004) is the F-measure of n-grams, or of the longest common subsequence. `fuzzy_match` is
RapidFuzz's `ratio`.
"""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
METRICS = {
    "fuzzy_match": 200_000,
    "bleu": 20_000,
    "gleu": 20_000,
    "meteor": 1_000,
    **{f"rouge_{n}": 20_000 for n in (*range(1, 6), "l")},
}
"""The number of words (for `fuzzy_match`, of characters) of each text that a metric reads; longer texts are cut. The
time of METEOR and `fuzzy_match` grows with the product of both lengths."""


def similarity(metric: str, text: str, reference: str) -> tuple[float, bool]:
    """Return the similarity, and whether a text was cut. Raises KeyError for a metric that is not in METRICS."""
    most, by_words = METRICS[metric], metric != "fuzzy_match"
    answer, expected = (_WORD.findall(whole.lower()) if by_words else whole for whole in (text, reference))
    cut = max(len(answer), len(expected)) > most
    answer, expected = answer[:most], expected[:most]
    if by_words and not (answer and expected):
        return float(answer == expected), cut
    return min(1.0, max(0.0, float(_measure(metric, answer, expected)))), cut


def _measure(metric: str, answer: Any, expected: Any) -> float:
    """Compare two texts, or two lists of words. Imports libraries late, since few graders need them."""
    match metric:
        case "fuzzy_match":
            from rapidfuzz import fuzz

            return fuzz.ratio(answer, expected) / 100
        case "bleu":
            from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

            return sentence_bleu([expected], answer, smoothing_function=SmoothingFunction().method1)
        case "gleu":
            from nltk.translate.gleu_score import sentence_gleu

            return sentence_gleu([expected], answer)
        case "meteor":
            from nltk.translate.meteor_score import single_meteor_score

            return single_meteor_score(expected, answer, wordnet=SimpleNamespace(synsets=lambda word: []))
        case "rouge_l":
            from rapidfuzz.distance import LCSseq

            common, total = LCSseq.similarity(answer, expected), len(answer) + len(expected)
        case _:
            ours, theirs = (_grams(words, int(metric[-1])) for words in (answer, expected))
            common, total = (ours & theirs).total(), ours.total() + theirs.total()
    return 2 * common / total if common else 0.0


def _grams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[place : place + n]) for place in range(len(words) - n + 1))
