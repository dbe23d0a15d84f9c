"""Any bytes at all: a named refusal, or a file that the safetensors library loads as well."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from weights.format.errors import IntegrityError
from weights.format.layout import DTYPE_BITS, Layout, TensorSpec

odd_numbers = st.one_of(
    st.integers(-2, 40), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 1.5, float("nan"), True, None, "8"])
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "f32", "", None, 3]),
        "shape": st.one_of(st.lists(odd_numbers, max_size=4), odd_numbers),
        "data_offsets": st.one_of(st.lists(odd_numbers, max_size=3), odd_numbers),
    }
)


def judge(raw: bytes) -> bool:
    """Whether the layout accepts `raw`; what it accepts must load in the library."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        path.write_bytes(raw)
        try:
            layout = Layout.read(directory)
        except IntegrityError:
            return False
        with safe_open(path, "numpy") as opened:
            assert set(opened.keys()) == {placed.spec.name for placed in layout}
            for placed in layout:
                assert tuple(opened.get_slice(placed.spec.name).get_shape()) == placed.spec.shape
        return True


@given(st.dictionaries(st.text(max_size=8), entries, max_size=4), st.binary(max_size=64))
def test_random_headers(body, data):
    text = json.dumps(body).encode()
    judge(struct.pack("<Q", len(text)) + text + data)


@given(st.binary(max_size=200))
def test_random_bytes(raw):
    judge(raw)


@given(st.integers(0, 10**6), st.integers(0, 7), st.integers(-3, 3))
def test_mutations_of_a_good_file(position, bit, resize):
    """Flipping a bit, cutting or extending a good file yields a refusal or a file that still loads whole."""
    layout = Layout.plan([TensorSpec("a", "F32", (2, 3)), TensorSpec("b", "BF16", (5,)), TensorSpec("c", "U8", ())])
    header = layout.files[0].header
    raw = bytearray(header + bytes(layout.nbytes - len(header)))
    raw[position % len(header)] ^= 1 << bit
    raw = raw[:resize] if resize < 0 else raw + bytes(resize)
    assert not (judge(bytes(raw)) and resize)
