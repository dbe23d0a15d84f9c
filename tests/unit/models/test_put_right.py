"""Import repairs faults in its copy of a checkpoint, or refuses it and names the tensor or token."""

import json

import pytest
from safetensors.numpy import load_file, save_file

from tests.unit.models import checkpoints
from weights.checkpoint.folder import NotACheckpoint, TokenizerRefused
from weights.tiers.copies import verify

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def stored(taken, file):
    return json.loads((taken.path / file).read_bytes())


@pytest.mark.parametrize(
    ("found", "names"),
    [
        ({"unknown": ["model.layers.0.v_head.weight"]}, "model.layers.0.v_head.weight"),
        ({"unknown": ["a.b.lora_A.default.weight"]}, "a.b.lora_A.default.weight"),
        ({"missing": ["model.norm.weight", "b"]}, "model.norm.weight"),
        ({"missing": [HEAD]}, HEAD),
        ({"shapes": [[EMBEDDING, [34, 8], [32, 8]]]}, EMBEDDING),
        ({"unconvertible": ["model.layers.0.mlp.experts.down_proj"]}, "model.layers.0.mlp.experts.down_proj"),
    ],
)
def test_import_rejects_mismatched_tensors_by_name(library, source, tmp_path, compared, found, names):
    compared(**found)
    with pytest.raises(NotACheckpoint) as refused:
        library.import_model(source)
    assert refused.value.file == names and not checkpoints.stored(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_import_rejects_non_finite_tensor_by_name(library, source, compared, value, dtype):
    compared()
    broken = {name: tensor.astype(dtype) for name, tensor in checkpoints.tensors().items()}
    save_file(broken, source / "model.safetensors", metadata={"format": "pt"})
    library.import_model(source, name="finite")
    broken[HEAD][3, 4] = value
    save_file(broken, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotACheckpoint) as refused:
        library.import_model(source)
    assert refused.value.file == HEAD


def test_import_of_unknown_architecture_warns(library, source, compared):
    compared(unchecked="transformers does not know it", unknown=["x"])
    assert len(library.import_model(source).warnings) == 1


def test_import_renames_tensors_with_wrapper_prefix(library, source, compared):
    compared(renamed={EMBEDDING: "embed.weight"})
    taken = library.import_model(source)
    assert "embed.weight" in load_file(taken.path / "model.safetensors") and len(taken.warnings) == 1
    assert verify(taken.path).tensors == len(checkpoints.tensors())


def test_import_unties_embeddings_if_head_differs(library, source, compared):
    compared(tied=[[HEAD, EMBEDDING]])
    taken = library.import_model(source)
    assert stored(taken, "config.json")["tie_word_embeddings"] is False and len(taken.warnings) == 1


def test_import_keeps_tied_head_equal_to_embedding(library, source, compared):
    tensors = checkpoints.tensors()
    save_file(tensors | {HEAD: tensors[EMBEDDING]}, source / "model.safetensors", metadata={"format": "pt"})
    compared(tied=[[HEAD, EMBEDDING]])
    taken = library.import_model(source)
    assert "tie_word_embeddings" not in stored(taken, "config.json") and not taken.warnings


def test_import_rejects_separate_head_ignored_by_engines(library, tmp_path, compared):
    source = checkpoints.write(tmp_path / "source", config={"architectures": ["Gemma2ForCausalLM"]})
    compared(tied=[[HEAD, EMBEDDING]])
    with pytest.raises(NotACheckpoint, match=HEAD):
        library.import_model(source)


def test_import_drops_quantisation_config_of_plain_weights(library, tmp_path, compared):
    source = checkpoints.write(tmp_path / "source", config={"quantization_config": {"quant_method": "bitsandbytes"}})
    compared(plain=True)
    taken = library.import_model(source)
    assert "quantization_config" not in stored(taken, "config.json")
    assert taken.info["quantization"] is None and len(taken.warnings) == 1


def test_import_sets_tokenizer_class_that_matches_tokenizer_json(library, source, compared):
    compared(differs="Hello world", mended=True)
    taken = library.import_model(source)
    assert stored(taken, "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert len(taken.warnings) == 1


@pytest.mark.parametrize(
    "found",
    [
        {"beyond": [["</s>", 40]], "special": {"eos_token": ["</s>", 40]}},
        {"beyond": [["<s>", 40]], "special": {"bos_token": ["<s>", 40]}, "begins": True},
        {"beyond": [["assistant: ", 40]], "special": {}},
    ],
)
def test_import_rejects_special_token_beyond_embedding(library, source, compared, found):
    compared(**found)
    with pytest.raises(TokenizerRefused):
        library.import_model(source)


def test_import_replaces_pad_token_without_embedding_row(library, source, compared):
    special = {"eos_token": ["</s>", 2], "pad_token": ["<pad>", 40]}
    compared(beyond=[["<pad>", 40], ["<more>", 41]], special=special)
    taken = library.import_model(source)
    assert stored(taken, "tokenizer_config.json")["pad_token"] == "</s>" and len(taken.warnings) == 2


def test_import_adds_end_of_turn_to_eos_tokens(library, tmp_path, compared):
    template = checkpoints.TEMPLATE.replace("</s>", "<|im_end|>")
    source = checkpoints.write(tmp_path / "source", config={"eos_token_id": 2}, template=template)
    compared(added={"</s>": 2, "<|im_end|>": 7})
    taken = library.import_model(source)
    assert stored(taken, "generation_config.json")["eos_token_id"] == [2, 7]
    assert len(taken.warnings) == 1
