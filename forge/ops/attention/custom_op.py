"""What the backends share: the shapes that their custom ops give, and the way from a forward to its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef


def unit(x: Tensor) -> Tensor:
    """x with a unit last stride, copied where it has another; a gradient of .sum() has stride 0."""
    return x if x.stride(-1) == 1 else x.contiguous()


def needs_grad(*inputs: Tensor) -> bool:
    """Whether a gradient is asked for."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def differentiable(forward: CustomOpDef, backward: CustomOpDef, *, materialize: bool = False) -> None:
    """Registers fakes, and backward as the gradient of forward.

    forward(q, k, v, starts, *rest) -> out, lse; backward(dout, dlse, q, k, v, out, lse, starts, *rest) -> dq, dk, dv.
    dlse is None where nothing flows through lse, as it mostly does not; zeros with materialize.
    """
    @forward.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        B, T, H, _ = q.shape
        return q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.promote_types(q.dtype, torch.float32))

    @backward.register_fake
    def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, starts, *ctx.rest = inputs
        ctx.save_for_backward(q, k, v, starts, *output)
        ctx.set_materialize_grads(materialize)

    def grads(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        q, k, v, starts, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        return (*backward(dout, dlse, q, k, v, out, lse, starts, *ctx.rest), None, *[None] * len(ctx.rest))

    forward.register_autograd(grads, setup_context=setup_context)
