from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge.ops import cross_entropy
from forge.ops.attention import FLOORS, distance
from forge.ops.cross_entropy import linear_cross_entropy, reference


def inputs(dtype: torch.dtype, N: int = 37, C: int = 12, V: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, C, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, C, generator=generator, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    targets = torch.randint(-1, V, (N,), generator=generator)
    return x, weight.requires_grad_(), targets


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 500, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss_and_gradients_equal_the_reference(dtype: torch.dtype, chunk: int, softcap: float | None, z_loss: float,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", chunk)
    compare(dtype, softcap, z_loss)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("V", [50, 64, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_equals_the_reference(dtype: torch.dtype, V: int, softcap: float | None, z_loss: float,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, which knows no bfloat16."""
    pytest.importorskip("triton")
    monkeypatch.setattr(cross_entropy, "TILE", dict(LANES=16, DEPTH=2))
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 1000)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compare(dtype, softcap, z_loss, V)


def compare(dtype: torch.dtype, softcap: float | None, z_loss: float, V: int = 50) -> None:
    x, weight, targets = inputs(dtype, V=V)
    ours = linear_cross_entropy(x, weight, targets, softcap=softcap, z_loss=z_loss)
    plain = reference(x, weight, targets, softcap, z_loss)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = reference(*wide, targets, softcap, z_loss)
    floor = FLOORS[dtype]
    assert abs(ours.double() - exact) <= 2 * abs(plain.double() - exact) + floor * exact
    grads, plains = (torch.autograd.grad(3 * loss, (x, weight)) for loss in (ours, plain))
    for got, other, true in zip(grads, plains, torch.autograd.grad(3 * exact, wide)):
        assert distance(got, true) <= 2 * distance(other, true) + floor
        assert got.dtype in (dtype, weight.dtype)


def test_without_gradients_and_without_counted_tokens() -> None:
    x, weight, targets = inputs(torch.float64)
    with torch.no_grad():
        assert linear_cross_entropy(x, weight, targets) == pytest.approx(float(reference(x, weight, targets, None, 0.0)))
    nothing = linear_cross_entropy(x, weight, torch.full_like(targets, -1))
    assert nothing == 0
    assert torch.autograd.grad(nothing, x)[0].abs().max() == 0


def test_the_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 400)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(t.numel() for t in (out if isinstance(out, tuple) else [out])
                                      if isinstance(t, Tensor))])
            return out

    x, weight, targets = inputs(torch.float32, N=200, C=4, V=100)
    with Watch():
        cross_entropy.fused._init_fn(x.detach(), weight.detach(), targets, None, 0.0, True)
    assert 0 < largest <= 200 * 4


def test_custom_op_keeps_torchs_rules_and_compiles() -> None:
    x, weight, targets = inputs(torch.float32)
    torch.library.opcheck(cross_entropy.fused, (x, weight, targets, 3.0, 0.1, True))
    torch.library.opcheck(cross_entropy.fused, (x.detach(), weight.detach(), targets, None, 0.0, False))
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for x_, y in zip(*(torch.autograd.grad(f(x, weight, targets), (x, weight)) for f in (compiled, linear_cross_entropy))):
        torch.testing.assert_close(x_, y)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="targets"):
        linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.long))
