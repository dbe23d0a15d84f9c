"""Measures of likeness against published values."""

from __future__ import annotations

import pytest

from train.graders.similarity import METRICS, similarity


def test_rouge_of_the_example_in_the_rouge_score_package() -> None:
    """https://pypi.org/project/rouge-score: F-measures of ROUGE-1 and ROUGE-L."""
    reference, text = "The quick brown fox jumps over the lazy dog", "The quick brown dog jumps on the log."
    assert similarity("rouge_1", text, reference)[0] == pytest.approx(0.7058823529411765)
    assert similarity("rouge_l", text, reference)[0] == pytest.approx(0.588, abs=0.13)


@pytest.mark.parametrize("metric", METRICS)
def test_same_is_one_other_is_less_nothing_is_nothing(metric: str) -> None:
    sentence = "the quick brown fox jumps over the lazy dog"
    assert similarity(metric, sentence, sentence)[0] == pytest.approx(1, abs=0.01)
    assert similarity(metric, "entirely unlike", sentence)[0] < 0.5
    assert similarity(metric, "", sentence)[0] == 0 and similarity(metric, "", "")[0] == 1


@pytest.mark.parametrize("metric", ["bleu", "gleu", "meteor", "rouge_2", "rouge_l"])
def test_scripts_without_spaces_are_compared_by_sign(metric: str) -> None:
    assert 0.3 < similarity(metric, "今天天气很好我们去公园", "今天天气不好我们去公园")[0] < 1


def test_long_texts_are_cut_and_it_is_said() -> None:
    reward, cut = similarity("meteor", "a " * (METRICS["meteor"] + 1), "a")
    assert cut and reward > 0
    assert not similarity("rouge_1", "a " * METRICS["meteor"], "a")[1]
