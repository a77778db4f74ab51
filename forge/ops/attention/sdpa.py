"""PyTorch's own scaled_dot_product_attention, where its public form can do the job without a T x S mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.ops.attention.custom_op import needs_grad

if TYPE_CHECKING:
    from forge.ops.attention import Case


def supports(case: Case) -> str | None:
    if case.window and not case.single:
        return "it knows no window"
    if case.starts:
        return "it cannot keep packed documents apart"
    if case.softcap:
        return "it knows no softcap"
    if case.lse:
        return "does not return lse"
    if case.causal and not (case.square or case.single):
        return "aligns a causal mask top-left when T != S"
    if case.dtype == torch.float64:
        return "float64 runs unfused, with T² memory"
    if case.device == "mps":
        return "unfused in training on MPS, with T² memory"
    if case.device == "cuda" and case.dtype == torch.float32 and case.grouped:
        return "float32 with grouped heads runs unfused, with T² memory"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
           softcap: float | None) -> tuple[Tensor, None]:
    (T, H), K = q.shape[1:3], k.shape[2]
    if window is not None:                                          # one query: its window is the last keys
        k, v = k[:, -window:], v[:, -window:]
    dtype = q.dtype
    if q.device.type == "cpu" and needs_grad(q, k, v):   # its backward is 2 to 4 times faster in float32 than in 16 bit
        q, k, v = q.float(), k.float(), v.float()
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=scale,
                                         is_causal=causal and not T <= 1, enable_gqa=not H == K)   # a bool, of symbols too
    return out.transpose(1, 2).to(dtype), None
