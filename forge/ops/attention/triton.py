"""Fused attention in Triton, for NVIDIA GPUs from sm_80 on: launches the kernels of triton_kernels.py.

Forward; delta; dK and dV together, a program for each block of keys, which sums over the query heads of its group in
float32 registers; dQ, a program for each block of queries. No atomics: equal to the bit, run after run. Few queries
against many keys (decoding) are cut along the keys instead, and the parts combined in their order.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from forge.ops.attention import Case

HEAD_DIMS = {16: (16, 0), 32: (32, 0), 48: (32, 16), 64: (64, 0), 80: (64, 16), 96: (64, 32), 128: (128, 0), 256: (256, 0)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DECODE_ROWS, DECODE_KEYS = 64, 1024     # at most so many rows of queries, at least so many keys, are cut along the keys
SPLIT = 256                             # keys in one part of decoding
PAD = 128                               # the largest block of queries


class Tile(NamedTuple):
    """How a kernel is cut: queries and keys in a block, warps, stages of the pipeline; by TMA or by pointers."""

    rows: int
    columns: int
    warps: int
    stages: int
    tma: bool = True

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}w{self.warps}s{self.stages}" + "" * self.tma


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def supports(case: Case) -> str | None:
    if case.device != "cuda" and not interpreted():
        return "needs an NVIDIA GPU"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if case.device == "cuda" and (torch.version.hip or torch.cuda.get_device_capability() < (8, 0)):
        return "needs an NVIDIA GPU of compute capability 8.0 or later"
    if case.dtype not in DTYPES:
        return f"knows no {str(case.dtype)[6:]}"
    if case.head_dim not in HEAD_DIMS:
        return f"head_dim {case.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    return None


def tiles(kernel: str, D: int, itemsize: int, sm: int) -> list[Tile]:
    """Candidates, the usual best first."""
    if itemsize == 4:
        return [Tile(64, 32, 4, 2)]
    if kernel == "forward":
        return [Tile(64, 128, 4, 2) if D <= 64 else Tile(128, 64, 4, 2) if D <= 128 else Tile(64, 32, 4, 2)]
    if kernel == "dkdv":
        return [Tile(128, 64, 4, 2) if D <= 64 else Tile(64, 64, 4, 2) if D <= 128 else Tile(32, 32, 4, 2)]
    return [Tile(128, 64, 4, 3) if D <= 64 else Tile(128, 64, 8, 3) if D <= 128 else Tile(64, 32, 4, 2)]


def precision(dtype: torch.dtype) -> str:
    """Of a float32 product: as exact as float32, unless torch.set_float32_matmul_precision asks for less."""
    if dtype != torch.float32:
        return "ieee"       # not read: the products of 16 bit are exact
    return "split" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@functools.cache
def l2_bytes() -> int:
    return torch.cuda.get_device_properties().L2_cache_size if torch.cuda.is_available() else 32 << 20


class Launch:
    """The arguments that the kernels share, and the launches themselves."""

    def __init__(self, q: Tensor, k: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
                 softcap: float | None) -> None:
        from forge.ops.attention import triton_kernels

        self.kernels = triton_kernels
        self.B, self.T, self.H, self.D = q.shape
        self.S, self.K = k.shape[1:3]
        self.itemsize = q.element_size()
        self.starts = q if starts is None else starts.contiguous()      # what is not read may be any tensor
        D0, D1 = HEAD_DIMS[self.D]
        self.numbers = dict(window=window or 0, scale=scale, softcap=softcap or 0.0)
        self.meta = dict(G=self.H // self.K, D0=D0, D1=D1, CAUSAL=causal, WINDOW=window is not None,
                         STARTS=starts is not None, SOFTCAP=softcap is not None, PRECISION=precision(q.dtype))
        self.sm = 90 if q.device.type == "cpu" else 10 * torch.cuda.get_device_capability(q.device)[0]

    def tile(self, kernel: str, tensors: list[Tensor]) -> Tile:
        """The tile, without TMA where a tensor does not fit it: its strides are multiples of 16 bytes."""
        tile = tiles(kernel, self.D, self.itemsize, self.sm)[0]
        tma = tile.tma and self.sm >= 90 and not self.meta["D1"] and all(
            x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:3]) for x in tensors)
        return tile._replace(tma=tma)

    def args(self, tile: Tile, **tensors: tuple[Tensor, int]) -> dict[str, Any]:
        """name=(tensor (B, T, H, D), rows of its block) -> the tensor and its strides as the kernel takes them."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        args: dict[str, Any] = {}
        for name, (x, rows) in tensors.items():
            view = x.transpose(1, 2)                                    # (B, H, T, D)
            args[name] = TensorDescriptor.from_tensor(view, [1, 1, rows, self.D]) if tile.tma else view
            short = {"Out": "o", "DOut": "do"}.get(name, name.lower())
            args[f"{short}_strides"] = tuple(view.stride()[:3])
        return args

    def split(self, *tensors: Tensor, dlse: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """q, k, v (and dout) as float16 halves, (B, T, H, 2 D) each, and the factors that undo their scales.

        One scale for a tensor and key head, so that a sequence does not depend on its batch: 2^14 over the largest norm of a
        row, which bounds every product by 2^28.
        """
        if self.meta["PRECISION"] != "split":
            return list(tensors), tensors[0]
        norms = [self.by_group(torch.linalg.vector_norm(x, dim=-1).amax(1)) for x in tensors]       # (B, K) each
        scales = [power_below(2.0 ** 14 / norm) for norm in norms]
        halves = []
        for x, scale in zip(tensors, scales):
            B, T, H, D = x.shape
            both = torch.empty(B, H, T, 2 * D, dtype=torch.float16, device=x.device)
            self.kernels.split_kernel[(-(-T // 32), H, B)](
                X=x, Factor=scale, Halves=both, x_strides=tuple(x.transpose(1, 2).stride()[:3]), T=T, H=H, G=H // self.K, D=D,
                DP=1 << (D - 1).bit_length(), BM=32, num_warps=4)
            halves.append(both.transpose(1, 2))
        sq, sk, sv, *sdo = scales
        factors = [1 / (sq * sk), 1 / sv]
        if dlse is not None:
            largest = norms[2] * norms[3] + self.by_group(dlse.abs().amax(2))       # |dS| is at most twice that
            sds = power_below(2.0 ** 14 / largest)
            factors += [sv * sdo[0], sds / (2.0 ** 15 * sv * sdo[0]), 1 / (sds * sk), 1 / (sds * sq), 1 / (2.0 ** 15 * sdo[0])]
        else:
            factors += [sv] * 5     # not read
        return halves, torch.stack(factors, -1).contiguous()

    def by_group(self, x: Tensor) -> Tensor:
        """(B, heads) -> (B, K): the largest of the heads of a group."""
        return x.view(self.B, self.K, -1).amax(2)

    def section(self, heads: int, rows: int) -> int:
        """Heads worked on at a time: as many as have the rows that they read in half of the L2 cache."""
        return max(1, min(heads, l2_bytes() // 2 // (2 * rows * self.D * self.itemsize)))

    def options(self, tile: Tile) -> dict[str, Any]:
        return self.meta | dict(BM=tile.rows, BN=tile.columns, DESC=tile.tma, num_warps=tile.warps, num_stages=tile.stages)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        B, T, H, S = self.B, self.T, self.H, self.S
        G = H // self.K
        (q, k, v), factors = self.split(q, k, v)
        tile = self.tile("forward", [q, k, v, out])
        section = self.section(B * self.K, S) * G
        args = self.args(tile, Q=(q, tile.rows), K=(k, tile.columns), V=(v, tile.columns), Out=(out, tile.rows))
        self.kernels.forward_kernel[(B * H * -(-T // tile.rows),)](
            **args, Lse=lse, Starts=self.starts, Factors=factors, heads=B * H, H=H, T=T, S=S, section=section, **self.numbers,
            **self.options(tile))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        B, T, H, D, K, S = self.B, self.T, self.H, self.D, self.K, self.S
        G = H // K
        R = max(16, 1 << (T * G - 1).bit_length())
        splits = -(-S // SPLIT)
        parts = torch.empty(B, K, splits, R, D, dtype=torch.float32, device=q.device)
        lses = torch.empty(B, K, splits, R, dtype=torch.float32, device=q.device)
        tile = Tile(R, 64 if D * self.itemsize <= 256 else 32, 4, 2, tma=False)
        args = self.args(tile, Q=(q, R), K=(k, tile.columns), V=(v, tile.columns))
        options = self.options(tile)
        if self.meta["PRECISION"] == "split":       # the keys are read once: splitting them first would double the bytes
            options["PRECISION"] = "tf32x3"
        del options["DESC"], options["BM"]
        self.kernels.decode_kernel[(splits, K, B)](
            **args, Parts=parts, Lses=lses, Starts=self.starts, H=H, T=T, S=S, splits=splits, **self.numbers, R=R,
            SPLIT=SPLIT, **options)
        self.kernels.combine_kernel[(T, H, B)](
            Parts=parts, Lses=lses, Out=out, Lse=lse, o_strides=tuple(out.transpose(1, 2).stride()[:3]), H=H, T=T,
            splits=splits, G=G, R=R, D=D, DP=1 << (D - 1).bit_length(), num_warps=4)

    def backward(self, dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor,
                 dk: Tensor, dv: Tensor) -> None:
        B, T, H, D, K, S = self.B, self.T, self.H, self.D, self.K, self.S
        G = H // K
        padded = -(-T // PAD) * PAD
        delta, lse2 = (torch.empty(B, H, padded, dtype=torch.float32, device=q.device) for _ in range(2))
        rows = 64
        self.kernels.delta_kernel[(padded // rows, B * H)](
            Out=out, DOut=dout, Lse=lse, DLse=dlse, Delta=delta, Lse2=lse2,
            o_strides=tuple(out.transpose(1, 2).stride()[:3]), do_strides=tuple(dout.transpose(1, 2).stride()[:3]),
            dl_strides=tuple(dlse.stride()), H=H, T=T, padded=padded, D=D, DP=1 << (D - 1).bit_length(), BM=rows,
            num_warps=4)
        (q, k, v, dout), factors = self.split(q, k, v, dout, dlse=dlse)
        common = dict(Factors=factors, Lse2=lse2, Delta=delta, Starts=self.starts, H=H, T=T, S=S, padded=padded, **self.numbers)
        tile = self.tile("dkdv", [q, k, v, dout, dk, dv])
        ends = self.starts
        if self.meta["STARTS"]:
            keys = torch.arange(S, dtype=torch.int32, device=q.device).expand(B, S).contiguous()
            ends = torch.searchsorted(self.starts, keys, right=True, out_int32=True)
        args = self.args(tile, Q=(q, tile.rows), K=(k, tile.columns), V=(v, tile.columns), DOut=(dout, tile.rows),
                         DK=(dk, tile.columns), DV=(dv, tile.columns))
        self.kernels.dkdv_kernel[(B * K * -(-S // tile.columns),)](
            **args, **common, Ends=ends, heads=B * K, section=self.section(B * K, T * G), **self.options(tile))
        tile = self.tile("dq", [q, k, v, dout, dq])
        args = self.args(tile, Q=(q, tile.rows), K=(k, tile.columns), V=(v, tile.columns), DOut=(dout, tile.rows),
                         DQ=(dq, tile.rows))
        self.kernels.dq_kernel[(B * H * -(-T // tile.rows),)](
            **args, **common, heads=B * H, section=self.section(B * K, S) * G, **self.options(tile))


def power_below(x: Tensor) -> Tensor:
    """The power of two at or below x, between 2^-60 and 2^60; 1 where x is no number or not finite."""
    return torch.where(x.isfinite(), torch.exp2(x.log2().floor().clamp(-60, 60)), 1.0)


def unit(x: Tensor) -> Tensor:
    """x with a unit last stride, copied where it has another; a gradient of .sum() has stride 0."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("forge::triton_forward", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
            softcap: float | None) -> tuple[Tensor, Tensor]:
    """out (B, T, H, D) and lse (B, H, T)."""
    B, T, H, D = q.shape
    S = k.shape[1]
    if B == 0 or T == 0 or S == 0:
        return q.new_zeros(q.shape), q.new_full((B, H, T), -torch.inf, dtype=torch.float32)
    out, lse = q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)
    q, k, v = unit(q), unit(k), unit(v)
    launch = Launch(q, k, starts, causal, window, scale, softcap)
    (launch.decode if T * (H // k.shape[2]) <= DECODE_ROWS and S >= DECODE_KEYS else launch.forward)(q, k, v, out, lse)
    return out, lse


@torch.library.custom_op("forge::triton_backward", mutates_args=())
def backward(dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
             starts: Tensor | None, causal: bool, window: int | None, scale: float, softcap: float | None
             ) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, T, H, D), dk and dv (B, S, K, D)."""
    make = torch.empty if q.numel() and k.numel() else torch.zeros
    dq, dk, dv = (make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.numel() and k.numel():
        q, k, v, dout = unit(q), unit(k), unit(v), unit(dout)
        Launch(q, k, starts, causal, window, scale, softcap).backward(dout, dlse, q, k, v, out, lse, dq, dk, dv)
    return dq, dk, dv


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
      softcap: float | None) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)


@backward.register_fake
def _(dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, starts, *output)


def grads(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple:
    q, k, v, starts, out, lse = ctx.saved_tensors
    return (*backward(dout, dlse, q, k, v, out, lse, starts, *ctx.rest), None, None, None, None, None)


forward.register_autograd(grads, setup_context=setup_context)


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
           softcap: float | None) -> tuple[Tensor, Tensor]:
    if scale < 0:
        q, scale = -q, -scale
    # at 0 all logits are equal, but hidden ones, which are -inf times this
    return forward(q, k, v, starts, causal, window, scale or 1e-30, softcap)
