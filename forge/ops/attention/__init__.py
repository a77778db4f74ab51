"""Exact causal attention: the contract, the backends, and the choice between them (the only place that chooses)."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import operator
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge.memory import Memory, processor_name
from forge.ops.attention import blocked, metal, reference, sdpa, triton
from forge.ops.attention.custom_op import needs_grad

# A backend is a module with
#   supports(case: Case) -> None, or the reason why not
#   attend(q, k, v, starts, causal, window, scale, softcap) -> (out, lse or None), differentiable
# `triton` also takes its tiles, which stand behind its name: "triton 128x64w4s2 64x64w4s2 128x64w8s3" (triton.tune).
BACKENDS: dict[str, ModuleType] = {"triton": triton, "metal": metal, "sdpa": sdpa, "blocked": blocked,
                                   "reference": reference}


class Case(NamedTuple):
    """What a backend must be able to do."""

    device: str             # a torch device type
    dtype: torch.dtype
    head_dim: int
    grouped: bool           # fewer key-value heads than query heads
    square: bool            # T == S
    single: bool            # T == 1
    causal: bool
    window: bool
    starts: bool
    softcap: bool
    lse: bool
    backward: bool = True   # whether gradients are asked for; else only the forward is checked and measured

    def text(self) -> str:
        """As the file of measurements names it."""
        switches = ", ".join(name for name in self._fields[3:] if getattr(self, name))
        return f"{self.device} {str(self.dtype)[6:]} head_dim {self.head_dim}" + f", {switches}" * bool(switches)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int | None = None,
              starts: Tensor | None = None, scale: float | None = None, softcap: float | None = None,
              return_lse: bool = False, backend: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention; memory grows with T, not T².

    q (B, T, H, D); k, v (B, S, K, D), H a multiple of K. Returns (B, T, H, D) in q's dtype, summed in float32.
    causal aligns the last query with the last key, so decoding needs no second function.
    window: keys each query sees, itself included; None sees all. Needs causal.
    starts (B, T) int32: the first key each query may see, for packed documents; non-decreasing along T, which is checked
    on a CPU and trusted elsewhere.
    scale: of q·k, 1/sqrt(D) when None. softcap: s becomes softcap * tanh(s / softcap).
    return_lse: also lse (B, H, T) float32 (float64 for float64), natural log, -inf for a row that sees no key.
    backend: a key of BACKENDS; None takes the fastest of those that passed their check on this machine.
    Under torch.autocast q, k and v are cast as its products are. float32 is computed as exactly as float32, unless
    torch.set_float32_matmul_precision asks for less.
    A row that sees no key gives zeros. Deterministic; `sdpa` is where torch.use_deterministic_algorithms(True) holds.
    Raises ValueError naming the shape or the argument that does not fit.
    Source: FlashAttention-2, arXiv:2307.08691, algorithm 1. Checked against reference.py.
    """
    if any(x.dim() != 4 for x in (q, k, v)):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must have 4 dimensions: batch, "
                         "tokens, heads, head_dim")
    B, T, H, D = q.shape
    S, K = k.shape[1], k.shape[2]
    if q.dtype != torch.float64 and q.device.type in ("cuda", "cpu", "mps") and torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if k.shape != (B, S, K, D) or v.shape != k.shape:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must be (B, S, K, D) = ({B}, S, K, {D}) for "
                         f"q {tuple(q.shape)}")
    if not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v must share dtype and device, not {q.dtype} {q.device}, {k.dtype} {k.device}, "
                         f"{v.dtype} {v.device}")
    if q.dtype not in FLOORS or D == 0:
        raise ValueError(f"q has dtype {q.dtype} and head_dim {D}; the dtype is one of "
                         f"{', '.join(str(dtype)[6:] for dtype in FLOORS)}, and head_dim at least 1")
    if K == 0 or H % K:
        raise ValueError(f"q has {H} heads, no multiple of the {K} heads of k and v")
    if window is not None and (int(window) != window or window < 1 or not causal):
        raise ValueError(f"window={window} needs causal=True, and is a whole number of keys, at least 1")
    if starts is not None and (starts.shape != (B, T) or starts.is_floating_point() or starts.device != q.device):
        raise ValueError(f"starts {tuple(starts.shape)} {starts.dtype} {starts.device} must be whole numbers, (B, T) = "
                         f"({B}, {T}) on {q.device}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap} must be positive")
    name, _, tiles = (backend or "").partition(" ")
    if backend is not None and name not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")
    # index and not: while compiling, a size may be a symbol, and a choice needs its value
    case = Case(q.device.type, q.dtype, operator.index(D), not H == K, not T != S, not T != 1, causal, window is not None,
                starts is not None, softcap is not None, return_lse, needs_grad(q, k, v))
    if backend is None:
        name = choose(not T <= SHORT, *case)
    elif reason := unsupported(name, *case):
        raise ValueError(f"backend={backend!r} cannot do this: {reason}; leave backend out, or name another of "
                         f"{able(*case)}")
    if starts is not None:
        starts = starts.to(torch.int32)
    out, lse = BACKENDS[name].attend(q, k, v, starts, causal, None if window is None else int(window),
                                     D ** -0.5 if scale is None else scale, softcap, *([tiles] if tiles else []))
    return (out, lse) if return_lse else out


@torch.compiler.assume_constant_result
def unsupported(name: str, *case: Any) -> str | None:
    reason: str | None = BACKENDS[name].supports(Case(*case))
    return reason


@torch.compiler.assume_constant_result
def able(*case: Any) -> str:
    """The backends that support Case(*case)."""
    return ", ".join(name for name, module in BACKENDS.items() if module.supports(Case(*case)) is None)


SHORT, LONG = 512, 2048     # a choice is measured at either, and holds for all lengths on its side of SHORT


@torch.compiler.assume_constant_result
def choose(long: bool, *case: Any) -> str:
    """The fastest backend that supports Case(*case) and passes its probe on this machine."""
    return fastest(Case(*case), LONG if long else SHORT, *((8, 2) if Case(*case).grouped else (8, 8)))


@functools.cache
def fastest(case: Case, T: int, H: int, K: int) -> str:
    """The backend that needs the least time for T queries, H heads and K key heads, forward and where asked for backward.

    Measured once on this machine, in turns, and remembered; a lone candidate is not measured."""
    names = passing(case)
    if len(names) == 1:
        return names[0]

    def measure() -> str:
        best = dict.fromkeys(names, float("inf"))
        for _ in range(4):
            for name in names:
                best[name] = min(best[name], attend_ms(name, case, T, H, K))
        return min(names, key=lambda name: best[name])

    found = Memory(circumstance(case.device))(f"fastest of {', '.join(names)}, T={T} H={H} K={K}, {case.text()}", measure)
    return found if found in names else names[0]


def tuned(case: Case, T: int, H: int, K: int) -> str:
    """The backend `triton` with the fastest of its tiles, measured once on this machine."""
    return "triton " + Memory(circumstance(case.device))(f"tiles, T={T} H={H} K={K}, {case.text()}",
                                                         lambda: triton.tune(case, T, H, K))


@torch.inference_mode(False)
@torch.enable_grad()
def attend_ms(name: str, case: Case, T: int, H: int, K: int) -> float:
    """Milliseconds of one forward, and where asked for backward. On a GPU its own time, without the host's launches;
    elsewhere nothing goes before it, so call it more than once."""
    gpu = case.device == "cuda"
    B = 1 if case.device == "cpu" else max(1, 2 ** (19 if gpu else 17) // (T * H))
    T, S = (1, 2 * SHORT) if case.single else (T, T if case.square else 2 * T)
    q, k, v = (x.requires_grad_(case.backward) for x in random_inputs(case, (B, T, H), (B, S, K), (B, S, K)))
    starts = torch.zeros(B, T, dtype=torch.int32, device=case.device) if case.starts else None

    def run() -> None:
        out, _ = BACKENDS[name].attend(q, k, v, starts, case.causal, max(1, T // 4) if case.window else None,
                                       case.head_dim ** -0.5, 20.0 if case.softcap else None)
        if case.backward:
            out.backward(out.detach())

    if gpu:
        return triton.benchmark(run, 3)
    wait = torch.mps.synchronize if case.device == "mps" else lambda: None
    wait()
    began = time.perf_counter()
    run()
    wait()
    return 1000 * (time.perf_counter() - began)


def random_inputs(case: Case, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Tensors (*shape, head_dim) of standard normal numbers; torch's own random state stays as it is."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, case.head_dim, generator=generator).to(case.device, case.dtype) for shape in shapes]


def verdicts(case: Case) -> dict[str, str | None]:
    """Each backend: None where it can do this and passes its probe, else why not."""
    return {name: verdict(name, case) for name in BACKENDS}


def passing(case: Case) -> list[str]:
    """All backends that can do this and pass their probe, but `reference`, whose memory is T², only when it is alone."""
    found = verdicts(case)
    names = [name for name, reason in found.items() if reason is None]
    if not names:
        raise RuntimeError(f"no attention backend passed for {case}: {found}")
    return [name for name in names if name != "reference"] or names


@functools.cache
def verdict(name: str, case: Case) -> str | None:
    """None, or why a backend is not taken here. Its probe runs once on this machine; a backend that fails is named."""
    if reason := BACKENDS[name].supports(case):
        return reason
    reason = Memory(circumstance(case.device))(f"{name}, {case.text()}", lambda: probe(name, case) or "passed")
    if reason == "passed":
        return None
    warnings.warn(f"attention: the backend {name} is refused here: {reason}", stacklevel=2)
    return reason


@functools.cache
def circumstance(device: str) -> str:
    """What a verdict depends on: the machine, the versions, and the text of the backends."""
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.[pm]*"))))
    driver = Path("/proc/driver/nvidia/version")
    return ", ".join(["attention", torch.cuda.get_device_name() if device == "cuda" else processor_name(),
                      *([driver.read_text().splitlines()[0]] if device == "cuda" and driver.is_file() else []),
                      *([f"triton {version('triton')}"] if device == "cuda" and importlib.util.find_spec("triton") else []),
                      f"torch {torch.__version__}", f"{torch.get_num_threads()} threads",
                      f"deterministic {torch.are_deterministic_algorithms_enabled()}", sources.hexdigest()[:12]])


@torch.inference_mode(False)
def probe(name: str, case: Case) -> str | None:
    """None, or what is wrong with a backend here: it differs from the reference, or a later key changes a query.

    One small forward, and where asked for backward. PyTorch's own causal attention once leaked the future on one device
    and dtype.
    """
    T, S = (1, 24) if case.single else (24, 24) if case.square else (24, 40)
    if case.single and case.square:
        S = 1
    H, K = (4, 2) if case.grouped else (2, 2)
    q, k, v, dout = random_inputs(case, (1, T, H), (1, S, K), (1, S, K), (1, T, H))
    starts = torch.tensor([[0] * (T // 2) + [S // 2] * (T - T // 2)], dtype=torch.int32, device=case.device)
    rest = (starts if case.starts else None, case.causal, 7 if case.window else None,
            case.head_dim ** -0.5, 20.0 if case.softcap else None)

    def run(module: ModuleType, *qkv: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(case.backward) for x in qkv]
            out, _ = module.attend(*leaves, *rest)
            return [out.detach(), *(torch.autograd.grad(out, leaves, dout.to(out.dtype)) if case.backward else ())]

    try:
        ours = run(BACKENDS[name], q, k, v)
        if case.causal and T > 1:
            changed = k.clone(), v.clone()
            for x in changed:
                x[:, -1] += 1
            if not torch.equal(ours[0][:, :-1], run(BACKENDS[name], q, *changed)[0][:, :-1]):
                return "a future key changes what an earlier query sees"
    except (RuntimeError, ValueError) as error:     # the second from MPS, for a kernel that takes too many registers
        return f"it fails on a small case ({str(error).splitlines()[0]})"
    work = torch.float32 if case.device == "mps" else torch.float64
    exact = run(reference, *(x.to(work) for x in (q, k, v)))
    plain = run(reference, q, k, v)
    for what, x, y, z in zip(("output", "dq", "dk", "dv"), ours, exact, plain):
        off, allowed = distance(x, y), 2 * distance(z, y) + FLOORS[case.dtype]
        if not off <= allowed:
            return f"its {what} is off by {off:.1e} of the reference, {allowed:.1e} is allowed"
    return None


FLOORS = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def distance(x: Tensor, exact: Tensor) -> float:
    """Relative Frobenius error; where the truth is zero (the dq of a single key), the error an element."""
    size, unit = float(exact.norm()), exact.numel() ** 0.5
    return float((x.to(exact.dtype) - exact).norm()) / (size if size > 1e-6 * unit else unit or 1.0)
