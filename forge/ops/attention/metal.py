"""Fused attention on Apple GPUs: launches the kernels of attention.metal through torch.mps.compile_shader.

Forward; delta; dK and dV, which sum over the query heads of their group; dQ. No atomics: equal to the bit, run after run.
Verified in an emulator of Metal's language on Linux (tests/metal), not yet on Apple hardware.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge.ops.attention.custom_op import differentiable, unit

if TYPE_CHECKING:
    from forge.ops.attention import Case

# Which design of attention.metal a head_dim takes: matrices of 8 x 8 unless it is too short to fill them. Not yet measured.
DESIGNS = {16: "rows", 32: "tiles", 48: "tiles", 64: "tiles", 80: "tiles", 96: "tiles", 128: "tiles"}
TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
SOURCE = Path(__file__).with_name("attention.metal")
ROWS = 32       # queries, or keys, that a group of threads owns
THREADS = {"rows": ROWS, "tiles": 4 * ROWS}     # in a group
compile_for_cpu: Callable[[str], Any] | None = None     # the tests' emulator, which runs the kernels on CPU tensors


def supports(case: Case) -> str | None:
    if case.device != "mps" and not (case.device == "cpu" and compile_for_cpu):
        return "needs an Apple GPU"
    if case.dtype not in TYPES:
        return f"knows no {str(case.dtype)[6:]}"
    if case.head_dim not in DESIGNS:
        return f"head_dim {case.head_dim} is not one of {', '.join(map(str, DESIGNS))}"
    return None


def instances(dtype: torch.dtype, D: int, which: str) -> dict[str, str]:
    """{name: the kernel with its template arguments} for a dtype, head_dim and design.

    A tile of `rows` is at most 8 KB of float32 a side. From head_dim 80 on dK and dV are made by kernels of their own: the
    sums of both would not stay in registers.
    """
    T = TYPES[dtype]
    end = f", {32 if D <= 64 else 16}" if which == "rows" else ""
    apart = {"dk": "1, 0", "dv": "0, 1"} if D > 64 else {"dkdv": "1, 1"}
    return {"delta": f"delta<{T}, {D}>", "forward": f"forward_{which}<{T}, {D}{end}>", "dq": f"dq_{which}<{T}, {D}{end}>",
            **{name: f"dkdv_{which}<{T}, {D}{end}, {gradients}>" for name, gradients in apart.items()}}


def source(dtype: torch.dtype, D: int, which: str) -> str:
    """The text that is compiled for a dtype, head_dim and design."""
    return SOURCE.read_text(encoding="ascii") + "".join(
        f'template [[host_name("{name}")]] [[kernel]] decltype({kernel}) {kernel};\n'
        for name, kernel in instances(dtype, D, which).items())


@functools.cache
def library(dtype: torch.dtype, D: int, which: str, compile_: Callable[[str], Any]) -> Any:
    try:
        return compile_(source(dtype, D, which))
    except SyntaxError as error:        # as torch reports what Metal's compiler says
        raise RuntimeError(f"attention.metal does not compile here: {error}") from error


class Launch:
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int | None,
                 scale: float, softcap: float | None) -> None:
        self.B, self.T, self.H, self.D = q.shape
        self.S, self.K = k.shape[1:3]
        self.q, self.k, self.v = unit(q), unit(k), unit(v)
        self.starts = self.q if starts is None else starts.contiguous()     # what is not read may be any tensor
        self.numbers = struct.pack("<7i2fi", self.T, self.S, self.H, self.K, causal, window or 0, starts is not None, scale,
                                   softcap or 0.0, 0)
        compile_ = torch.mps.compile_shader if q.device.type == "mps" else compile_for_cpu
        assert compile_ is not None
        which = DESIGNS[self.D]
        self.threads = THREADS[which]
        self.library = library(q.dtype, self.D, which, compile_)

    def problem(self, dout: Tensor) -> list[int]:
        """attention.metal's struct Problem, as bytes."""
        strides = [n for x in (self.q, self.k, self.v, dout) for n in x.stride()[:3]]
        return list(self.numbers + struct.pack("<12q", *strides))

    def forward(self, out: Tensor, lse: Tensor) -> None:
        self.library.forward(self.q, self.k, self.v, self.starts, out, lse, self.problem(out), arg_casts={6: "uint8"},
                             **self.grid(self.T, self.H))

    def backward(self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
                 ) -> None:
        dout = unit(dout)
        problem = self.problem(dout)
        delta = torch.empty_like(lse)
        self.library.delta(out, dout, lse if dlse is None else dlse.contiguous(), delta, problem, int(dlse is not None),
                           arg_casts={4: "uint8", 5: "int32"}, threads=(-(-self.T // 32) * 32, self.H, self.B),
                           group_size=(32, 1, 1))
        given = (self.q, self.k, self.v, self.starts, dout, lse, delta)
        for name in ("dkdv",) if "dkdv" in dir(self.library) else ("dk", "dv"):
            getattr(self.library, name)(*given, dk, dv, problem, arg_casts={9: "uint8"}, **self.grid(self.S, self.K))
        self.library.dq(*given, dq, problem, arg_casts={8: "uint8"}, **self.grid(self.T, self.H))

    def grid(self, rows: int, heads: int) -> dict[str, tuple[int, int, int]]:
        """threads counts threads, not groups."""
        return {"threads": (-(-rows // ROWS) * self.threads, heads, self.B), "group_size": (self.threads, 1, 1)}


@torch.library.custom_op("forge::metal_forward", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
            softcap: float | None) -> tuple[Tensor, Tensor]:
    """out (B, T, H, D), lse (B, H, T) float32."""
    B, T, H, D = q.shape
    if not (q.numel() and k.numel()):
        return q.new_zeros(B, T, H, D), q.new_full((B, H, T), float("-inf"), dtype=torch.float32)
    out, lse = q.new_empty(B, T, H, D), q.new_empty((B, H, T), dtype=torch.float32)
    Launch(q, k, v, starts, causal, window, scale, softcap).forward(out, lse)
    return out, lse


@torch.library.custom_op("forge::metal_backward", mutates_args=())
def backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
             starts: Tensor | None, causal: bool, window: int | None, scale: float, softcap: float | None
             ) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, T, H, D), dk and dv (B, S, K, D)."""
    make = torch.empty if q.numel() and k.numel() else torch.zeros
    dq, dk, dv = (make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.numel() and k.numel():
        Launch(q, k, v, starts, causal, window, scale, softcap).backward(dout, dlse, out, lse, dq, dk, dv)
    return dq, dk, dv


differentiable(forward, backward)


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
           softcap: float | None) -> tuple[Tensor, Tensor]:
    out, lse = forward(q, k, v, starts, causal, window, scale, softcap)
    return out, lse
