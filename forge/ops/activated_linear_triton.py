"""The MLP's activations as Triton kernels, forward and backward; each element is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def block(stride, N, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(offsets of this program's block in rows so far apart, which of them exist)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row.to(tl.int64) * stride + column, (row < N) & (column < F)


@triton.jit
def activation_kernel(H, A, N, F: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A (N, F) of H (N, F), or (N, 2 F) for swiglu: gate, then up."""
    to, there = block(F, N, F, ROWS, BLOCK)
    at, _ = block(2 * F if KIND == "swiglu" else F, N, F, ROWS, BLOCK)
    x = tl.load(H + at, mask=there).to(tl.float32)
    if KIND == "swiglu":
        a = x * sigmoid(x) * tl.load(H + at + F, mask=there).to(tl.float32)
    elif KIND == "relu2":
        x = tl.maximum(x, 0.0)
        a = x * x
    else:       # gelu: 0.5 x (1 + tanh u) = x sigmoid(2 u)
        a = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    tl.store(A + to, a.to(A.dtype.element_ty), mask=there)


@triton.jit
def activation_backward_kernel(DA, H, DH, A, N, F: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
                               BLOCK: tl.constexpr):
    """DH as H, from DA (N, F); and A (N, F) once more, which the weight's gradient needs."""
    to, there = block(F, N, F, ROWS, BLOCK)
    at, _ = block(2 * F if KIND == "swiglu" else F, N, F, ROWS, BLOCK)
    da = tl.load(DA + to, mask=there).to(tl.float32)
    x = tl.load(H + at, mask=there).to(tl.float32)
    if KIND == "swiglu":
        up = tl.load(H + at + F, mask=there).to(tl.float32)
        s = sigmoid(x)
        a = x * s * up
        dx = da * up * s * (1.0 + x * (1.0 - s))
        tl.store(DH + at + F, (da * x * s).to(DH.dtype.element_ty), mask=there)
    elif KIND == "relu2":
        x = tl.maximum(x, 0.0)
        a = x * x
        dx = 2.0 * x * da
    else:
        s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        a = x * s
        dx = da * (s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x))
    tl.store(DH + at, dx.to(DH.dtype.element_ty), mask=there)
    tl.store(A + to, a.to(A.dtype.element_ty), mask=there)
