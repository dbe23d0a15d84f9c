"""Measures of how alike two texts are, from 0 to 1: those of `text_similarity` graders.

Words are runs of letters and digits; each Chinese, Japanese or Korean sign is a word, since those scripts write no
spaces. BLEU (Papineni et al., 2002; smoothed by method 1 of Chen and Cherry, 2014, since one sentence often has no
4-gram), GLEU (Wu et al., 2016) and METEOR (Banerjee and Lavie, 2005) are nltk's; METEOR matches words and their stems,
not synonyms, for which WordNet would have to be on the box. ROUGE (Lin, 2004) is the F-measure of n-grams, or of the
longest common subsequence. `fuzzy_match` is RapidFuzz's `ratio`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

MAX_WORDS = 20_000
"""Words that are read of each text; METEOR's cost grows with the product of both, so it takes `MAX_METEOR_WORDS`.
Longer texts are cut."""
MAX_METEOR_WORDS = 1_000
MAX_CHARACTERS = 200_000
"""Of each text for `fuzzy_match`, whose cost grows with the product too."""
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")


def similarity(metric: str, text: str, reference: str) -> tuple[float, bool]:
    """How alike they are, and whether one was cut. Raises KeyError for another metric than those of METRICS."""
    measure, most = METRICS[metric]
    if measure is None:
        from rapidfuzz import fuzz

        cut = max(len(text), len(reference)) > most
        return fuzz.ratio(text[:most], reference[:most]) / 100, cut
    words, expected = _words(text), _words(reference)
    cut = max(len(words), len(expected)) > most
    words, expected = words[:most], expected[:most]
    if not words or not expected:
        return float(words == expected), cut
    return min(1.0, max(0.0, float(measure(words, expected)))), cut


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _bleu(words: Sequence[str], reference: Sequence[str]) -> float:
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    return sentence_bleu([reference], words, smoothing_function=SmoothingFunction().method1)


def _gleu(words: Sequence[str], reference: Sequence[str]) -> float:
    from nltk.translate.gleu_score import sentence_gleu

    return sentence_gleu([reference], words)


class _NoSynonyms:
    def synsets(self, word: str) -> list[object]:
        return []


def _meteor(words: Sequence[str], reference: Sequence[str]) -> float:
    from nltk.translate.meteor_score import single_meteor_score

    return single_meteor_score(reference, words, wordnet=_NoSynonyms())


def _rouge(n: int) -> Callable[[Sequence[str], Sequence[str]], float]:
    def measure(words: Sequence[str], reference: Sequence[str]) -> float:
        grams, expected = _grams(words, n), _grams(reference, n)
        return _f_measure((grams & expected).total(), grams.total(), expected.total())

    return measure


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[place : place + n]) for place in range(len(words) - n + 1))


def _rouge_l(words: Sequence[str], reference: Sequence[str]) -> float:
    from rapidfuzz.distance import LCSseq

    return _f_measure(LCSseq.similarity(words, reference), len(words), len(reference))


def _f_measure(common: int, given: int, expected: int) -> float:
    return 2 * common / (given + expected) if common else 0.0


# Measure of words (None: of the characters of the texts) and the most that it takes of them.
METRICS: dict[str, tuple[Callable[[Sequence[str], Sequence[str]], float] | None, int]] = {
    "fuzzy_match": (None, MAX_CHARACTERS),
    "bleu": (_bleu, MAX_WORDS),
    "gleu": (_gleu, MAX_WORDS),
    "meteor": (_meteor, MAX_METEOR_WORDS),
    **{f"rouge_{n}": (_rouge(n), MAX_WORDS) for n in range(1, 6)},
    "rouge_l": (_rouge_l, MAX_WORDS),
}
