"""Attention in training, from the joined projection of queries, keys and values on: norm and rotation of queries and keys
and the attention itself in one op, whose gradient is written to where the projection reads it. By the Triton kernels; the
model writes out the same for every other backend."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from forge.ops.attention.triton import HEAD_DIMS, Launch, kernels_run

CHANNELS = 2048         # half a head's, of all rows of a program: so many stay in registers; half of them in the backward
PROGRAMS = 1024         # in the backward; each sums the gradient of the gains


def parts(qkv: Tensor, H: int, K: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, T, H, D), k and v (B, T, K, D) as views of (B, T, (H + 2 K) D)."""
    q, k, v = qkv.unflatten(-1, (H + 2 * K, D)).split([H, K, K], 2)
    return q, k, v


def supports(qkv: Tensor, D: int) -> bool:
    return kernels_run(qkv.device.type, qkv.dtype) and D in HEAD_DIMS


def attend(qkv: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, cos: Tensor | None, sin: Tensor | None,
           starts: Tensor | None, H: int, K: int, window: int | None, backend: str) -> Tensor:
    """(B, T, H, D) of the joined projection qkv (B, T, (H + 2 K) D): causal attention among its queries, keys and values.

    q_gain, k_gain (D,): RMSNorm of queries and keys by these, or None. cos, sin (T, 1, D/2) float32: their rotation, or
    None. starts, window as in attention(). backend: "triton", its tiles behind it.
    """
    return packed(qkv, q_gain, k_gain, cos, sin, starts, H, K, window, backend.partition(" ")[2])[0]


class Rotary:
    """The arguments that both kernels share."""

    def __init__(self, qkv: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, cos: Tensor | None, sin: Tensor | None,
                 H: int, K: int) -> None:
        self.kernels: Any = importlib.import_module(f"{__package__}.rotary_triton")     # here, as it imports triton
        B, T, C = qkv.shape
        half = C // (H + 2 * K) // 2
        padded = max(2, 1 << (half - 1).bit_length())
        self.N, self.rows = B * T, max(1, CHANNELS // padded)
        self.args: dict[str, Any] = dict(        # what is not read may be any tensor
            QKV=qkv, QGain=qkv if q_gain is None else q_gain, KGain=qkv if k_gain is None else k_gain,
            Cos=qkv if cos is None else cos, Sin=qkv if sin is None else sin, N=B * T, T=T, H=H, KH=K, HALF=half,
            HP=padded, NORM=q_gain is not None, ROPE=cos is not None, ROWS=self.rows, num_warps=4)

    def forward(self, q: Tensor, k: Tensor) -> None:
        self.kernels.rotary_kernel[(-(-self.N // self.rows),)](**self.args, Q=q, K=k)

    def backward(self, dq: Tensor, dk: Tensor, dqkv: Tensor) -> tuple[Tensor, Tensor]:
        """Fills the gradients of queries and keys into dqkv; returns those of the gains, (D,) each."""
        rows = max(1, self.rows // 2)
        programs = min(PROGRAMS, -(-self.N // rows))
        half, padded = self.args["HALF"], self.args["HP"]
        sums = (dqkv.new_empty if self.args["NORM"] else dqkv.new_zeros)((programs, 2, 2, padded), dtype=torch.float32)
        args = self.args | {"ROWS": rows}
        self.kernels.rotary_backward_kernel[(programs,)](**args, DQ=dq, DK=dk, DQKV=dqkv, DGains=sums)
        dq_gain, dk_gain = sums.sum(0)[..., :half].flatten(1)
        return dq_gain.clone(), dk_gain.clone()         # an op's results share no memory


@torch.library.custom_op("forge::packed_attention", mutates_args=())
def packed(qkv: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, cos: Tensor | None, sin: Tensor | None,
           starts: Tensor | None, H: int, K: int, window: int | None, tiles: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (B, T, H, D), lse (B, H, T), and the queries and keys that attention saw, empty where they lie in qkv.

    qkv (B, T, (H + 2 K) D) contiguous; gains (D,) float32 or None; cos, sin (T, 1, D/2) float32 or None.
    """
    B, T, C = qkv.shape
    D = C // (H + 2 * K)
    q, k, v = parts(qkv, H, K, D)
    kept = q_gain is not None or cos is not None
    seen = qkv.new_empty(q.shape if kept else (0,)), qkv.new_empty(k.shape if kept else (0,))
    if kept:
        Rotary(qkv, q_gain, k_gain, cos, sin, H, K).forward(*seen)
        q, k = seen
    out, lse = qkv.new_empty(B, T, H, D), qkv.new_empty((B, H, T), dtype=torch.float32)
    Launch(q, k, starts, True, window, D ** -0.5, None, tiles).forward(q, k, v, out, lse)
    return out, lse, *seen


@torch.library.custom_op("forge::packed_attention_backward", mutates_args=())
def backward(dout: Tensor, qkv: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, cos: Tensor | None, sin: Tensor | None,
             starts: Tensor | None, H: int, K: int, window: int | None, tiles: str, out: Tensor, lse: Tensor, q: Tensor,
             k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dqkv, and the gradients of the gains."""
    D = qkv.shape[-1] // (H + 2 * K)
    dqkv = torch.empty_like(qkv)
    dq, dk, dv = parts(dqkv, H, K, D)
    in_place = q.numel() == 0
    q0, k0, v = parts(qkv, H, K, D)
    q, k = (q0, k0) if in_place else (q, k)
    to = (dq, dk) if in_place else (torch.empty_like(q), torch.empty_like(k))
    Launch(q, k, starts, True, window, D ** -0.5, None, tiles).backward(dout.contiguous(), None, q, k, v, out, lse, *to, dv)
    if in_place:
        return dqkv, qkv.new_zeros(D, dtype=torch.float32), qkv.new_zeros(D, dtype=torch.float32)
    return dqkv, *Rotary(qkv, q_gain, k_gain, cos, sin, H, K).backward(*to, dqkv)


@packed.register_fake
def _(qkv: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, cos: Tensor | None, sin: Tensor | None,
      starts: Tensor | None, H: int, K: int, window: int | None, tiles: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, T, C = qkv.shape
    D = C // (H + 2 * K)
    kept = q_gain is not None or cos is not None
    return (qkv.new_empty(B, T, H, D), qkv.new_empty((B, H, T), dtype=torch.float32),
            qkv.new_empty((B, T, H, D) if kept else (0,)), qkv.new_empty((B, T, K, D) if kept else (0,)))


@backward.register_fake
def _(dout: Tensor, qkv: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, cos: Tensor | None, sin: Tensor | None,
      starts: Tensor | None, H: int, K: int, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    D = qkv.shape[-1] // (H + 2 * K)
    gain = qkv.new_empty(D, dtype=torch.float32)
    return torch.empty_like(qkv), gain, torch.empty_like(gain)


def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    qkv, q_gain, k_gain, cos, sin, starts, *ctx.rest = inputs
    ctx.save_for_backward(qkv, q_gain, k_gain, cos, sin, starts, *output)
    ctx.mark_non_differentiable(*output[1:])


def grads(ctx: Any, dout: Tensor, *_: Tensor) -> tuple:
    qkv, q_gain, k_gain, cos, sin, starts, *output = ctx.saved_tensors
    dqkv, dq_gain, dk_gain = backward(dout, qkv, q_gain, k_gain, cos, sin, starts, *ctx.rest, *output)
    return dqkv, None if q_gain is None else dq_gain, None if k_gain is None else dk_gain, *([None] * 7)


packed.register_autograd(grads, setup_context=setup_context)
