"""ORPO computes TRL's formula, however a step is split."""

import numpy as np
import pytest
import torch

from tests.train_support.specs import host_spec
from tests.train_support.tiny import gradients, log_probs_of, make_model_dir
from train.data.packing import build_row
from train.methods.methods import method_of
from train.methods.packed_objective import PackedObjective, to_batch
from train.model.model import load_model

ORPO = method_of("orpo")

BETA = 0.3


def pairs(count, seed=0):
    """Sequences of pairs with a prompt of four tokens."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(6, 20, 2 * count)
    return [(draw.integers(3, 250, size).astype(np.int32), np.arange(size) >= 4) for size in sizes]


def trl_terms(model, sequences):
    """(negative log-likelihood, log odds) of each pair, as TRL's ORPOTrainer.odds_ratio_loss writes them."""
    means = torch.stack([log_probs_of(model, sequence).mean() for sequence in sequences])
    chosen, rejected = means[::2], means[1::2]
    log_odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return -chosen, log_odds


@pytest.fixture
def model(tmp_path):
    return load_model(host_spec(make_model_dir(tmp_path / "base", dtype=torch.float32), precision="fp32"))


def test_orpo_loss_and_metrics_match_trl(model):
    sequences = pairs(3)
    nll, log_odds = trl_terms(model, sequences)
    expected = (nll - BETA * torch.nn.functional.logsigmoid(log_odds)).mean()
    expected.backward()
    wanted = gradients(model)
    objective = PackedObjective(model, ORPO, {"beta": BETA})
    loss = objective(to_batch(build_row([sequences], 160, 0, packing=True), 1 / 3, "cpu"))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradient, wanted[name], atol=1e-5), name
    _, _, *told = objective.take_metrics()
    found = dict(zip(ORPO.metric_names, told, strict=True))
    assert found["nll_loss"] == pytest.approx(nll.mean().item(), abs=1e-5)
    assert found["log_odds_chosen"] == pytest.approx(log_odds.mean().item(), abs=1e-5)
    assert found["rewards/accuracies"] == pytest.approx((log_odds > 0).float().mean().item())
    assert found["rewards/margins"] == pytest.approx(BETA * (found["logps/chosen"] - found["logps/rejected"]), abs=1e-5)


def test_orpo_split_step_keeps_loss_and_gradients(model):
    objective, sequences, found = PackedObjective(model, ORPO, {"beta": BETA}), pairs(4), []
    for each in (8, 4, 2):
        rows = [build_row([sequences[n : n + each]], 40 * each, 0, packing=True) for n in range(0, 8, each)]
        losses = [objective(to_batch(row, 1 / 4, "cpu")) for row in rows]
        sum(losses).backward()
        found.append((sum(losses).item(), gradients(model), objective.take_metrics()))
    whole, *others = found
    for loss, gradient, metrics in others:
        assert loss == pytest.approx(whole[0], abs=1e-5) and metrics == pytest.approx(whole[2], abs=1e-4)
        assert all(torch.allclose(gradient[name], whole[1][name], atol=1e-5) for name in gradient)


def test_orpo_certain_output_has_finite_gradients():
    log_probs = torch.tensor([0.0, -5.0, -5.0, 0.0], requires_grad=True)
    loss, _ = ORPO.loss(log_probs, {"sequence_sizes": (2, 2, 2, 2)}, {"beta": BETA})
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all()
