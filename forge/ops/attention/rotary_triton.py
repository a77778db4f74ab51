"""What stands between a joined projection and attention, as one Triton kernel each way: RMSNorm of queries and keys
(arXiv:2302.05442) and their rotation by position (RoPE, arXiv:2104.09864 eq. 34). A program takes some rows of one head."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halves(X, row, stride, channel, there, HALF: tl.constexpr):
    """Channels i and i + D/2 of some rows, in float32."""
    at = row[:, None].to(tl.int64) * stride + channel[None, :]
    a, b = tl.load(X + at, mask=there, other=0.0), tl.load(X + at + HALF, mask=there, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def store_halves(X, a, b, row, stride, channel, there, HALF: tl.constexpr):
    at = row[:, None].to(tl.int64) * stride + channel[None, :]
    tl.store(X + at, a.to(X.dtype.element_ty), mask=there)
    tl.store(X + at + HALF, b.to(X.dtype.element_ty), mask=there)


@triton.jit
def gains(QGain, KGain, head, channel, H: tl.constexpr, HALF: tl.constexpr):
    Gain = QGain if head < H else KGain
    some = channel < HALF
    return tl.load(Gain + channel, mask=some, other=0.0)[None, :], tl.load(Gain + channel + HALF, mask=some,
                                                                           other=0.0)[None, :]


@triton.jit
def angles(Cos, Sin, row, T, channel, there, HALF: tl.constexpr):
    at = (row % T)[:, None] * HALF + channel[None, :]
    return tl.load(Cos + at, mask=there, other=0.0), tl.load(Sin + at, mask=there, other=0.0)


@triton.jit
def rotary_kernel(QKV, Q, K, QGain, KGain, Cos, Sin, N, T, H: tl.constexpr, KH: tl.constexpr, HALF: tl.constexpr,
                  HP: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr):
    """Q (N, H, D) and K (N, KH, D) of QKV (N, (H + 2 KH) D)."""
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, HP)
    there = (row < N)[:, None] & (channel < HALF)[None, :]
    a, b = halves(QKV + head * 2 * HALF, row, (H + 2 * KH) * 2 * HALF, channel, there, HALF)
    if NORM:
        ga, gb = gains(QGain, KGain, head, channel, H, HALF)
        r = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + 1e-6)[:, None]
        a, b = a * r * ga, b * r * gb
    if ROPE:
        cos, sin = angles(Cos, Sin, row, T, channel, there, HALF)
        a, b = a * cos - b * sin, b * cos + a * sin
    if head < H:
        store_halves(Q + head * 2 * HALF, a, b, row, H * 2 * HALF, channel, there, HALF)
    else:
        store_halves(K + (head - H) * 2 * HALF, a, b, row, KH * 2 * HALF, channel, there, HALF)


@triton.jit
def rotary_backward_kernel(QKV, DQ, DK, DQKV, DGains, QGain, KGain, Cos, Sin, N, T, H: tl.constexpr, KH: tl.constexpr,
                           HALF: tl.constexpr, HP: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
                           ROWS: tl.constexpr):
    """The first H + KH heads of DQKV, as QKV; DGains (programs, H + KH, 2, HP): each program's part of the gains'."""
    head = tl.program_id(1)
    channel = tl.arange(0, HP)
    if NORM:
        ga, gb = gains(QGain, KGain, head, channel, H, HALF)
    sum_a = tl.zeros((HP,), tl.float32)
    sum_b = tl.zeros((HP,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        there = (row < N)[:, None] & (channel < HALF)[None, :]
        if head < H:
            da, db = halves(DQ + head * 2 * HALF, row, H * 2 * HALF, channel, there, HALF)
        else:
            da, db = halves(DK + (head - H) * 2 * HALF, row, KH * 2 * HALF, channel, there, HALF)
        if ROPE:
            cos, sin = angles(Cos, Sin, row, T, channel, there, HALF)
            da, db = da * cos + db * sin, db * cos - da * sin
        if NORM:
            a, b = halves(QKV + head * 2 * HALF, row, (H + 2 * KH) * 2 * HALF, channel, there, HALF)
            r = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + 1e-6)[:, None]
            a, b = a * r, b * r
            sum_a += tl.sum(da * a, 0)
            sum_b += tl.sum(db * b, 0)
            da, db = da * ga, db * gb
            mean = tl.sum(da * a + db * b, 1)[:, None] / (2 * HALF)
            da, db = r * (da - a * mean), r * (db - b * mean)
        store_halves(DQKV + head * 2 * HALF, da, db, row, (H + 2 * KH) * 2 * HALF, channel, there, HALF)
    if NORM:
        at = (tl.program_id(0) * (H + KH) + head) * 2 * HP + channel
        tl.store(DGains + at, sum_a)
        tl.store(DGains + at + HP, sum_b)
