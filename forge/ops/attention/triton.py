"""Fused attention in Triton, for NVIDIA GPUs from sm_80 on: launches the kernels of triton_kernels.py.

Forward; delta; dK and dV together, a program for each block of keys, which sums over the query heads of its group in
float32 registers; dQ, a program for each block of queries. No atomics: equal to the bit, run after run. Few queries
against many keys (decoding) are cut along the keys instead, and the parts combined in their order.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from forge.ops.attention.custom_op import differentiable, unit

if TYPE_CHECKING:
    from forge.ops.attention import Case

HEAD_DIMS = {16: (16, 0), 32: (32, 0), 48: (32, 16), 64: (64, 0), 80: (64, 16), 96: (64, 32), 128: (128, 0), 256: (256, 0)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DECODE_ROWS, DECODE_KEYS = 64, 1024     # at most so many rows of queries, at least so many keys, are cut along the keys
SPLIT = 256                             # keys in one part of decoding
PAD = 128                               # the largest block of queries


class Tile(NamedTuple):
    """How a kernel is cut: queries and keys in a block, warps, stages of its pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}w{self.warps}s{self.stages}"


@functools.cache
def parse(texts: str) -> list[Tile]:
    """Tiles out of their texts. Raises ValueError for what is none."""
    tiles = []
    for text in texts.split():
        found = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)", text)
        if found is None:
            raise ValueError(f"{text!r} is no tile of attention; one looks like 128x64w8s3: queries, keys, warps, stages")
        tiles.append(Tile(*map(int, found.groups())))
    return tiles


KERNELS = ("forward", "dkdv", "dq")
# Candidates for head_dim up to 64, 96, 128, 256 in 16 bit and in float32, the fastest on an H200 first (docs/RESULTS.md)
TILES = {
    ("forward", 64, 2): "64x128w4s2 64x64w4s2 128x64w8s3 128x64w4s3", ("forward", 64, 4): "64x64w4s3 128x64w8s2 64x32w4s2",
    ("forward", 96, 2): "64x64w4s3 128x64w4s2", ("forward", 96, 4): "64x64w4s2 64x32w4s2",
    ("forward", 128, 2): "64x64w4s3 128x64w4s2 128x64w8s3", ("forward", 128, 4): "128x64w8s2 64x64w4s3 64x32w4s2",
    ("forward", 256, 2): "128x64w8s2 64x32w4s3", ("forward", 256, 4): "64x32w4s1 64x16w4s2",
    ("dkdv", 64, 2): "64x64w4s3 32x64w4s3 128x64w4s2", ("dkdv", 64, 4): "64x64w4s2 32x64w4s2",
    ("dkdv", 96, 2): "32x64w4s3 64x64w4s2", ("dkdv", 96, 4): "32x64w4s2 32x64w8s2",
    ("dkdv", 128, 2): "64x64w4s2 64x128w8s3 32x64w4s3", ("dkdv", 128, 4): "32x128w8s2 64x64w4s2",
    ("dkdv", 256, 2): "64x64w8s2 32x64w8s2", ("dkdv", 256, 4): "16x64w8s2 32x64w8s1",
    ("dq", 64, 2): "128x64w4s3 64x64w4s3", ("dq", 64, 4): "64x64w4s2 128x32w8s3",
    ("dq", 96, 2): "64x64w4s3 64x64w4s2", ("dq", 96, 4): "64x64w4s2 64x32w4s2",
    ("dq", 128, 2): "128x64w8s3 64x64w4s2", ("dq", 128, 4): "64x64w4s2 128x32w8s2",
    ("dq", 256, 2): "64x64w4s2 128x32w8s2", ("dq", 256, 4): "64x16w4s2"}
SMALL = "64x32w4s2 32x32w4s2 32x32w4s1 32x16w4s1 16x16w4s1"      # for GPUs with less shared memory; the last fits everywhere


def shared_bytes(kernel: str, tile: Tile, D: int, itemsize: int) -> int:
    """Of shared memory, nearly: the blocks that stay, and those that stream through the stages."""
    stay, stream = {"forward": (tile.rows, tile.columns), "dkdv": (2 * tile.columns, tile.rows),
                    "dq": (2 * tile.rows, tile.columns)}[kernel]
    return (stay + 2 * tile.stages * stream) * D * itemsize


@functools.cache
def candidates(kernel: str, D: int, itemsize: int, sm: int, shared: int, starts: bool) -> list[Tile]:
    """Those that fit into so many bytes of shared memory; the usual best first."""
    width = next(width for width in (64, 96, 128, 256) if width >= D)
    known, small = ([tile for tile in parse(texts) if shared_bytes(kernel, tile, D, itemsize) <= 0.97 * shared]
                    for texts in (TILES[kernel, width, itemsize], SMALL))
    tiles = known or small
    by_pointers = sm < 90 or HEAD_DIMS[D][0] != D       # which take registers
    if by_pointers or (starts and kernel == "dkdv"):    # documents end within blocks: the smaller, the less is masked
        tiles = sorted(tiles, key=lambda tile: tile.rows * tile.columns)
    return tiles


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@torch.compiler.assume_constant_result
def kernels_run(device: str, dtype: torch.dtype) -> bool:
    """Whether Triton's elementwise kernels can be had for tensors of a device."""
    return dtype != torch.float64 and installed() and (device == "cuda" or interpreted())


def supports(case: Case) -> str | None:
    if case.device != "cuda" and not interpreted():
        return "needs an NVIDIA GPU"
    if not installed():
        return "the package triton is not installed"
    if case.device == "cuda" and (torch.version.hip or torch.cuda.get_device_capability() < (8, 0)):
        return "needs an NVIDIA GPU of compute capability 8.0 or later"
    if case.dtype not in DTYPES:
        return f"knows no {str(case.dtype)[6:]}"
    if case.head_dim not in HEAD_DIMS:
        return f"head_dim {case.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    return None


def precision(dtype: torch.dtype) -> str:
    """Of a float32 product: as exact as float32, unless torch.set_float32_matmul_precision asks for less."""
    if dtype != torch.float32:
        return "ieee"       # not read: the products of 16 bit are exact
    return "split" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@functools.cache
def gpu() -> tuple[int, int, int]:
    """Compute capability as 10 major + minor, bytes of shared memory for a block, of the L2 cache."""
    if interpreted():
        return 90, 227 << 10, 50 << 20
    found = torch.cuda.get_device_properties()
    shared = found.shared_memory_per_block_optin        # type: ignore[attr-defined]
    return 10 * found.major + found.minor, shared, found.L2_cache_size


class Launch:
    """The arguments that the kernels share, and the launches themselves."""

    def __init__(self, q: Tensor, k: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
                 softcap: float | None, tiles: str) -> None:
        self.kernels: Any = importlib.import_module(f"{__package__}.triton_kernels")     # here, as it imports triton
        self.tiles = dict(zip(KERNELS, parse(tiles)))
        self.B, self.T, self.H, self.D = q.shape
        self.S, self.K = k.shape[1:3]
        self.itemsize = q.element_size()
        self.starts = q if starts is None else starts.contiguous()      # what is not read may be any tensor
        D0, D1 = HEAD_DIMS[self.D]
        if q.dtype == torch.float32 and D0 >= 128:      # in halves, whose sums need half of the registers at a time
            D0 = D1 = D0 // 2
        self.numbers = dict(window=window or 0, scale=scale, softcap=softcap or 0.0)
        self.meta = dict(G=self.H // self.K, D0=D0, D1=D1, CAUSAL=causal, WINDOW=window is not None,
                         STARTS=starts is not None, SOFTCAP=softcap is not None, PRECISION=precision(q.dtype))
        self.sm, self.shared, self.l2 = gpu()

    def tile(self, kernel: str) -> Tile:
        return self.tiles.get(kernel) or candidates(kernel, self.D, self.itemsize, self.sm, self.shared,
                                                     self.meta["STARTS"])[0]

    def tma(self, *tensors: Tensor) -> bool:
        """Whether the tensor memory accelerator can move these: addresses and strides are multiples of 16 bytes,
        none is 0. A head_dim in two parts that differ goes by pointers."""
        return self.sm >= 90 and self.meta["D1"] in (0, self.meta["D0"]) and all(
            x.data_ptr() % 16 == 0 and all(s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:3])
            for x in tensors)

    def args(self, tile: Tile, tma: bool, **tensors: tuple[Tensor, int]) -> dict[str, Any]:
        """name=(tensor (B, T, H, D), rows of its block) -> the tensor and its strides as the kernel takes them, and what
        is fixed when the kernel is compiled."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        args = self.meta | dict(BM=tile.rows, BN=tile.columns, DESC=tma, num_warps=tile.warps, num_stages=tile.stages,
                                enable_fp_fusion=True)
        for name, (x, rows) in tensors.items():
            view = x.transpose(1, 2)                                    # (B, H, T, D)
            args[name] = TensorDescriptor.from_tensor(view, [1, 1, rows, self.meta["D0"]]) if tma else view
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
                X=x, Factor=scale, Halves=both, x_strides=tuple(x.transpose(1, 2).stride()[:3]), T=T, H=H, G=H // self.K,
                D=D, DP=1 << (D - 1).bit_length(), BM=32, num_warps=4)
            halves.append(both.transpose(1, 2))
        sq, sk, sv, *sdo = scales
        factors = [1 / (sq * sk), 1 / sv]
        if sdo:
            largest = norms[2] * norms[3]       # |dS| is at most twice that, and what flows through lse
            if dlse is not None:
                largest = largest + self.by_group(dlse.abs().amax(2))
            sds = power_below(2.0 ** 14 / largest)
            lift = 2.0 ** 15 * sdo[0]
            factors += [sv * sdo[0], sds / (lift * sv), 1 / (sds * sk), 1 / (sds * sq), 1 / lift]
        else:
            factors += [sv] * 5     # not read
        return halves, torch.stack(factors, -1).contiguous()

    def by_group(self, x: Tensor) -> Tensor:
        """(B, heads) -> (B, K): the largest of the heads of a group."""
        return x.view(self.B, self.K, -1).amax(2)

    def section(self, heads: int, rows: int) -> int:
        """Heads worked on at a time: as many as have the rows that they read in half of the L2 cache."""
        return max(1, min(heads, self.l2 // 2 // (2 * rows * self.D * self.itemsize)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        B, T, H, S = self.B, self.T, self.H, self.S
        G = H // self.K
        (q, k, v), factors = self.split(q, k, v)
        tile = self.tile("forward")
        section = self.section(B * self.K, S) * G
        args = self.args(tile, self.tma(q, k, v, out), Q=(q, tile.rows), K=(k, tile.columns), V=(v, tile.columns),
                         Out=(out, tile.rows))
        self.kernels.forward_kernel[(B * H * -(-T // tile.rows),)](
            **args, Lse=lse, Starts=self.starts, Factors=factors, heads=B * H, H=H, T=T, S=S, section=section,
            **self.numbers)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        B, T, H, D, K, S = self.B, self.T, self.H, self.D, self.K, self.S
        G = H // K
        R = max(16, 1 << (T * G - 1).bit_length())
        splits = -(-S // SPLIT)
        parts = torch.empty(B, K, splits, R, D, dtype=torch.float32, device=q.device)
        lses = torch.empty(B, K, splits, R, dtype=torch.float32, device=q.device)
        tile = Tile(R, 64 if D * self.itemsize <= 256 else 32, 4, 2)
        args = self.args(tile, False, Q=(q, R), K=(k, tile.columns), V=(v, tile.columns))
        if args["PRECISION"] == "split":    # the keys are read once: splitting them first would double the bytes
            args["PRECISION"] = "ieee"
        del args["DESC"], args["BM"]
        self.kernels.decode_kernel[(splits, K, B)](
            **args, Parts=parts, Lses=lses, Starts=self.starts, H=H, T=T, S=S, splits=splits, **self.numbers, R=R,
            SPLIT=SPLIT)
        self.kernels.combine_kernel[(T, H, B)](
            Parts=parts, Lses=lses, Out=out, Lse=lse, o_strides=tuple(out.transpose(1, 2).stride()[:3]), H=H, T=T,
            splits=splits, G=G, R=R, D=D, DP=1 << (D - 1).bit_length(), num_warps=4)

    def backward(self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                 dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        B, T, H, D, K, S = self.B, self.T, self.H, self.D, self.K, self.S
        G = H // K
        padded = -(-T // PAD) * PAD
        delta, bounded = (torch.empty(B, H, padded, dtype=torch.float32, device=q.device) for _ in range(2))
        rows = 64
        dlse_or_any = lse if dlse is None else dlse
        self.kernels.delta_kernel[(B * H, padded // rows)](
            Out=out, DOut=dout, Lse=lse, DLse=dlse_or_any, Delta=delta, Bounded=bounded,
            o_strides=tuple(out.transpose(1, 2).stride()[:3]), do_strides=tuple(dout.transpose(1, 2).stride()[:3]),
            dl_strides=tuple(dlse_or_any.stride()), H=H, T=T, padded=padded, HAS_DLSE=dlse is not None, D=D,
            DP=1 << (D - 1).bit_length(), BM=rows, PRECISION=self.meta["PRECISION"], num_warps=4)
        (q, k, v, dout), factors = self.split(q, k, v, dout, dlse=dlse)
        common = dict(Factors=factors, Lse=bounded, Delta=delta, Starts=self.starts, H=H, T=T, S=S, padded=padded,
                      **self.numbers)
        ends = self.starts
        if self.meta["STARTS"]:
            keys = torch.arange(S, dtype=torch.int32, device=q.device).expand(B, S).contiguous()
            ends = torch.searchsorted(self.starts, keys, right=True, out_int32=True)
        tile = self.tile("dkdv")
        args = self.args(tile, self.tma(q, k, v, dout, dk, dv), Q=(q, tile.rows), K=(k, tile.columns), V=(v, tile.columns),
                         DOut=(dout, tile.rows), DK=(dk, tile.columns), DV=(dv, tile.columns))
        self.kernels.dkdv_kernel[(B * K * -(-S // tile.columns),)](
            **args, **common, Ends=ends, heads=B * K, section=self.section(B * K, T * G))
        tile = self.tile("dq")
        args = self.args(tile, self.tma(q, k, v, dout, dq), Q=(q, tile.rows), K=(k, tile.columns), V=(v, tile.columns),
                         DOut=(dout, tile.rows), DQ=(dq, tile.rows))
        self.kernels.dq_kernel[(B * H * -(-T // tile.rows),)](
            **args, **common, heads=B * H, section=self.section(B * K, S) * G)


def power_below(x: Tensor) -> Tensor:
    """The power of two at or below x, between 2^-60 and 2^60; 1 where x is no number or not finite."""
    return torch.where(x.isfinite(), torch.exp2(x.log2().floor().clamp(-60, 60)), 1.0)


@torch.library.custom_op("forge::triton_forward", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
            softcap: float | None, tiles: str) -> tuple[Tensor, Tensor]:
    """out (B, T, H, D) and lse (B, H, T)."""
    B, T, H = q.shape[:3]
    S = k.shape[1]
    if B == 0 or T == 0 or S == 0:
        return q.new_zeros(q.shape), q.new_full((B, H, T), -torch.inf, dtype=torch.float32)
    out, lse = q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)
    q, k, v = unit(q), unit(k), unit(v)
    launch = Launch(q, k, starts, causal, window, scale, softcap, tiles)
    (launch.decode if T * (H // k.shape[2]) <= DECODE_ROWS and S >= DECODE_KEYS else launch.forward)(q, k, v, out, lse)
    return out, lse


@torch.library.custom_op("forge::triton_backward", mutates_args=())
def backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
             starts: Tensor | None, causal: bool, window: int | None, scale: float, softcap: float | None,
             tiles: str) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, T, H, D), dk and dv (B, S, K, D)."""
    make = torch.empty if q.numel() and k.numel() else torch.zeros
    dq, dk, dv = (make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.numel() and k.numel():
        q, k, v, dout = unit(q), unit(k), unit(v), unit(dout)
        Launch(q, k, starts, causal, window, scale, softcap, tiles).backward(dout, dlse, q, k, v, out, lse, dq, dk, dv)
    return dq, dk, dv


differentiable(forward, backward)


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
           softcap: float | None, tiles: str = "") -> tuple[Tensor, Tensor]:
    """tiles: those of forward, dK and dV, and dQ, as tune() writes them; "" takes the first candidate of each."""
    if scale < 0:
        q, scale = -q, -scale
    # at 0 all logits are equal, but hidden ones, which are -inf times this
    return forward(q, k, v, starts, causal, window, scale or 1e-30, softcap, tiles)


def tune(case: Case, T: int, H: int, K: int) -> str:
    """The fastest tiles for this case at T queries and keys, of candidates whose gradients agree with the first ones'.

    Takes about half a minute where nothing is compiled yet. The first tiles are those that probe() has checked.
    """
    B = max(1, 2 ** 19 // (T * H))
    random = torch.Generator(case.device).manual_seed(0)        # torch's own random state stays as it is
    q, k, v, dout = (torch.randn(B, T, heads, case.head_dim, generator=random, device=case.device, dtype=case.dtype)
                     for heads in (H, K, K, H))
    starts = torch.zeros(B, T, dtype=torch.int32, device=case.device) if case.starts else None
    rest = (starts, case.causal, max(1, T // 4) if case.window else None, case.head_dim ** -0.5,
            20.0 if case.softcap else None)
    sm, shared, _ = gpu()
    best = {name: candidates(name, case.head_dim, q.element_size(), sm, shared, case.starts) for name in KERNELS}

    def text(**change: Tile) -> str:
        return " ".join(str(change.get(name, best[name][0])) for name in KERNELS)

    def results(tiles: str) -> list[Tensor]:
        out, lse = forward(q, k, v, *rest, tiles)
        return [out, *backward(dout, torch.zeros_like(lse), q, k, v, out, lse, *rest, tiles)]

    def ms(tiles: str) -> float:
        return benchmark(lambda: results(tiles))

    exact = results(text())
    for name in KERNELS:
        timed: dict[Tile, float] = {}
        for tile in best[name]:
            tiles = text(**{name: tile})
            try:
                off = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(results(tiles), exact)]
            except Exception as error:
                if "out of resource" not in str(error):
                    raise
                continue        # more shared memory or registers than this GPU has
            if max(off) <= AGREE[case.dtype]:
                timed[tile] = ms(tiles)
        best[name] = [min(timed, key=lambda tile: timed[tile])]
    return text()


AGREE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}     # twice the floors of the contract


def benchmark(run: Callable[[], Any], repeats: int = 8) -> float:
    """Milliseconds on the GPU: the median. It sleeps before each, while the host launches all of it."""
    times = []
    for i in range(repeats + 2):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10_000_000)       # cycles, some 5 ms
        began.record()
        run()
        ended.record()
        ended.synchronize()
        if i >= 2:
            times.append(began.elapsed_time(ended))
    return sorted(times)[repeats // 2]
