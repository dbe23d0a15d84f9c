"""Reports of `train.convert.checkpoint_trial` for tests that do not run it."""

from typing import Any

TENSORS: dict[str, Any] = {
    "unchecked": "",
    "rows": 32,
    "head": "lm_head",
    "embedding": "model.embed_tokens",
    "missing": [],
    "unknown": [],
    "shapes": [],
    "unconvertible": [],
    "tied": [],
    "plain": False,
    "renamed": {},
}
TOKENIZER: dict[str, Any] = {
    "added": {"</s>": 2},
    "special": {"eos_token": ["</s>", 2]},
    "beyond": [],
    "begins": False,
    "differs": "",
    "class": "TokenizersBackend",
    "mended": False,
    "generation": "",
}


def found(**changes: Any) -> dict[str, Any]:
    """Return a report whose only findings are `changes`, by keys of TENSORS or TOKENIZER."""
    assert changes.keys() <= TENSORS.keys() | TOKENIZER.keys()
    parts = {"tensors": TENSORS, "tokenizer": TOKENIZER}
    return {name: {key: changes.get(key, value) for key, value in part.items()} for name, part in parts.items()}
