"""The Triton kernels of FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2), launched by triton.py.

Scores live in the domain of exp2: s log2(e), so that exp2 is one instruction. A tile of size (N, D) is a tuple of one or
two parts along D, (N, D0) and (N, D1): a head_dim of 80 is 64 + 16, not padded to 128.
Every query row i (in key coordinates: its own position, the last query at the last key) sees the keys
low(i) <= j <= high(i). Both bounds grow with i, so blocks of keys that all rows of a block see lie between some that
only a part of them sees: the full ones run without a mask, the others before and after them in one masked loop.

float32 on tensor cores (PRECISION "split"): every tensor is scaled by a power of two to the top of float16's range and split
into two float16 halves, high and low, which hold 22 bits; a product is high high + high low + low high, summed in float32
(Ootomo and Yokota, arXiv:2203.03341). That is three products at float16's rate, where three of TF32 run at half of it and
bfloat16 needs six. Factors (B, K, 7) float32 undoes the scales; see Launch.split in triton.py.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LIFT = tl.constexpr(15)         # a split P is computed times 2^15, the top of float16: its low half is then no denormal
LOWEST = tl.constexpr(-3.4028234663852886e38)       # where the maximum starts; -inf would give exp(-inf + inf)


@triton.jit
def wide(x):
    """As int64, whether x is a tensor or a constant: offsets pass 2^31."""
    return tl.full((), 0, tl.int64) + x


@triton.jit
def part(X, b, h, row, rows, strides, N: tl.constexpr, D: tl.constexpr, COLUMN: tl.constexpr, DESC: tl.constexpr):
    """(N, D) of X (b, h, row.., COLUMN..); rows outside are zero. X: a descriptor (B, H, T, D) or a pointer."""
    if DESC:
        return tl.reshape(X.load([b, h, row, COLUMN]), (N, D))
    else:
        i, d = tl.arange(0, N), tl.arange(0, D)
        at = wide(b) * strides[0] + wide(h) * strides[1] + wide(row) * strides[2] + COLUMN
        return tl.load(X + (at + wide(i) * strides[2])[:, None] + d[None, :], mask=(row + i < rows)[:, None], other=0.0)


@triton.jit
def tile(X, b, h, row, rows, strides, N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DESC: tl.constexpr,
         PRECISION: tl.constexpr):
    """The parts of a tile; of a split float32 tensor those of its high and then those of its low half."""
    high = part(X, b, h, row, rows, strides, N, D0, 0, DESC)
    if D1:
        high1 = part(X, b, h, row, rows, strides, N, D1, D0, DESC)
    if PRECISION == "split":
        low = part(X, b, h, row, rows, strides, N, D0, D0 + D1, DESC)
        if D1:
            return high, high1, low, part(X, b, h, row, rows, strides, N, D1, D0 + D1 + D0, DESC)
        else:
            return high, low
    elif D1:
        return high, high1
    else:
        return (high,)


@triton.jit
def zeros(N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    if D1:
        return tl.zeros((N, D0), tl.float32), tl.zeros((N, D1), tl.float32)
    else:
        return (tl.zeros((N, D0), tl.float32),)


@triton.jit
def times(x, factor, D1: tl.constexpr):
    if D1:
        return x[0] * factor, x[1] * factor
    else:
        return (x[0] * factor,)


@triton.jit
def inner(x, y, D1: tl.constexpr, PRECISION: tl.constexpr):
    """(N, D) and (M, D) -> (N, M), summed over D."""
    if PRECISION == "split":        # high low + low high + high high; what is left out is 2^-22 of it
        if D1:
            s = tl.dot(x[0], tl.trans(y[2]))
            s = tl.dot(x[2], tl.trans(y[0]), s)
            s = tl.dot(x[1], tl.trans(y[3]), s)
            s = tl.dot(x[3], tl.trans(y[1]), s)
            return tl.dot(x[1], tl.trans(y[1]), tl.dot(x[0], tl.trans(y[0]), s))
        else:
            s = tl.dot(x[0], tl.trans(y[1]))
            s = tl.dot(x[1], tl.trans(y[0]), s)
            return tl.dot(x[0], tl.trans(y[0]), s)
    else:
        s = tl.dot(x[0], tl.trans(y[0]), input_precision=PRECISION)
        if D1:
            s = tl.dot(x[1], tl.trans(y[1]), s, input_precision=PRECISION)
        return s


@triton.jit
def add_part(acc, x, low, y, y_low, PRECISION: tl.constexpr):
    if PRECISION == "split":        # added by the ordinary units: in the tensor cores a long sum drifts, they cut off
        return acc + tl.dot(x, y, tl.dot(low, y, tl.dot(x, y_low)))
    else:
        return tl.dot(x, y, acc, input_precision=PRECISION)


@triton.jit
def add(acc, x, y, D1: tl.constexpr, PRECISION: tl.constexpr):
    """acc (N, D) + x (N, M) @ y (M, D); x in float32."""
    high = x.to(y[0].dtype)
    low = (x - high).to(y[0].dtype) if PRECISION == "split" else high
    parts: tl.constexpr = 0 if PRECISION != "split" else 2 if D1 else 1
    if D1:
        return (add_part(acc[0], high, low, y[0], y[parts], PRECISION),
                add_part(acc[1], high, low, y[1], y[1 + parts], PRECISION))
    else:
        return (add_part(acc[0], high, low, y[0], y[parts], PRECISION),)


@triton.jit
def store(X, x, b, h, row, rows, strides, N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DESC: tl.constexpr):
    """Writes a tile in X's dtype; rows outside are left out."""
    if DESC:
        X.store([b, h, row, 0], tl.reshape(x[0].to(X.dtype), (1, 1, N, D0)))
        if D1:
            X.store([b, h, row, D0], tl.reshape(x[1].to(X.dtype), (1, 1, N, D1)))
    else:
        i = tl.arange(0, N)
        at = X + wide(b) * strides[0] + wide(h) * strides[1] + wide(row) * strides[2]
        at += (wide(i) * strides[2])[:, None]
        inside = (row + i < rows)[:, None]
        tl.store(at + tl.arange(0, D0)[None, :], x[0].to(X.dtype.element_ty), mask=inside)
        if D1:
            tl.store(at + D0 + tl.arange(0, D1)[None, :], x[1].to(X.dtype.element_ty), mask=inside)


@triton.jit
def tanh(x):
    """To a few units of the last place of float32: a series near 0, where 1 - exp cancels."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - e) / (1 + e)
    xx = x * x
    near = x * (1 + xx * (-1 / 3 + xx * (2 / 15 + xx * (-17 / 315 + xx * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -1.0, 1.0) * far)


@triton.jit
def place(heads, blocks, section, HEAVY_LAST: tl.constexpr):
    """(head, block) of this program: heads in sections whose keys fit into L2, the longest rows of a section first."""
    pid = tl.program_id(0)
    first = pid // (section * blocks) * section
    size = min(section, heads - first)
    at = pid - first * blocks
    block = at // size
    if HEAVY_LAST:
        block = blocks - 1 - block
    return first + at % size, block


@triton.jit
def bounds(Starts, b, i0, T, S, window, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
           STARTS: tl.constexpr):
    """For queries i0 .. i0 + N: low (N) of each row, and of all: the keys first .. end that some row sees, and
    full_first .. full_end that every row sees."""
    i = i0 + tl.arange(0, N)
    last = min(i0 + N, T) - 1
    low = tl.zeros((N,), tl.int32)
    first, full_first, end, full_end = 0, 0, S, S
    if WINDOW:
        low = i + (S - T + 1 - window)
        first, full_first = i0 + (S - T + 1 - window), last + (S - T + 1 - window)
    if STARTS:
        at = Starts + wide(b) * T
        low = tl.maximum(low, tl.load(at + i, mask=i < T, other=S))
        first, full_first = max(first, tl.load(at + i0)), max(full_first, tl.load(at + last))
    if CAUSAL:
        end, full_end = min(S, last + (S - T) + 1), min(S, i0 + (S - T) + 1)
    return low, max(first, 0), max(full_first, 0), max(end, 0), max(full_end, 0)


@triton.jit
def visible(i, j, low, S, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr):
    """(N, M) of i (N, 1) in key coordinates, j (1, M), low (N, 1); or all transposed."""
    seen = j <= i if CAUSAL else j < S
    if WINDOW or STARTS:
        seen = seen & (j >= low)
    return seen


@triton.jit
def blocks_of(first, full_first, end, full_end, BN: tl.constexpr):
    """first, full_first, end, full_end -> a, b, c, d, multiples of BN: masked blocks a .. b and c .. d, full ones b .. c."""
    a = first // BN * BN
    d = tl.cdiv(end, BN) * BN
    b = min(max(a, tl.cdiv(full_first, BN) * BN), max(a, d))
    c = min(max(b, full_end // BN * BN), max(b, d))
    return a, b, c, max(c, d)


@triton.jit
def forward_step(acc, l, m, q, K, V, b, hk, n, S, k_strides, v_strides, i, low, scale, softcap,
                 BN: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
                 STARTS: tl.constexpr, SOFTCAP: tl.constexpr, DESC: tl.constexpr, PRECISION: tl.constexpr,
                 MASKED: tl.constexpr):
    k = tile(K, b, hk, n, S, k_strides, BN, D0, D1, DESC, PRECISION)
    s = inner(q, k, D1, PRECISION)
    if SOFTCAP:
        s = tanh(s * (scale / softcap))
        factor = softcap * LOG2E
    else:
        factor = scale * LOG2E
    if MASKED:
        j = n + tl.arange(0, BN)
        s = tl.where(visible(i[:, None], j[None, :], low[:, None], S, CAUSAL, WINDOW, STARTS), s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    p = tl.exp2(s * factor - (m_new - (LIFT if PRECISION == "split" else 0))[:, None])
    shrink = tl.exp2(m - m_new)
    l = l * shrink + tl.sum(p, 1)
    v = tile(V, b, hk, n, S, v_strides, BN, D0, D1, DESC, PRECISION)
    acc = add(times(acc, shrink[:, None], D1), p, v, D1, PRECISION)
    return acc, l, m_new


@triton.jit
def forward_kernel(Q, K, V, Out, Lse, Starts, Factors, q_strides, k_strides, v_strides, o_strides,
                   heads, H, T, S, window, scale, softcap, section,
                   G: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   CAUSAL: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr, SOFTCAP: tl.constexpr,
                   DESC: tl.constexpr, PRECISION: tl.constexpr):
    """Out (B, H, T, D) and Lse (B, H, T) of BM queries of one head. heads = B H."""
    bh, block = place(heads, tl.cdiv(T, BM), section, CAUSAL)
    b, h = bh // H, bh % H
    hk, i0 = h // G, block * BM
    low, first, full_first, end, full_end = bounds(Starts, b, i0, T, S, window, BM, CAUSAL, WINDOW, STARTS)
    n0, n1, n2, n3 = blocks_of(first, full_first, end, full_end, BN)
    i = i0 + tl.arange(0, BM) + (S - T)
    out_factor, lift = 1.0, 0
    if PRECISION == "split":
        factors = Factors + (b * (H // G) + hk) * 7
        scale, out_factor, lift = scale * tl.load(factors), tl.load(factors + 1), LIFT
    q = tile(Q, b, h, i0, T, q_strides, BM, D0, D1, DESC, PRECISION)
    acc = zeros(BM, D0, D1)
    l = tl.zeros((BM,), tl.float32)
    m = tl.full((BM,), LOWEST, tl.float32)
    for n in tl.range(n1, n2, BN):
        acc, l, m = forward_step(acc, l, m, q, K, V, b, hk, n, S, k_strides, v_strides, i, low, scale, softcap, BN,
                                 D0, D1, CAUSAL, WINDOW, STARTS, SOFTCAP, DESC, PRECISION, False)
    for step in tl.range(0, n1 - n0 + n3 - n2, BN):
        n = n0 + step + tl.where(step >= n1 - n0, n2 - n1, 0)
        acc, l, m = forward_step(acc, l, m, q, K, V, b, hk, n, S, k_strides, v_strides, i, low, scale, softcap, BN,
                                 D0, D1, CAUSAL, WINDOW, STARTS, SOFTCAP, DESC, PRECISION, True)
    some = l > 0
    acc = times(acc, tl.where(some, out_factor / tl.where(some, l, 1.0), 0.0)[:, None], D1)
    store(Out, acc, b, h, i0, T, o_strides, BM, D0, D1, DESC)
    rows = i0 + tl.arange(0, BM)
    lse = tl.where(some, (m + tl.log2(tl.where(some, l, 1.0)) - lift) / LOG2E, float("-inf"))
    tl.store(Lse + wide(bh) * T + rows, lse, mask=rows < T)


@triton.jit
def split_kernel(X, Factor, Halves, x_strides, T, H, G, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr):
    """Halves (B, H, T, 2 D), dense, float16: high + low = X times Factor (B, K), a power of two."""
    i0, h, b = tl.program_id(0) * BM, tl.program_id(1), tl.program_id(2)
    i, d = tl.arange(0, BM), tl.arange(0, DP)
    inside = (i0 + i < T)[:, None] & (d < D)[None, :]
    at = wide(b) * x_strides[0] + wide(h) * x_strides[1] + wide(i0) * x_strides[2]
    x = tl.load(X + (at + wide(i) * x_strides[2])[:, None] + d[None, :], inside, 0.0) * tl.load(Factor + (b * H + h) // G)
    high = x.to(tl.float16)
    to = Halves + ((wide(b) * H + h) * T + i0) * (2 * D) + i[:, None] * (2 * D) + d[None, :]
    tl.store(to, high, inside)
    tl.store(to + D, (x - high).to(tl.float16), inside)


@triton.jit
def delta_kernel(Out, DOut, Lse, DLse, Delta, Bounded, o_strides, do_strides, dl_strides, H, T, padded,
                 HAS_DLSE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr):
    """Delta = rowsum(dO O) - dlse and Bounded = lse, both (B, H, padded): +inf where there is no key or no query, so that
    the backward's P is 0 there; in the domain of exp2, unless float32 is split."""
    bh, i0 = tl.program_id(0), tl.program_id(1) * BM        # an axis beyond the first ends at 65,535
    b, h = wide(bh // H), wide(bh % H)
    i, d = i0 + tl.arange(0, BM), tl.arange(0, DP)
    inside = (i < T)[:, None] & (d < D)[None, :]
    i64 = wide(i)
    o = tl.load(Out + b * o_strides[0] + h * o_strides[1] + i64[:, None] * o_strides[2] + d[None, :], inside, 0.0)
    do = tl.load(DOut + b * do_strides[0] + h * do_strides[1] + i64[:, None] * do_strides[2] + d[None, :], inside, 0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(DLse + b * dl_strides[0] + h * dl_strides[1] + i64 * dl_strides[2], i < T, 0.0)
    lse = tl.load(Lse + (b * H + h) * T + i, i < T, float("-inf"))
    at = (b * H + h) * padded + i
    tl.store(Delta + at, delta)
    tl.store(Bounded + at, tl.where(lse == float("-inf"), float("inf"), lse * (1.0 if PRECISION == "split" else LOG2E)))


@triton.jit
def probabilities(s, lse, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """P, and the derivative of the capped by the plain score. lse: as delta_kernel leaves it."""
    slope = 1.0
    factor = scale
    if SOFTCAP:
        s = tanh(s * (scale / softcap))
        slope = 1 - s * s
        factor = softcap
    if PRECISION == "split":        # subtracted first: at logits of 100 a rounded product would cost 5e-6 of P
        return tl.exp2((s * factor - lse) * LOG2E + LIFT), slope
    else:
        return tl.exp2(s * (factor * LOG2E) - lse), slope


@triton.jit
def dkdv_step(dk, dv, k, v, Q, DOut, Lse, Delta, b, h, m0, H, T, S, padded, q_strides, do_strides, j, Starts, window,
              scale, softcap, delta_factor, ds_factor, BM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
              CAUSAL: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr, SOFTCAP: tl.constexpr,
              DESC: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    rows = m0 + tl.arange(0, BM)
    at = wide(b * H + h) * padded + rows
    lse = tl.load(Lse + at)
    q = tile(Q, b, h, m0, T, q_strides, BM, D0, D1, DESC, PRECISION)
    p, slope = probabilities(inner(k, q, D1, PRECISION), lse[None, :], scale, softcap, SOFTCAP, PRECISION)
    if MASKED:
        i = rows + (S - T)
        low = tl.zeros((BM,), tl.int32)
        if WINDOW:
            low = i + 1 - window
        if STARTS:
            low = tl.maximum(low, tl.load(Starts + wide(b) * T + rows, mask=rows < T, other=S))
        p = tl.where(visible(i[None, :], j[:, None], low[None, :], S, CAUSAL, WINDOW, STARTS), p, 0.0)
    do = tile(DOut, b, h, m0, T, do_strides, BM, D0, D1, DESC, PRECISION)
    dv = add(dv, p, do, D1, PRECISION)
    delta = tl.load(Delta + at)         # here and not above: it needs registers
    if PRECISION == "split":
        delta = delta * delta_factor
    ds = p * (inner(v, do, D1, PRECISION) - delta[None, :]) * slope
    if PRECISION == "split":
        ds = ds * ds_factor
    return add(dk, ds, q, D1, PRECISION), dv


@triton.jit
def dkdv_kernel(Q, K, V, DOut, DK, DV, Lse, Delta, Starts, Ends, Factors, q_strides, k_strides, v_strides,
                do_strides, dk_strides, dv_strides, heads, H, T, S, padded, window, scale, softcap, section,
                G: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                CAUSAL: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr, SOFTCAP: tl.constexpr,
                DESC: tl.constexpr, PRECISION: tl.constexpr):
    """DK and DV (B, K, S, D) of BN keys of one key head, over the G query heads that read it; heads = B K.
    Ends (B, S): behind the last query whose start is at or before a key."""
    bh, block = place(heads, tl.cdiv(S, BN), section, False)
    b, hk = bh // (H // G), bh % (H // G)
    j0 = block * BN
    last = min(j0 + BN, S) - 1
    # queries first .. end see some of these keys, full_first .. full_end all of them
    first, full_first, end, full_end = 0, 0, T, T
    if CAUSAL:
        first, full_first = max(j0 - (S - T), 0), max(last - (S - T), 0)
    if WINDOW:
        end, full_end = min(T, last - (S - T) + window), min(T, j0 - (S - T) + window)
    if STARTS:
        at = Ends + wide(b) * S
        end, full_end = min(end, tl.load(at + last)), min(full_end, tl.load(at + j0))
    m0, m1, m2, m3 = blocks_of(first, full_first, max(end, 0), max(full_end, 0), BM)
    if not WINDOW and not STARTS:       # rows outside have P = 0 by their lse: no mask at the end
        m2 = m3
    dk_factor, dv_factor, delta_factor, ds_factor = scale, 1.0, 1.0, 1.0
    if PRECISION == "split":
        factors = Factors + (b * (H // G) + hk) * 7
        scale, delta_factor, ds_factor = scale * tl.load(factors), tl.load(factors + 2), tl.load(factors + 3)
        dk_factor, dv_factor = dk_factor * tl.load(factors + 5), tl.load(factors + 6)
    j = j0 + tl.arange(0, BN)
    k = tile(K, b, hk, j0, S, k_strides, BN, D0, D1, DESC, PRECISION)
    v = tile(V, b, hk, j0, S, v_strides, BN, D0, D1, DESC, PRECISION)
    dk, dv = zeros(BN, D0, D1), zeros(BN, D0, D1)
    # one flat loop over heads and blocks, so that its pipeline drains once; (h, m) are carried, a division costs registers
    h, m = hk * G, m1
    for _ in tl.range(0, G * (m2 - m1), BM):
        dk, dv = dkdv_step(dk, dv, k, v, Q, DOut, Lse, Delta, b, h, m, H, T, S, padded, q_strides, do_strides, j, Starts,
                           window, scale, softcap, delta_factor, ds_factor, BM, D0, D1, CAUSAL, WINDOW, STARTS, SOFTCAP,
                           DESC, PRECISION, False)
        m += BM
        if G > 1:
            h, m = tl.where(m < m2, h, h + 1), tl.where(m < m2, m, m1)
    h, m = hk * G, tl.where(m0 < m1, m0, m2)
    for _ in tl.range(0, G * (m1 - m0 + m3 - m2), BM):
        dk, dv = dkdv_step(dk, dv, k, v, Q, DOut, Lse, Delta, b, h, m, H, T, S, padded, q_strides, do_strides, j, Starts,
                           window, scale, softcap, delta_factor, ds_factor, BM, D0, D1, CAUSAL, WINDOW, STARTS, SOFTCAP,
                           DESC, PRECISION, True)
        m += BM
        m = tl.where(m == m1, m2, m)
        if G > 1:
            h, m = tl.where(m < m3, h, h + 1), tl.where(m < m3, m, tl.where(m0 < m1, m0, m2))
    store(DV, times(dv, dv_factor, D1), b, hk, j0, S, dv_strides, BN, D0, D1, DESC)
    store(DK, times(dk, dk_factor, D1), b, hk, j0, S, dk_strides, BN, D0, D1, DESC)


@triton.jit
def dq_step(dq, q, do, lse, delta, K, V, b, hk, n, S, k_strides, v_strides, i, low, scale, softcap, ds_factor,
            BN: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
            STARTS: tl.constexpr, SOFTCAP: tl.constexpr, DESC: tl.constexpr, PRECISION: tl.constexpr,
            MASKED: tl.constexpr):
    k = tile(K, b, hk, n, S, k_strides, BN, D0, D1, DESC, PRECISION)
    v = tile(V, b, hk, n, S, v_strides, BN, D0, D1, DESC, PRECISION)
    p, slope = probabilities(inner(q, k, D1, PRECISION), lse[:, None], scale, softcap, SOFTCAP, PRECISION)
    if MASKED:
        j = n + tl.arange(0, BN)
        p = tl.where(visible(i[:, None], j[None, :], low[:, None], S, CAUSAL, WINDOW, STARTS), p, 0.0)
    ds = p * (inner(do, v, D1, PRECISION) - delta[:, None]) * slope
    if PRECISION == "split":
        ds = ds * ds_factor
    return add(dq, ds, k, D1, PRECISION)


@triton.jit
def dq_kernel(Q, K, V, DOut, DQ, Lse, Delta, Starts, Factors, q_strides, k_strides, v_strides, do_strides, dq_strides,
              heads, H, T, S, padded, window, scale, softcap, section,
              G: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              CAUSAL: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr, SOFTCAP: tl.constexpr,
              DESC: tl.constexpr, PRECISION: tl.constexpr):
    """DQ (B, H, T, D) of BM queries of one head. heads = B H."""
    bh, block = place(heads, tl.cdiv(T, BM), section, CAUSAL)
    b, h = bh // H, bh % H
    hk, i0 = h // G, block * BM
    low, first, full_first, end, full_end = bounds(Starts, b, i0, T, S, window, BM, CAUSAL, WINDOW, STARTS)
    n0, n1, n2, n3 = blocks_of(first, full_first, end, full_end, BN)
    rows = i0 + tl.arange(0, BM)
    i = rows + (S - T)
    q = tile(Q, b, h, i0, T, q_strides, BM, D0, D1, DESC, PRECISION)
    do = tile(DOut, b, h, i0, T, do_strides, BM, D0, D1, DESC, PRECISION)
    at = wide(bh) * padded + rows
    lse, delta = tl.load(Lse + at), tl.load(Delta + at)
    dq_factor, ds_factor = scale, 1.0
    if PRECISION == "split":
        factors = Factors + (b * (H // G) + hk) * 7
        delta, ds_factor = delta * tl.load(factors + 2), tl.load(factors + 3)
        scale, dq_factor = scale * tl.load(factors), dq_factor * tl.load(factors + 4)
    dq = zeros(BM, D0, D1)
    for n in tl.range(n1, n2, BN):
        dq = dq_step(dq, q, do, lse, delta, K, V, b, hk, n, S, k_strides, v_strides, i, low, scale, softcap, ds_factor,
                     BN, D0, D1, CAUSAL, WINDOW, STARTS, SOFTCAP, DESC, PRECISION, False)
    for step in tl.range(0, n1 - n0 + n3 - n2, BN):
        n = n0 + step + tl.where(step >= n1 - n0, n2 - n1, 0)
        dq = dq_step(dq, q, do, lse, delta, K, V, b, hk, n, S, k_strides, v_strides, i, low, scale, softcap, ds_factor,
                     BN, D0, D1, CAUSAL, WINDOW, STARTS, SOFTCAP, DESC, PRECISION, True)
    store(DQ, times(dq, dq_factor, D1), b, h, i0, T, dq_strides, BM, D0, D1, DESC)


@triton.jit
def decode_kernel(Q, K, V, Parts, Lses, Starts, q_strides, k_strides, v_strides, H, T, S, splits, window, scale, softcap,
                  G: tl.constexpr, R: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BN: tl.constexpr,
                  SPLIT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr,
                  SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Parts (B, K, splits, R, D) and Lses (B, K, splits, R), log2: the T queries of the G heads of a key head, as R rows,
    against SPLIT keys. Where a part begins depends on S alone, so a sequence's result does not depend on its batch."""
    split, hk, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    K_heads = H // G
    r = tl.arange(0, R)
    t, h = r // G, hk * G + r % G
    inside = t < T
    at = Q + wide(b) * q_strides[0] + (wide(h) * q_strides[1] + wide(t) * q_strides[2])[:, None]
    if D1:
        q = (tl.load(at + tl.arange(0, D0)[None, :], inside[:, None], 0.0),
             tl.load(at + D0 + tl.arange(0, D1)[None, :], inside[:, None], 0.0))
    else:
        q = (tl.load(at + tl.arange(0, D0)[None, :], inside[:, None], 0.0),)
    i = t + (S - T)
    low = tl.zeros((R,), tl.int32)
    first, end = split * SPLIT, min(S, split * SPLIT + SPLIT)
    if WINDOW:
        low = i + 1 - window
        first = max(first, (S - T + 1 - window) // BN * BN)
    if STARTS:
        low = tl.maximum(low, tl.load(Starts + wide(b) * T + t, mask=inside, other=S))
        first = max(first, tl.load(Starts + wide(b) * T) // BN * BN)
    acc = zeros(R, D0, D1)
    l = tl.zeros((R,), tl.float32)
    m = tl.full((R,), LOWEST, tl.float32)
    for n in tl.range(first, end, BN):
        acc, l, m = forward_step(acc, l, m, q, K, V, b, hk, n, S, k_strides, v_strides, i, low, scale, softcap, BN,
                                 D0, D1, CAUSAL, WINDOW, STARTS, SOFTCAP, False, PRECISION, True)
    some = l > 0
    acc = times(acc, tl.where(some, 1 / tl.where(some, l, 1.0), 0.0)[:, None], D1)
    out = wide((b * K_heads + hk) * splits + split) * R
    tl.store(Lses + out + r, tl.where(some, m + tl.log2(tl.where(some, l, 1.0)), float("-inf")))
    at = Parts + (out + r)[:, None] * (D0 + D1)
    tl.store(at + tl.arange(0, D0)[None, :], acc[0])
    if D1:
        tl.store(at + D0 + tl.arange(0, D1)[None, :], acc[1])


@triton.jit
def combine_kernel(Parts, Lses, Out, Lse, o_strides, H, T, splits, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
                   DP: tl.constexpr):
    """Out and Lse of one query of one head out of its parts, in their order."""
    t, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = t * G + h % G
    d = tl.arange(0, DP)
    at = wide((b * (H // G) + h // G) * splits) * R + row
    m = tl.full((), LOWEST, tl.float32)
    l = tl.zeros((), tl.float32)
    acc = tl.zeros((DP,), tl.float32)
    for _ in tl.range(0, splits):
        lse = tl.load(Lses + at)
        m_new = tl.maximum(m, lse)
        shrink, weight = tl.exp2(m - m_new), tl.exp2(lse - m_new)
        acc = acc * shrink + weight * tl.load(Parts + at * D + d, d < D, 0.0)
        l = l * shrink + weight
        m = m_new
        at += R
    some = l > 0
    whole = tl.where(some, l, 1.0)
    out = Out + wide(b) * o_strides[0] + wide(h) * o_strides[1] + wide(t) * o_strides[2] + d
    tl.store(out, tl.where(some, acc / whole, 0.0).to(Out.dtype.element_ty), d < D)
    tl.store(Lse + wide(b * H + h) * T + t, tl.where(some, (m + tl.log2(whole)) / LOG2E, float("-inf")))
