from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.core.errors import FingerprintMismatch
from serve.core.fingerprint import PROMPT_TOKENS, Fingerprint, FingerprintBook, fingerprint_prompt, version_key
from serve.core.model_settings import ModelSettings, rounding
from weights.format.layout import Layout, TensorSpec
from weights.memory.store import WeightStore

ANSWER = {"tokens": list(range(16)), "logprobs": [-float(i) / 4 for i in range(16)]}


def fingerprint(origin="load", **changes):
    return Fingerprint.from_answer(origin, {**ANSWER, **changes})


@given(st.integers(2, 300_000))
def test_the_fingerprint_prompt_stays_inside_every_vocabulary(vocabulary):
    prompt = fingerprint_prompt(vocabulary)
    assert len(prompt) == PROMPT_TOKENS and all(0 <= token < vocabulary for token in prompt)


def test_the_fingerprint_prompt_touches_different_rows_and_never_changes():
    assert len(set(fingerprint_prompt(32000))) == PROMPT_TOKENS
    assert fingerprint_prompt(384)[:4] == [237, 90, 327, 181]


def test_equal_answers_agree_and_rounding_is_forgiven():
    near = fingerprint(logprobs=[value + 0.02 for value in ANSWER["logprobs"]], tokens=[99, *range(1, 16)])
    assert fingerprint().disagreement(fingerprint(), 0.15) is None
    assert fingerprint().disagreement(near, 0.15) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"logprobs": [*ANSWER["logprobs"][:15], -9.0]}, "position 15"),
        ({"tokens": [200] * 16}, "greedy tokens differ"),
        ({"logprobs": [float("nan")] * 16}, "finite"),
        ({"tokens": [1], "logprobs": [-0.1]}, "1 positions"),
    ],
)
def test_other_weights_are_noticed(changes, why):
    assert why in fingerprint().disagreement(fingerprint(**changes), 0.15)


def test_embeddings_are_compared_by_direction():
    one = Fingerprint("load", embedding=(1.0, 0.0, 1.0))
    assert one.disagreement(Fingerprint("load", embedding=(2.0, 0.001, 2.0)), 0.15) is None
    assert "cosine" in one.disagreement(Fingerprint("load", embedding=(0.0, 1.0, 0.0)), 0.15)
    assert "cosine" in one.disagreement(fingerprint(), 0.15)


def verify(book, answer, origin="load"):
    record = book.open("k", what="v", tolerance=0.15)
    return record.keep(record.check({**ANSWER, **answer}, origin))["verdict"]


def test_the_book_records_then_verifies_then_refuses(tmp_path):
    book = FingerprintBook(tmp_path)
    assert book.find("k") is None
    assert verify(book, {}) == "recorded"
    assert verify(book, {}, "transfer") == "verified"
    with pytest.raises(FingerprintMismatch, match="v does not answer"):
        verify(book, {"tokens": [200] * 16}, "transfer")
    assert book.find("k") == fingerprint()
    assert (tmp_path / "fingerprints").stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in (tmp_path / "fingerprints").iterdir()] == [0o600]


def test_a_trusted_load_replaces_what_a_transfer_recorded(tmp_path):
    book = FingerprintBook(tmp_path)
    verify(book, {"tokens": [200] * 16}, "transfer")
    assert verify(book, {}, "load") == "recorded"
    assert book.find("k").origin == "load"
    with pytest.raises(FingerprintMismatch):
        verify(book, {"tokens": [200] * 16}, "load")


def test_nans_are_never_recorded(tmp_path):
    with pytest.raises(FingerprintMismatch, match="finite"):
        verify(FingerprintBook(tmp_path), {"logprobs": [float("nan")] * 16})
    assert FingerprintBook(tmp_path).find("k") is None


def test_a_versions_key_follows_content_and_what_changes_rounding(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    facts = {"dtype": "bfloat16", "kind": "cpu", "tensor_parallel": 1, "task": "generate"}
    key = version_key(tmp_path, **facts)
    assert version_key(tmp_path, **facts) == key
    assert version_key(tmp_path, **{**facts, "tensor_parallel": 2}) != key
    (tmp_path / "model.safetensors").write_bytes(b"abd_")
    assert version_key(tmp_path, **facts) != key


def test_a_version_that_is_loaded_quantised_is_not_held_against_its_own_full_precision(tmp_path):
    """A record of the engines before would keep every engine with such settings from starting."""
    (tmp_path / "config.json").write_text("{}")
    facts = {"dtype": "bfloat16", "kind": "cuda", "tensor_parallel": 1, "task": "generate"}

    def key(**settings):
        arguments = ModelSettings.model_validate(settings).spec_fields()["extra_args"]
        return version_key(tmp_path, **facts, rounding=rounding(arguments))

    plain = version_key(tmp_path, **facts)
    assert plain == key() == key(draft_tokens=4, sampling={"temperature": 0.5}, engine_args={"stream-interval": "2"})
    others = [
        key(kv_cache_dtype="fp8"),
        key(engine_args={"quantization": "fp8"}),
        key(engine_args={"quantization": "nvfp4_per_token"}),
        key(engine_args={"disable-sliding-window": "true"}),
    ]
    assert len({plain, *others}) == 5


def test_sealing_a_stored_version_keeps_its_key(tmp_path):
    facts = {"dtype": "bfloat16", "kind": "cpu", "tensor_parallel": 1, "task": "generate"}
    store = WeightStore(tmp_path / "shm", budget_bytes=None)
    keys = []
    for version in ("1", "2"):
        layout = Layout.plan([TensorSpec("w", "F32", (4,))])
        draft = store.reserve(layout, kind="version", model="m", version=version, aux_files={"config.json": b"{}"})
        draft.view("w")[:] = bytes(16)
        stored = draft.commit(meta={}, checksums=False)
        keys.append(version_key(stored.path, **facts))
        store.seal(stored)
        assert version_key(stored.path, **facts) == keys[-1]
    assert keys[0] != keys[1]
