"""What an adapter's config says of single layers is found by their names, whatever stands there."""

from __future__ import annotations

import time

import pytest

from serve.adapters.layer_names import value_for

LAYER = "model.layers.10.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ({}, None),
        ({"q_proj": 8}, 8),
        ({"k_proj": 4, "self_attn.q_proj": 8, "q_proj": 2}, 8),
        ({LAYER: 8}, 8),
        ({"^" + LAYER: 8}, 8),
        ({"^q_proj": 8}, None),
        ({"proj": 8}, None),
        ({"layers.1.self_attn.q_proj": 8}, None),
    ],
)
def test_a_layer_is_found_by_its_name_or_its_last_parts(pattern, found):
    """As peft finds it, whose rule this is (`get_pattern_key`)."""
    assert value_for(pattern, LAYER) == found


def test_no_key_is_taken_for_a_regular_expression():
    """This one kept the engine of a base, and with it all who asked it, in one step for ever."""
    with pytest.raises(ValueError, match="names of layers"):
        value_for({"(?:(.)|(.)|(.)){30}[A-Z]": 8}, LAYER)


def test_many_keys_take_little_time():
    pattern = {f"model.layers.{n}.self_attn.k_proj": 8 for n in range(2048)}
    began_s = time.process_time()
    for _ in range(10):
        assert value_for(pattern, LAYER) is None
    assert time.process_time() - began_s < 0.5, "expressions took ten times as long"
