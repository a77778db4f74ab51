from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import TINY
from test_train import Call
from torch import Tensor

from forge import machine
from forge.config import ModelConfig
from forge.model.transformer import Transformer, init_weights
from forge.ops import float8
from forge.ops.attention import FLOORS, distance

CONFIG = ModelConfig(vocab_size=64, seq_len=32, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, bias=True).resolve()


def compare(M: int = 48, K: int = 96, N: int = 64, device: str = "cpu", compiled: bool = False) -> None:
    """Against the same roundings multiplied in float64, and against a product that rounds nothing to 8 bits."""
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (scale * torch.randn(shape, generator=generator).to(device) for scale, shape in (
        (3.0, (2, M // 2, K)), (0.02, (N, K)), (1e-6, (2, M // 2, N))))
    x, dy = x.bfloat16(), dy.bfloat16()
    x.requires_grad_()
    weight.requires_grad_()
    linear = torch.compile(float8.linear, fullgraph=True, dynamic=False) if compiled else float8.linear
    y = linear(x, weight)
    found = [y, *torch.autograd.grad(y, (x, weight), dy)]
    flat, dflat, weight = x.detach().flatten(0, 1), dy.flatten(0, 1), weight.detach()
    for got, exact, like in zip(found, float8.reference(flat, weight, dflat), (dy, x, weight)):
        assert got.shape == like.shape
        assert got.dtype == like.dtype
        # sums of a fast product keep 14 bits of each addend
        assert distance(got.detach().flatten(0, -2), exact) < max(FLOORS[got.dtype], 1e-3)
    plain = flat.double() @ weight.double().T, dflat.double() @ weight.double(), dflat.double().T @ flat.double()
    for got, exact in zip(found, plain):
        assert 0 < distance(got.detach().flatten(0, -2), exact) < 0.08      # e4m3 rounds to 4 bits, e5m2 to 3


@pytest.mark.parametrize("compiled", [False, True])
def test_it_equals_the_reference(compiled: bool) -> None:
    compare(compiled=compiled)


def test_zeros_give_zeros_and_what_is_no_number_is_seen() -> None:
    x, weight = torch.zeros(16, 32, dtype=torch.bfloat16), torch.randn(16, 32)
    assert float8.linear(x, weight).eq(0).all()
    for bad in (float("nan"), float("inf")):
        x[3, 4] = bad
        assert not float8.linear(x, weight)[3].isfinite().any()


def step(fp8: bool, config: ModelConfig = CONFIG, recompute: str = "none", compiled: bool = False
         ) -> tuple[Transformer, Tensor, Tensor]:
    """A model, its loss with gradients, and its loss when it is evaluated."""
    model = Transformer(config, torch.bfloat16, "blocked", recompute, fp8)
    init_weights(model, 0)
    if compiled:
        torch._dynamo.reset()
        model.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(1))
    loss = model.train()(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    with torch.no_grad():
        return model, loss, model.eval()(tokens[:, :-1], tokens[:, 1:])


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_training_rounds_and_evaluation_does_not(mlp: str) -> None:
    config = replace(CONFIG, mlp=mlp)       # type: ignore[arg-type]
    (model, loss, evaluated), (other, exact, known) = step(True, config), step(False, config)
    assert torch.equal(evaluated, known)
    assert 0 < abs(loss - exact) < 0.02
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters()):
        assert p.grad is not None
        assert q.grad is not None
        if p.dim() == 2:
            assert distance(p.grad, q.grad) < 0.35, name        # twenty roundings of 3 bits from one


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_or_compiled_whole_it_is_the_same(recompute: str, compiled: bool) -> None:
    (model, loss, _), (other, same, _) = step(True), step(True, recompute=recompute, compiled=compiled)
    assert abs(loss - same) < 1e-3
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters()):
        assert p.grad is not None
        assert q.grad is not None
        assert distance(p.grad, q.grad) < (0.05 if compiled else 1e-6), name


@pytest.mark.parametrize(("flags", "words"), [
    ("--train.dtype auto", "--train.fp8: it needs an NVIDIA GPU; leave it out"),
    ("--train.dtype float32", "train.fp8 goes with bfloat16"),
    ("--train.dtype auto --model.dim 24", "model.dim=24: train.fp8 needs multiples of 16; set --model.dim 32")])
def test_what_cannot_be_is_said(flags: str, words: str, forge: Call) -> None:
    shape = ("--model.n-heads", 1, "--model.ffn-dim", 32)
    outcome = forge("train", *TINY, *shape, "--train.device", "cpu", "--train.fp8", *flags.split())
    assert outcome.code == 2
    assert words in outcome.err


def test_which_gpus_can_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, words in (((8, 6), "this GPU has 8.6"), ((8, 9), ""), ((9, 0), ""), ((12, 0), "")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert words in (machine.without_fp8(torch.device("cuda")) or "")
        assert bool(words) == bool(machine.without_fp8(torch.device("cuda")))
