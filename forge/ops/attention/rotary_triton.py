"""What stands between a joined projection and attention, as one Triton kernel each way: RMSNorm of queries and keys
(arXiv:2302.05442) and their rotation by position (RoPE, arXiv:2104.09864 eq. 34). A program takes all heads of some rows,
which are turned by the same angles: read once for each head, these were as many bytes as the heads themselves."""

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
def gains(Gain, channel, HALF: tl.constexpr):
    some = channel < HALF
    return tl.load(Gain + channel, mask=some, other=0.0)[None, :], tl.load(Gain + channel + HALF, mask=some,
                                                                           other=0.0)[None, :]


@triton.jit
def angles(Cos, Sin, row, T, channel, there, HALF: tl.constexpr):
    at = (row % T)[:, None] * HALF + channel[None, :]
    return tl.load(Cos + at, mask=there, other=0.0), tl.load(Sin + at, mask=there, other=0.0)


@triton.jit
def turned(QKV, X, Gain, cos, sin, row, channel, there, FIRST: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr,
           HALF: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr):
    """X (N, HEADS, D) of the heads from FIRST on of QKV (N, ALL, D)."""
    if NORM:
        ga, gb = gains(Gain, channel, HALF)
    for head in range(HEADS):
        a, b = halves(QKV + (FIRST + head) * 2 * HALF, row, ALL * 2 * HALF, channel, there, HALF)
        if NORM:
            r = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + 1e-6)[:, None]
            a, b = a * r * ga, b * r * gb
        if ROPE:
            a, b = a * cos - b * sin, b * cos + a * sin
        store_halves(X + head * 2 * HALF, a, b, row, HEADS * 2 * HALF, channel, there, HALF)


@triton.jit
def rotary_kernel(QKV, Q, K, QGain, KGain, Cos, Sin, N, T, H: tl.constexpr, KH: tl.constexpr, HALF: tl.constexpr,
                  HP: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr):
    """Q (N, H, D) and K (N, KH, D) of QKV (N, H + 2 KH, D)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, HP)
    there = (row < N)[:, None] & (channel < HALF)[None, :]
    cos, sin = 1.0, 0.0
    if ROPE:
        cos, sin = angles(Cos, Sin, row, T, channel, there, HALF)
    turned(QKV, Q, QGain, cos, sin, row, channel, there, 0, H, H + 2 * KH, HALF, NORM, ROPE)
    turned(QKV, K, KGain, cos, sin, row, channel, there, H, KH, H + 2 * KH, HALF, NORM, ROPE)


@triton.jit
def turned_back(QKV, DX, DQKV, Gain, cos, sin, sum_a, sum_b, row, channel, there, FIRST: tl.constexpr, HEADS: tl.constexpr,
                ALL: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr):
    """The heads from FIRST on of DQKV, as QKV; and sum_a, sum_b (rows, channels) with their part of the gains' gradient."""
    if NORM:
        ga, gb = gains(Gain, channel, HALF)
    for head in range(HEADS):
        da, db = halves(DX + head * 2 * HALF, row, HEADS * 2 * HALF, channel, there, HALF)
        if ROPE:
            da, db = da * cos + db * sin, db * cos - da * sin
        if NORM:
            a, b = halves(QKV + (FIRST + head) * 2 * HALF, row, ALL * 2 * HALF, channel, there, HALF)
            r = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + 1e-6)[:, None]
            a, b = a * r, b * r
            sum_a += da * a
            sum_b += db * b
            da, db = da * ga, db * gb
            mean = tl.sum(da * a + db * b, 1)[:, None] / (2 * HALF)
            da, db = r * (da - a * mean), r * (db - b * mean)
        store_halves(DQKV + (FIRST + head) * 2 * HALF, da, db, row, ALL * 2 * HALF, channel, there, HALF)
    return sum_a, sum_b


@triton.jit
def rotary_backward_kernel(QKV, DQ, DK, DQKV, DGains, QGain, KGain, Cos, Sin, N, T, H: tl.constexpr, KH: tl.constexpr,
                           HALF: tl.constexpr, HP: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
                           ROWS: tl.constexpr):
    """The first H + KH heads of DQKV; DGains (programs, 2, 2, HP): each program's part of both gains', in halves."""
    channel = tl.arange(0, HP)
    qa = tl.zeros((ROWS, HP), tl.float32)
    qb = tl.zeros((ROWS, HP), tl.float32)
    ka = tl.zeros((ROWS, HP), tl.float32)
    kb = tl.zeros((ROWS, HP), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        there = (row < N)[:, None] & (channel < HALF)[None, :]
        cos, sin = 1.0, 0.0
        if ROPE:
            cos, sin = angles(Cos, Sin, row, T, channel, there, HALF)
        qa, qb = turned_back(QKV, DQ, DQKV, QGain, cos, sin, qa, qb, row, channel, there, 0, H, H + 2 * KH, HALF, NORM,
                             ROPE)
        ka, kb = turned_back(QKV, DK, DQKV, KGain, cos, sin, ka, kb, row, channel, there, H, KH, H + 2 * KH, HALF, NORM,
                             ROPE)
    if NORM:
        at = DGains + tl.program_id(0) * 4 * HP + channel
        tl.store(at, tl.sum(qa, 0))
        tl.store(at + HP, tl.sum(qb, 0))
        tl.store(at + 2 * HP, tl.sum(ka, 0))
        tl.store(at + 3 * HP, tl.sum(kb, 0))
