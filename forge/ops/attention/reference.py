"""Attention written out: the whole T x S matrix, any dtype, gradients by autograd. The truth that others are held to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from forge.ops.attention import Case


def supports(case: Case) -> str | None:
    return None


def check_starts(starts: Tensor | None) -> None:
    """Raises ValueError for starts (B, T) that decrease along T."""
    if starts is not None and bool((starts[:, 1:] < starts[:, :-1]).any()):
        raise ValueError("starts decreases along T; a query may see no earlier key than the query before it")


def visible(T: int, S: int, starts: Tensor | None, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """(1 or B, 1, T, S) bool: whether query i may see key j."""
    i = torch.arange(T, device=device)[:, None] + (S - T)       # bottom-right: the last query stands at the last key
    j = torch.arange(S, device=device)[None, :]
    seen = torch.ones(1, 1, T, S, dtype=torch.bool, device=device)
    if causal:
        seen = seen & (j <= i)
    if window is not None:
        seen = seen & (j > i - window)
    if starts is not None:
        seen = seen & (j >= starts[:, None, :, None])
    return seen


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
           softcap: float | None) -> tuple[Tensor, Tensor]:
    check_starts(starts)
    (T, H), (S, K) = q.shape[1:3], k.shape[1:3]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)               # (B, H, T, D), (B, K, S, D)
    k, v = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1)           # head h reads h // (H / K)
    s = (q @ k.transpose(2, 3)) * scale
    s = s.to(torch.float32 if s.dtype.itemsize < 4 else s.dtype)                    # softmax in float32
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    seen = visible(T, S, starts, causal, window, q.device)
    s = s.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(s, -1)                                                    # (B, H, T)
    some = seen.any(-1)
    p = torch.where(some[..., None], torch.exp(s - torch.where(some, lse, 0.0)[..., None]), 0.0)
    return (p.to(v.dtype) @ v).transpose(1, 2).contiguous(), lse
