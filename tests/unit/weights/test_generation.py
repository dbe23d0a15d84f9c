"""generation_config.json in a version: settings that engines can apply, and end tokens."""

import pytest

from weights.checkpoint.generation import settle

CONFIG = {"eos_token_id": 2}


@pytest.mark.parametrize(
    ("given", "stored", "notes"),
    [
        ({"eos_token_id": 2, "temperature": 0.6, "top_p": 0.95, "do_sample": True}, None, 0),
        ({"do_sample": False}, {"do_sample": False, "temperature": 0.0}, 1),
        ({"temperature": 0.0, "top_p": 0.0}, {"do_sample": False, "temperature": 0.0}, 1),
        ({"temperature": 0.7, "top_p": 0, "top_k": 5}, {"do_sample": False, "temperature": 0.0}, 1),
        ({"temperature": 0.7, "top_k": 0}, None, 0),
        ({"top_k": 20.0, "min_p": 0.0}, None, 0),
        ({"max_new_tokens": 8, "max_length": 20}, {"max_length": 20}, 1),
        ({"repetition_penalty": 1.1}, None, 0),
        ({"stop_strings": ["#"], "num_beams": 4, "bad_words_ids": [[5]]}, None, 1),
        ({"stop_strings": None, "num_beams": 1, "min_length": 0, "no_repeat_ngram_size": 0}, None, 0),
        ({"repetition_penalty": 0, "top_p": 1.5, "temperature": -1, "top_k": -7}, {}, 4),
        ({"temperature": "0.7", "top_p": True}, {}, 2),
        ({"temperature": 5.0}, {}, 1),
        ({"eos_token_id": [2, 900]}, {"eos_token_id": 2}, 1),
        ({"eos_token_id": "2"}, {"eos_token_id": None}, 1),
    ],
)
def test_settle_keeps_settings_supported_by_engines(given, stored, notes):
    made, said = settle(given, CONFIG, rows=100)
    assert made == stored and len(said) == notes


def test_settle_adds_end_tokens_to_file_or_config():
    assert settle({"eos_token_id": 2, "top_p": 0.9}, {}, rows=0, ends=[7])[0] == {"eos_token_id": [2, 7], "top_p": 0.9}
    assert settle(None, {"eos_token_id": [2, 3], "bos_token_id": 1}, rows=0, ends=[7])[0] == {
        "eos_token_id": [2, 3, 7],
        "bos_token_id": 1,
    }
    assert settle(None, CONFIG, rows=0) == (None, [])


def test_settle_without_file_reads_sampling_of_config():
    made, said = settle(None, {"eos_token_id": 2, "max_new_tokens": 16, "temperature": 0.5}, rows=0)
    assert made == {"eos_token_id": 2, "temperature": 0.5} and len(said) == 1


def test_settle_keeps_sampling_and_ends_of_unreadable_file():
    made, said = settle({"eos_token_id": 2, "top_p": 0.9, "cache_config": 1}, {}, rows=0, unreadable="ValueError")
    assert made == {"eos_token_id": 2, "top_p": 0.9} and len(said) == 1
