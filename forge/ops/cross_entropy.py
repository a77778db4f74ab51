"""Linear layer + cross-entropy in one op: the logits of a few thousand tokens at a time, never (B, T, V).

The gradients are computed with the loss, while a chunk's logits are at hand, and scaled in the backward: three matrix
products in all, where keeping nothing and computing the logits again would take four.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from forge.ops.attention import triton

CHUNK_LOGITS = 1 << 22      # logits held at once, 16 MiB in float32 ...
GPU_CHUNK_LOGITS = 1 << 28  # ... and where products must be large to be fast, 512 MiB in bfloat16
ALIGNED = 64                # rows of the weight: products of other sizes take several times as long on a GPU


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, softcap: float | None = None,
                         z_loss: float = 0.0) -> Tensor:
    """Mean nats per counted token, + z_loss * mean(logsumexp²); a scalar in float32 (float64 for float64).

    x (N, C) any float dtype; weight (V, C), multiplied in x's dtype; targets (N,) int64, a negative one is not
    counted. softcap: logits become softcap * tanh(logits / softcap). Softmax and sums run in float32 (float64), the
    weight's gradient is summed in float32 (float64). All targets negative gives 0.
    Raises ValueError for shapes that do not fit.
    """
    N, C = x.shape
    V = weight.shape[0]
    if weight.shape != (V, C) or targets.shape != (N,):
        raise ValueError(f"x {(N, C)} needs weight (V, {C}) and targets ({N},), not {tuple(weight.shape)} and "
                         f"{tuple(targets.shape)}")
    with_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return fused(x, weight, targets, softcap, z_loss, with_grad)[0]


def reference(x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, z_loss: float) -> Tensor:
    """The same written out over all logits, gradients by autograd."""
    logits = (x @ weight.to(x.dtype).T).to(wide(x.dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    lse = torch.logsumexp(logits, -1)
    nats = lse - logits.gather(1, targets.clamp(min=0)[:, None])[:, 0] + z_loss * lse.square()
    counted = targets >= 0
    return torch.where(counted, nats, 0.0).sum() / counted.sum().clamp(min=1)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.library.custom_op("forge::linear_cross_entropy", mutates_args=())
def fused(x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, z_loss: float, with_grad: bool
          ) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dx, dweight), the gradients empty unless with_grad."""
    N, C = x.shape
    V = weight.shape[0]
    in_kernel = triton.kernels_run(x.device.type, x.dtype)
    softmax_of = softmax_in_kernel if in_kernel else softmax
    rows = -(-V // ALIGNED) * ALIGNED if in_kernel else V
    w = x.new_zeros(rows, C)
    w[:V] = weight                                                              # and cast, as is every matrix
    count = (targets >= 0).sum().clamp(min=1)
    nats = x.new_empty(N, dtype=wide(x.dtype))
    dx = x.new_empty((N, C) if with_grad else (0,))
    dw = weight.new_zeros((rows, C) if with_grad else (0,), dtype=wide(x.dtype))
    chunks = max(1, -(-N * rows // (GPU_CHUNK_LOGITS if x.is_cuda else CHUNK_LOGITS)))
    size = -(-N // chunks)
    for start in range(0, N, max(1, size)):
        at = slice(start, start + size)
        logits = x[at] @ w.T                                                    # (n, rows)
        nats[at], dlogits = softmax_of(logits, targets[at], count, V, softcap, z_loss, with_grad)
        if with_grad:
            torch.mm(dlogits, w, out=dx[at])
            add_product(dw, dlogits.T, x[at])
    return nats.sum() / count, dx, dw[:V].to(weight.dtype)


def add_product(into: Tensor, x: Tensor, y: Tensor) -> None:
    """into += x @ y, summed in the dtype of `into`."""
    if x.dtype == into.dtype:
        into.addmm_(x, y)
    elif x.is_cuda:
        torch.ops.aten.addmm.dtype_out(into, x, y, into.dtype, out=into)
    else:
        into += x @ y


def softmax(logits: Tensor, targets: Tensor, count: Tensor, V: int, softcap: float | None, z_loss: float, with_grad: bool
            ) -> tuple[Tensor, Tensor]:
    """(nats of each token (n,), gradient of their mean by the logits (n, V)); logits may be overwritten."""
    dtype, target = logits.dtype, targets.clamp(min=0)[:, None]
    counted = targets >= 0
    logits = logits.to(wide(dtype))
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    lse = torch.logsumexp(logits, -1, keepdim=True)
    nats = torch.where(counted, (lse - logits.gather(1, target) + z_loss * lse.square())[:, 0], 0.0)
    if not with_grad:
        return nats, logits
    p = (logits - lse).exp_()
    if z_loss:
        p.mul_(1 + 2 * z_loss * lse)                                            # d lse² = 2 lse p
    p.scatter_add_(1, target, torch.full_like(lse, -1.0))
    if softcap is not None:
        p.mul_(1 - logits.div_(softcap).square_())                              # tanh'
    p.mul_((counted.to(p.dtype) / count)[:, None])
    return nats, p.to(dtype)


def softmax_in_kernel(logits: Tensor, targets: Tensor, count: Tensor, V: int, softcap: float | None, z_loss: float,
                      with_grad: bool) -> tuple[Tensor, Tensor]:
    """softmax in one kernel: the logits become their gradient. Columns from V on are none, and become 0."""
    kernels: Any = importlib.import_module("forge.ops.cross_entropy_triton")    # here, as it imports triton
    n, rows = logits.shape
    nats = logits.new_empty(n, dtype=torch.float32)
    kernels.loss_kernel[(n,)](
        Logits=logits, Targets=targets, Nats=nats, Count=count, stride=rows, softcap=softcap or 0.0, z_loss=z_loss, V=V,
        ROWS=rows, SOFTCAP=softcap is not None, GRAD=with_grad, **TILE)
    return nats, logits


TILE = dict(LANES=4096, DEPTH=4, num_warps=16)       # logits of a row at a time; the best of some on an H200


@fused.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, z_loss: float, with_grad: bool
      ) -> tuple[Tensor, Tensor, Tensor]:
    return (x.new_empty((), dtype=wide(x.dtype)), x.new_empty(x.shape if with_grad else (0,)),
            weight.new_empty(weight.shape if with_grad else (0,)))


def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, dx, dw = output
    ctx.save_for_backward(dx, dw)
    ctx.mark_non_differentiable(dx, dw)


def grads(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple:
    dx, dw = ctx.saved_tensors
    return dx * dloss.to(dx.dtype), dw * dloss.to(dw.dtype), None, None, None, None


fused.register_autograd(grads, setup_context=setup_context)
