from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forge.ops import activated_linear as module
from forge.ops.activated_linear import activated_linear, activation
from forge.ops.attention import FLOORS, distance

KINDS = ("swiglu", "gelu", "relu2")


def inputs(kind: str, dtype: torch.dtype, width: int = 40, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 13, width * (2 if kind == "swiglu" else 1)), (11, width), (2, 13, 11)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def compare(kind: str, dtype: torch.dtype, width: int = 40, device: str = "cpu") -> None:
    """Output and gradients against float64, beside the reference in the same dtype."""
    h, weight, dy = inputs(kind, dtype, width, device)

    def run(f: object, *leaves: Tensor) -> list[Tensor]:
        leaves = tuple(x.detach().requires_grad_() for x in leaves)
        y = f(*leaves, kind)        # type: ignore[operator]
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    def plain(h: Tensor, weight: Tensor, kind: str) -> Tensor:
        return F.linear(activation(h, kind), weight)

    exact = run(plain, h.double(), weight.double())
    for got, other, true in zip(run(activated_linear, h, weight), run(plain, h, weight), exact):
        assert got.dtype == dtype
        assert distance(got, true) <= 2 * distance(other, true) + FLOORS[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [40, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernels_equal_the_reference(kind: str, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, which knows no bfloat16."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(module, "TILE", dict(ROWS=4, BLOCK=32))
    compare(kind, dtype, width)


@pytest.mark.parametrize("kind", KINDS)
def test_the_op_keeps_torchs_rules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    h, weight, dy = inputs(kind, torch.float32)
    torch.library.opcheck(module.fused, (h.requires_grad_(), weight.requires_grad_(), kind))
    torch.library.opcheck(module.backward, (dy, h.detach(), weight.detach(), kind))


@pytest.mark.parametrize("kind", KINDS)
def test_elsewhere_it_is_pytorchs(kind: str) -> None:
    compare(kind, torch.bfloat16)
