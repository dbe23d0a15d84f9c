"""The map between stored and loaded names, against transformers' own way back to the checkpoint."""

import random
from math import prod

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from tests.train_support.tiny import FAMILIES, make_model_dir
from train.plan.errors import UnsupportedModel
from train.state.publish import cut, match, stored_names


def load(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return model, {name: tuple(p.shape) for name, p in model.named_parameters()}


def written_by_fragments(model, names, cuts):
    """What ranks would write that own every parameter in pieces cut at random places."""
    draw, written = random.Random(cuts), {}
    for parameter, tensor in model.named_parameters():
        flat = tensor.detach().reshape(-1)
        edges = [0, *sorted(draw.sample(range(flat.numel() + 1), min(cuts, flat.numel()))), flat.numel()]
        for start, end in zip(edges, edges[1:], strict=False):
            for name, at, ours in cut(names[parameter], start, end - start):
                (stored,) = [t for t in names[parameter] if t.name == name]
                whole = written.setdefault(name, torch.full((stored.numel,), float("nan"), dtype=torch.bfloat16))
                whole[at : at + ours.stop - ours.start] = flat[start:end][ours]
    shapes = {t.name: t.shape for parameter, _ in model.named_parameters() for t in names[parameter]}
    return {name: flat.view(shapes[name]) for name, flat in written.items()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cut_fragments_restore_the_checkpoint(tmp_path, family, tied):
    model, shapes = load(make_model_dir(tmp_path / "base", family=family, tied=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0  # what is written must come from the model, not from the base
    names = stored_names(model, shapes, tmp_path / "base")
    model.save_pretrained(tmp_path / "saved")  # transformers' own way back
    expected = load_file(tmp_path / "saved" / "model.safetensors")
    for cuts in (0, 1, 7):
        written = written_by_fragments(model, names, cuts)
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_match_stored_tied_head_is_left_out(tmp_path):
    base = make_model_dir(tmp_path / "base", tied=True)
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.mtp.head"] = torch.zeros(3)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    model, shapes = load(base)
    names = stored_names(model, shapes, base)
    assert "lm_head.weight" not in names
    assert {t.name for p in shapes for t in names[p]} == tensors.keys() - {"lm_head.weight", "model.mtp.head"}


def converter(*operations):
    return WeightConverter(["experts.*.a", "experts.*.b"], "experts.ab", list(operations))


STORED = {"experts.0.a": (2, 3), "experts.1.a": (2, 3), "experts.0.b": (4, 3), "experts.1.b": (4, 3)}
STACK, JOIN = MergeModulelist(dim=0), Concatenate(dim=1)


def test_match_parts_of_different_widths_keep_memory_order():
    names = match([converter(STACK, JOIN)], "", {"experts.ab": (2, 6, 3)}, STORED)
    assert [(t.name, t.start) for t in names["experts.ab"]] == [
        ("experts.0.a", 0),
        ("experts.0.b", 6),
        ("experts.1.a", 18),
        ("experts.1.b", 24),
    ]
    assert list(cut(names["experts.ab"], 4, 16)) == [
        ("experts.0.a", 4, slice(0, 2)),
        ("experts.0.b", 0, slice(2, 14)),
        ("experts.1.a", 0, slice(14, 16)),
    ]


@pytest.mark.parametrize(
    "operations, shape, stored, said",
    [
        ((STACK, Concatenate(dim=2)), (2, 2, 7), STORED, "joined along the next"),
        ((STACK, JOIN, Transpose(1, 2)), (2, 3, 6), STORED, "joined along the next"),
        ((STACK, JOIN), (2, 6, 3), {k: v for k, v in STORED.items() if k != "experts.1.b"}, "do not fill it"),
        ((STACK, JOIN), (3, 6, 3), STORED, "do not fill it"),
        ((STACK, JOIN), (2, 6, 3), {}, "nothing"),
    ],
)
def test_match_tensor_without_contiguous_range_is_refused(operations, shape, stored, said):
    with pytest.raises(UnsupportedModel, match=said):
        match([converter(*operations)], "", {"experts.ab": shape}, stored)
    assert prod(shape)
