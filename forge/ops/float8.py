"""A linear layer whose three products run in 8 bits, which GPUs from Ada and Hopper on multiply twice as fast as 16.

Each operand is scaled by one number to the top of its format's range, found anew each time (tensorwise, dynamic scaling;
arXiv:2209.05433 §3): activations and weights in e4m3, gradients in e5m2. Written in PyTorch: the compiler makes scaling and
casts one kernel with what comes before them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LEAST = 1e-30       # the largest number of an operand counts as at least that, so that zeros give zeros


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, (..., N), in x's dtype.

    x (..., K) bfloat16; weight (N, K) float32, as is its gradient. The number of x's rows, N and K are multiples of 16.
    RuntimeError for others, and on a GPU below compute capability 8.9.
    """
    return Linear8.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


def reference(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(y, dx, dweight) for x (M, K), weight (N, K), dy (M, N): the same roundings, then products in float64."""
    x, weight, dy = (scale.double() * x8.double() for x8, scale in (
        scaled(x, torch.float8_e4m3fn), scaled(weight, torch.float8_e4m3fn), scaled(dy, torch.float8_e5m2)))
    return x @ weight.T, dy @ weight, dy.T @ x


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x / scale rounded to 8 bits, scale), scale a float32 scalar."""
    scale = x.abs().amax().float().clamp(min=LEAST) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def product(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool = False) -> Tensor:
    """x @ y.T for (M, K) and (N, K), each with its scale and contiguous, which is the one order that the hardware takes.
    fast: sums keep fewer bits."""
    return torch._scaled_mm(x[0], y[0].T, scale_a=x[1], scale_b=y[1], out_dtype=dtype, use_fast_accum=fast)


def turned(x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return x[0].T.contiguous(), x[1]


class Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, w8 = scaled(x, torch.float8_e4m3fn), scaled(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(*x8, *w8)
        ctx.dtype = weight.dtype
        return product(x8, w8, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        dy8 = scaled(dy, torch.float8_e5m2)
        dx = product(dy8, turned((w8, w_scale)), dy.dtype)
        return dx, product(turned(dy8), turned((x8, x_scale)), ctx.dtype)
