from __future__ import annotations

import math

import pytest
import torch

from forge.config import ModelConfig, OptimConfig
from forge.model.transformer import Transformer, init_weights
from forge.optim import (
    OPTIMIZERS,
    SCHEDULES,
    Muon,
    load_state_tensors,
    lr_factor,
    optimizers,
    orthogonalize,
    set_lr,
    state_tensors,
)

MODEL = ModelConfig(vocab_size=13, seq_len=8, dim=16, n_layers=2, n_heads=2, tied=True, bias=True).resolve()


def tiny() -> Transformer:
    model = Transformer(MODEL)
    init_weights(model, 0)
    return model


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_equals_torchs(adjust: str) -> None:
    shapes = [(16, 16), (16, 16), (32, 16), (16, 48)]
    ours = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    a = Muon(ours, 0.02, 0.1, 0.95, adjust)
    b = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn=adjust)
    start = [p.detach().clone() for p in ours]
    for _ in range(4):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q, s in zip(ours, theirs, start):
        assert (p - q).norm() / (q - s).norm() < 0.03       # torch's Newton-Schulz runs in bfloat16, ours in float32


def test_orthogonalize_brings_singular_values_near_one() -> None:
    for shape in ((3, 16, 16), (2, 32, 8), (2, 8, 32)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert values.max() < 1.3
        assert values.median() > 0.6


def test_muon_steps_one_shape_at_once_as_one_by_one() -> None:
    grads = torch.randn(3, 16, 8)
    torch.testing.assert_close(orthogonalize(grads), torch.cat([orthogonalize(g[None]) for g in grads]))


def test_adamw_equals_a_float64_step_written_out() -> None:
    model = tiny()
    config = OptimConfig(optimizer="adamw", lr=0.01, weight_decay=0.1)
    before = {n: p.detach().double() for n, p in model.named_parameters()}
    optimizer, = optimizers(model, config, torch.float32)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        g = p.grad.double()
        decay = 0.1 if p.dim() >= 2 else 0.0
        m, v = 0.1 * g / (1 - 0.9), 0.05 * g**2 / (1 - 0.95)
        expected = before[name] * (1 - 0.01 * decay) - 0.01 * m / (v.sqrt() + 1e-8)
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=2e-7)


def test_every_parameter_has_one_optimizer_and_hidden_matrices_have_muon() -> None:
    model = tiny()
    for name in OPTIMIZERS:
        made = optimizers(model, OptimConfig(optimizer=name), torch.float32)  # type: ignore[arg-type]
        owners = [id(p) for o in made for g in o.param_groups for p in g["params"]]
        assert sorted(owners) == sorted(id(p) for p in model.parameters())
    by_muon = {id(p) for g in made[0].param_groups for p in g["params"]}
    assert {n for n, p in model.named_parameters() if id(p) in by_muon} == {
        n for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_rise_hold_and_fall(schedule: str) -> None:
    config = OptimConfig(schedule=schedule, warmup_steps=10, min_lr=0.1, cooldown=0.5)  # type: ignore[arg-type]
    assert [lr_factor(step, 0.0, config) for step in (0, 4, 9, 50)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert lr_factor(99, 1.0, config) == pytest.approx(0.1)
    assert lr_factor(99, 1.7, config) == pytest.approx(0.1)
    middle = {"cosine": 0.1 + 0.9 * (1 + math.cos(math.pi * 0.75)) / 2, "linear": 0.1 + 0.9 * 0.5}
    assert lr_factor(99, 0.75, config) == pytest.approx(middle[schedule])
    assert lr_factor(0, 0.0, OptimConfig(warmup_steps=0)) == 1.0


def test_set_lr_scales_each_optimizers_own_peak() -> None:
    made = optimizers(tiny(), OptimConfig(lr=0.01, muon_lr=0.2), torch.float32)
    set_lr(made, 0.5)
    assert [g["lr"] for o in made for g in o.param_groups] == [0.1, 0.005, 0.005]


def test_moments_come_back() -> None:
    models = [tiny(), tiny()]
    made = [optimizers(m, OptimConfig(), torch.float32) for m in models]

    def step(i: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in models[i].parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        for o in made[i]:
            o.step()

    for seed in range(3):
        step(0, seed)
    models[1].load_state_dict(models[0].state_dict())
    load_state_tensors(models[1], made[1], {k: v.clone() for k, v in state_tensors(models[0], made[0]).items()})
    for i in range(2):
        step(i, 9)
    assert all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in models)))
    with pytest.raises(KeyError):
        load_state_tensors(models[1], made[1], {})
