"""Exact causal attention: the contract, the backends, and the choice between them (the only place that chooses)."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge.ops.attention import blocked, reference, sdpa

# In the order in which they are tried. A backend is a module with
#   supports(case: Case) -> None, or the reason why not
#   attend(q, k, v, starts, causal, window, scale, softcap) -> (out, lse or None), differentiable
BACKENDS: dict[str, ModuleType] = {"sdpa": sdpa, "blocked": blocked, "reference": reference}


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


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int | None = None,
              starts: Tensor | None = None, scale: float | None = None, softcap: float | None = None,
              return_lse: bool = False, backend: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention; memory grows with T, not T².

    q (B, T, H, D); k, v (B, S, K, D), H a multiple of K. Returns (B, T, H, D) in q's dtype, summed in float32.
    causal aligns the last query with the last key, so decoding needs no second function.
    window: keys each query sees, itself included; None sees all. Needs causal.
    starts (B, T) int32: the first key each query may see, for packed documents; non-decreasing along T.
    scale: of q·k, 1/sqrt(D) when None. softcap: s becomes softcap * tanh(s / softcap).
    return_lse: also lse (B, H, T) float32 (float64 for float64), natural log, -inf for a row that sees no key.
    backend: a key of BACKENDS; None takes the first that passed its check on this machine.
    A row that sees no key gives zeros. Deterministic; `sdpa` is where torch.use_deterministic_algorithms(True) holds.
    Raises ValueError naming the shape or the argument that does not fit.
    Source: FlashAttention-2, arXiv:2307.08691, algorithm 1. Checked against reference.py.
    """
    B, T, H, D = q.shape
    S, K = k.shape[1], k.shape[2]
    if k.shape != (B, S, K, D) or v.shape != k.shape:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must be (B, S, K, D) = ({B}, S, K, {D}) for "
                         f"q {tuple(q.shape)}")
    if not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v must share dtype and device, not {q.dtype} {q.device}, {k.dtype} {k.device}, "
                         f"{v.dtype} {v.device}")
    if K == 0 or H % K:
        raise ValueError(f"q has {H} heads, no multiple of the {K} heads of k and v")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window} needs causal=True and at least 1 key")
    if starts is not None and starts.shape != (B, T):
        raise ValueError(f"starts {tuple(starts.shape)} must be (B, T) = ({B}, {T})")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap} must be positive")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")
    case = Case(q.device.type, q.dtype, D, H != K, T == S, T == 1, causal, window is not None, starts is not None,
                softcap is not None, return_lse)
    if backend is None:
        backend = choose(*case)
    elif reason := BACKENDS[backend].supports(case):
        raise ValueError(f"backend={backend!r} cannot do this: {reason}; leave backend out, or name another of "
                         f"{', '.join(BACKENDS)}")
    if starts is not None:
        starts = starts.to(torch.int32)
    out, lse = BACKENDS[backend].attend(q, k, v, starts, causal, window, D ** -0.5 if scale is None else scale, softcap)
    return (out, lse) if return_lse else out


@torch.compiler.assume_constant_result
def choose(*case: Any) -> str:
    """The first backend in the order of BACKENDS that supports Case(*case) and passes its probe on this machine."""
    return next(name for name, reason in verdicts(Case(*case)).items() if reason is None)


def verdicts(case: Case) -> dict[str, str | None]:
    """Each backend up to the one taken: None for that, and why not for those before it."""
    found: dict[str, str | None] = {}
    for name in BACKENDS:
        found[name] = verdict(name, case)
        if found[name] is None:
            return found
    raise RuntimeError(f"no attention backend passed for {case}: {found}")


def passing(case: Case) -> list[str]:
    """All backends that can do this and pass their probe, but `reference`, whose memory is T², only when it is alone."""
    names = [name for name in BACKENDS if verdict(name, case) is None]
    return [name for name in names if name != "reference"] or names


@functools.cache
def verdict(name: str, case: Case) -> str | None:
    """None, or why a backend is not taken here. Asked once a process."""
    return BACKENDS[name].supports(case) or probe(name, case)


@torch.inference_mode(False)
def probe(name: str, case: Case) -> str | None:
    """None, or what is wrong with a backend here: it differs from the reference, or a later key changes a query.

    One small forward and backward. PyTorch's own causal attention once leaked the future on one device and dtype.
    """
    T, S = (1, 24) if case.single else (24, 24) if case.square else (24, 40)
    if case.single and case.square:
        S = 1
    H, K, D = (4, 2, case.head_dim) if case.grouped else (2, 2, case.head_dim)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float32).to(case.device, case.dtype)
                     for shape in ((1, T, H, D), (1, S, K, D), (1, S, K, D), (1, T, H, D)))
    starts = torch.tensor([[0] * (T // 2) + [S // 2] * (T - T // 2)], dtype=torch.int32, device=case.device)
    rest = (starts if case.starts else None, case.causal, 7 if case.window else None, D ** -0.5,
            20.0 if case.softcap else None)

    def run(module: ModuleType, *qkv: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in qkv]
            out, _ = module.attend(*leaves, *rest)
            return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    try:
        ours = run(BACKENDS[name], q, k, v)
        if case.causal and T > 1:
            changed = k.clone(), v.clone()
            for x in changed:
                x[:, -1] += 1
            if not torch.equal(ours[0][:, :-1], run(BACKENDS[name], q, *changed)[0][:, :-1]):
                return "a future key changes what an earlier query sees"
    except RuntimeError as error:      # NotImplementedError is one too
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
