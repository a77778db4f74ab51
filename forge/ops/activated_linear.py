"""The second half of an MLP, activation and linear layer, in one op: what the activation gives is not kept, but computed
again in the backward, by the kernel that needs its input anyway."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.ops.attention import triton


def activated_linear(h: Tensor, weight: Tensor, kind: str) -> Tensor:
    """activation(h) @ weight.T, (..., C).

    h (..., F) any float dtype, or (..., 2 F) for kind "swiglu" (arXiv:2002.05202): gate, then up. kind "gelu": the tanh form
    (arXiv:1606.08415); "relu2": squared relu (arXiv:2109.08668). weight (C, F) in h's dtype. On an NVIDIA GPU the activation
    is computed in float32 whatever the dtype; elsewhere as PyTorch does.
    """
    if triton.kernels_run(h.device.type, h.dtype):
        return fused(h, weight, kind)
    return F.linear(activation(h, kind), weight)


def activation(h: Tensor, kind: str) -> Tensor:
    """The reference."""
    if kind == "swiglu":
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up
    return F.relu(h).square() if kind == "relu2" else F.gelu(h, approximate="tanh")


@torch.library.custom_op("forge::activated_linear", mutates_args=())
def fused(h: Tensor, weight: Tensor, kind: str) -> Tensor:
    a = h.new_empty(*h.shape[:-1], weight.shape[1])
    launch("activation_kernel", a, kind, H=h.contiguous(), A=a)
    return F.linear(a, weight)


@torch.library.custom_op("forge::activated_linear_backward", mutates_args=())
def backward(dy: Tensor, h: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(dh, dweight)."""
    h = h.contiguous()
    da, dh = dy @ weight, torch.empty_like(h)
    a = torch.empty_like(da)
    launch("activation_backward_kernel", a, kind, DA=da, H=h, DH=dh, A=a)
    return dh, dy.flatten(0, -2).T @ a.flatten(0, -2)


def launch(name: str, like: Tensor, kind: str, **tensors: Tensor) -> None:
    kernels: Any = importlib.import_module("forge.ops.activated_linear_triton")     # here, as it imports triton
    width = like.shape[-1]
    rows = like.numel() // width
    getattr(kernels, name)[(-(-rows // TILE["ROWS"]), -(-width // TILE["BLOCK"]))](
        **tensors, N=rows, F=width, KIND=kind, **TILE, num_warps=4)


TILE = dict(ROWS=2, BLOCK=1024)


@fused.register_fake
def _(h: Tensor, weight: Tensor, kind: str) -> Tensor:
    return h.new_empty(*h.shape[:-1], weight.shape[0])


@backward.register_fake
def _(dy: Tensor, h: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h, memory_format=torch.contiguous_format), torch.empty_like(weight)


def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    h, weight, ctx.kind = inputs
    ctx.save_for_backward(h, weight)


def grads(ctx: Any, dy: Tensor) -> tuple:
    return (*backward(dy, *ctx.saved_tensors, ctx.kind), None)


fused.register_autograd(grads, setup_context=setup_context)
