"""Import of adapters in peft's format: accepted files, and refusals that name the faulty file or setting."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from appliance.models.errors import AdapterRefused, HubDisallowed, SourceNotFound
from appliance.models.library import ModelLibrary
from tests.unit.models import checkpoints
from tests.unit.models.checkpoints import HIDDEN
from weights.checkpoint.folder import CheckpointRefused, NotACheckpoint, PickleRefused
from weights.format.manifest import Manifest

MODULE = "base_model.model.model.layers.0.mlp.up_proj"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "org/source", "bias": "none"}


def factors(module: str = MODULE, rank: int = 4, inner: int = HIDDEN, outer: int = 16) -> dict[str, np.ndarray]:
    return {
        f"{module}.lora_A.weight": np.ones((rank, inner), np.float32),
        f"{module}.lora_B.weight": np.ones((outer, rank), np.float32),
    }


def write(directory: Path, tensors: dict[str, np.ndarray] | None = None, **config) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(factors() if tensors is None else tensors, directory / "adapter_model.safetensors")
    return directory


@pytest.fixture
def take(library: ModelLibrary, tmp_path: Path):
    base = library.import_model(checkpoints.write(tmp_path / "source"))

    def take(directory: Path, rank_limit: int = 32):
        named = {"base": "source", "base_version": "v1", "base_path": base.path, "rank_limit": rank_limit}
        return library.import_adapter(str(directory), name="mine", **named)

    return take


def test_find_adapter_detects_adapter_files_and_base(library, tmp_path):
    directory = write(tmp_path / "my lora")
    assert library.find_adapter(str(directory)) == ("my-lora", "org/source", None)
    assert library.find_adapter(str(directory), name="x") == ("x", "org/source", None)
    assert library.find_adapter(str(checkpoints.write(tmp_path / "whole"))) is None
    with pytest.raises(HubDisallowed):
        library.find_adapter("org/some-hub-id")
    with pytest.raises(SourceNotFound, match="revision"):
        library.find_adapter(str(directory), revision="v1")
    with pytest.raises(NotACheckpoint, match="together with its base"):
        library.import_model(directory)


def test_import_adapter_seals_version_without_pickles_and_tokenizer(take, tmp_path):
    directory = write(tmp_path / "a")
    for name in ("tokenizer.json", "optimizer.pt", "adapter_model.bin"):
        (directory / name).write_text("{}")
    taken = take(directory)
    assert sorted(path.name for path in taken.path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]
    manifest = Manifest.read(taken.path)
    assert manifest.name == ("adapter", "mine", "v1")
    # Engines compare this base and version with the base they serve (serve.vllm.adapters).
    assert (manifest.meta["base"], manifest.meta["base_version"]) == ("source", "v1")
    assert taken.info["adapter"] == {"rank": 4, "trained_on": "org/source"}
    assert taken.params == 4 * (HIDDEN + 16)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"r": 0}, "at least 1"),
        ({"r": 64}, "rank 64.*at most 32.*adapter_max_rank"),
        ({"rank_pattern": {"up_proj": 64}}, "rank 64"),
        ({"rank_pattern": {"(?:(.)|(.)){30}[A-Z]": 4}}, "rank_pattern is"),
        ({"alpha_pattern": {"up_proj": "4"}}, "alpha_pattern is"),
    ],
)
def test_import_adapter_rejects_kinds_unsupported_by_engines(take, tmp_path, config, words):
    with pytest.raises(AdapterRefused, match=words):
        take(write(tmp_path / "a", **config))
    assert not list((tmp_path / "models").glob("mine/*")) and not list((tmp_path / "models/.staging").iterdir())


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (factors(outer=24), "16. If it is an adapter of another model"),
        (factors(MODULE.replace("layers.0", "layers.7")), "has no layer model.layers.7"),
        (factors("base_model.model.lm_head"), "not on lm_head"),
        (factors("model.layers.0.mlp.up_proj"), "is not a factor"),
        (factors() | {"base_model.model.model.embed_tokens.weight": np.ones((2, 2), np.float32)}, "embed_tokens"),
        (dict(list(factors().items())[:1]), "other factor"),
        ({}, "no factors"),
        (factors(rank=48), "rank 48"),
    ],
)
def test_import_adapter_rejects_factors_that_do_not_fit_base(take, tmp_path, tensors, words):
    with pytest.raises(AdapterRefused, match=words):
        take(write(tmp_path / "a", tensors))


def test_import_adapter_rejects_non_finite_factors(take, tmp_path):
    broken = factors()
    broken[f"{MODULE}.lora_B.weight"][2, 1] = np.nan
    with pytest.raises(NotACheckpoint) as refused:
        take(write(tmp_path / "adapter", broken))
    assert refused.value.file == f"{MODULE}.lora_B.weight"


def test_import_adapter_rejects_pickles_missing_weights_and_zero_rank(take, tmp_path):
    pickled = write(tmp_path / "p")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(PickleRefused, match="adapter_model.bin"):
        take(pickled)
    (pickled / "adapter_model.bin").unlink()
    with pytest.raises(NotACheckpoint, match="adapter_model.safetensors"):
        take(pickled)
    with pytest.raises(AdapterRefused, match="take no adapters"):
        take(write(tmp_path / "a"), rank_limit=0)
    broken = write(tmp_path / "b")
    (broken / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointRefused, match="adapter_config.json"):
        take(broken)


def test_find_adapter_accepts_folder_with_base_config(library, take, tmp_path):
    directory = write(tmp_path / "lora-out")
    checkpoints.write(directory, template="{{ messages[0].content }}")
    (directory / "model.safetensors").unlink()
    assert library.find_adapter(str(directory)) == ("lora-out", "org/source", None)
    taken = take(directory)
    assert {path.name for path in taken.path.glob("*.json")} == {"adapter_config.json", "manifest.json"}
    assert len(taken.warnings) == 1, "its own chat template stays behind"


def test_import_model_ignores_adapter_in_same_folder(library, tmp_path):
    directory = checkpoints.write(write(tmp_path / "merged"))
    assert library.find_adapter(str(directory)) is None
    taken = library.import_model(directory)
    assert not (taken.path / "adapter_config.json").exists() and len(taken.warnings) == 1


def test_import_model_rejects_adapter_weights_without_config(library, tmp_path):
    directory = write(tmp_path / "lora-out")
    checkpoints.write(directory)
    for name in ("model.safetensors", "adapter_config.json"):
        (directory / name).unlink()
    with pytest.raises(NotACheckpoint) as refused:
        library.import_model(directory)
    assert refused.value.file == "adapter_model.safetensors"
