"""The softmax part of the fused loss as one Triton kernel: a row of logits becomes its loss and its own gradient.

Two passes over a row: the first finds its logsumexp, lane by lane, the second writes the gradient where the logits stood.
The row is still in the L2 cache then, so device memory is read once and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forge.ops.attention.triton_kernels import tanh

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOW = tl.constexpr(-1.0e30)     # not -inf: two of them would differ by NaN


@triton.jit
def capped(x, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        x = softcap * tanh(x / softcap)
    return x


@triton.jit
def loss_kernel(Logits, Targets, Nats, Count, stride, softcap, z_loss, V: tl.constexpr, ROWS: tl.constexpr,
                SOFTCAP: tl.constexpr, GRAD: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """DEPTH x LANES logits at a time, a lane holding DEPTH of them, so that its maximum moves once for all."""
    row = tl.program_id(0)
    Logits += row.to(tl.int64) * stride
    target = tl.load(Targets + row)
    chosen = capped(tl.load(Logits + tl.maximum(target, 0)).to(tl.float32), softcap, SOFTCAP)
    lane = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    BLOCK: tl.constexpr = DEPTH * LANES
    WHOLE: tl.constexpr = V // BLOCK * BLOCK
    most = tl.full((LANES,), LOW, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for at in range(0, V, BLOCK):
        if at < WHOLE:
            x = capped(tl.load(Logits + at + lane).to(tl.float32), softcap, SOFTCAP) * LOG2E
        else:
            x = capped(tl.load(Logits + at + lane, mask=at + lane < V, other=0.0).to(tl.float32), softcap, SOFTCAP)
            x = tl.where(at + lane < V, x * LOG2E, LOW)
        higher = tl.maximum(most, tl.max(x, 0))
        total = total * tl.exp2(most - higher) + tl.sum(tl.exp2(x - higher[None, :]), 0)
        most = higher
    top = tl.max(most, 0)
    log2sum = top + tl.log2(tl.sum(total * tl.exp2(most - top), 0))
    lse = log2sum * LN2
    counted = target >= 0
    tl.store(Nats + row, tl.where(counted, lse - chosen + z_loss * lse * lse, 0.0))
    if GRAD:
        unit = tl.where(counted, 1.0 / tl.load(Count), 0.0)
        rise = 1.0 + 2.0 * z_loss * lse                                         # d lse² = 2 lse p
        tl.debug_barrier()                                  # the target's logit was read: now it is overwritten
        for at in range(0, ROWS, BLOCK):
            if at < WHOLE:
                x = capped(tl.load(Logits + at + lane).to(tl.float32), softcap, SOFTCAP)
                p = gradient(x, 0.0, log2sum, rise, unit, softcap, SOFTCAP)
                tl.store(Logits + at + lane, p.to(Logits.dtype.element_ty))
            else:
                x = capped(tl.load(Logits + at + lane, mask=at + lane < V, other=0.0).to(tl.float32), softcap, SOFTCAP)
                p = gradient(x, 0.0, log2sum, rise, unit, softcap, SOFTCAP)
                p = tl.where(at + lane < V, p, 0.0)
                tl.store(Logits + at + lane, p.to(Logits.dtype.element_ty), mask=at + lane < ROWS)
        tl.debug_barrier()
        p = gradient(chosen, 1.0, log2sum, rise, unit, softcap, SOFTCAP)
        tl.store(Logits + target, p.to(Logits.dtype.element_ty), mask=counted)


@triton.jit
def gradient(x, hit, log2sum, rise, unit, softcap, SOFTCAP: tl.constexpr):
    """Of the mean loss by the logits whose capped values are x; hit: 1 for the target."""
    p = (tl.exp2(x * LOG2E - log2sum) * rise - hit) * unit
    if SOFTCAP:
        p *= 1.0 - (x / softcap) * (x / softcap)            # tanh'
    return p
