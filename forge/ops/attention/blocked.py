"""Fused attention out of torch's own matrix products: blocks of queries against blocks of keys, softmax between them.

Any device, dtype and head size; nothing of size T x S is held. The forward keeps a running maximum m, sum l and output
o for each query row; the backward computes the probabilities again from the lse that the forward saved.
The query heads of a group lie under each other as rows against the group's one key head, so that their sums over
heads happen inside one product. Each gradient is summed in one fixed order: equal to the bit, run after run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from forge.ops.attention import Case

ROWS, COLUMNS = 256, 512        # queries and keys in a block


def supports(case: Case) -> str | None:
    return None


class Mask(NamedTuple):
    """Which keys a query may see: causal and window relative to its place, starts per query."""

    starts: Tensor | None       # (B, T) int32
    causal: bool
    window: int | None

    def columns(self, i0: int, i1: int, T: int, S: int) -> Iterator[tuple[int, int, bool]]:
        """(j0, j1, whether some pair is hidden) for the blocks of keys that queries i0 .. i1 see anything of."""
        shift = S - T                                                   # query i stands at key i + shift
        low = max(0, i0 + shift - self.window + 1) if self.window is not None else 0
        high = min(S, i1 + shift) if self.causal else S
        last = 0 if self.starts is None else S
        if self.starts is not None and self.starts.device.type == "cpu":    # elsewhere a look waits for the device
            low = max(low, int(self.starts[:, i0].min()))
            last = int(self.starts[:, i1 - 1].max())
        for j0 in range(low, high, COLUMNS):
            j1 = min(j0 + COLUMNS, high)
            future = self.causal and j1 - 1 > i0 + shift
            past = self.window is not None and j0 <= i1 - 1 + shift - self.window
            yield j0, j1, future or past or j0 < last

    def hide(self, s: Tensor, i0: int, j0: int, shift: int) -> None:
        """Writes -inf into s (B, K, G, n, m), the block at query i0 and key j0, where the query may not see the key."""
        n, m = s.shape[3:]
        i = torch.arange(i0 + shift, i0 + shift + n, device=s.device)[:, None]
        j = torch.arange(j0, j0 + m, device=s.device)
        if self.causal:
            s.masked_fill_(j > i, -torch.inf)
        if self.window is not None:
            s.masked_fill_(j <= i - self.window, -torch.inf)
        if self.starts is not None:
            s.masked_fill_((j < self.starts[:, i0:i0 + n, None])[:, None, None], -torch.inf)


def rows(x: Tensor, K: int) -> Tensor:
    """(B, n, H, D) -> (B, K, G n, D): the query heads of a group under each other."""
    B, n, H, D = x.shape
    return x.view(B, n, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(B, K, H // K * n, D)


def unrows(x: Tensor, n: int) -> Tensor:
    """(B, K, G n, D) -> (B, n, H, D)."""
    B, K, Gn, D = x.shape
    return x.view(B, K, Gn // n, n, D).permute(0, 3, 1, 2, 4).reshape(B, n, K * Gn // n, D)


def scores(qi: Tensor, kj: Tensor, scale: float, softcap: float | None) -> Tensor:
    """(B, K, G n, m) logits, scaled and capped, in float32 or wider."""
    s = (qi @ kj.transpose(2, 3)).to(wide(qi.dtype)).mul_(scale)
    return s if softcap is None else s.div_(softcap).tanh_().mul_(softcap)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.library.custom_op("forge::blocked_forward", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
            softcap: float | None) -> tuple[Tensor, Tensor]:
    """out (B, T, H, D) and lse (B, H, T)."""
    B, T, H, D = q.shape
    S, K = k.shape[1:3]
    mask = Mask(starts, causal, window)
    k, v = k.transpose(1, 2), v.transpose(1, 2)                                 # (B, K, S, D)
    out = q.new_zeros(B, T, H, D)
    lse = q.new_full((B, H, T), -torch.inf, dtype=wide(q.dtype))
    for i0 in range(0, T if B else 0, ROWS):
        i1 = min(i0 + ROWS, T)
        n = i1 - i0
        qi = rows(q[:, i0:i1], K)                                               # (B, K, G n, D)
        m = lse.new_full((B, K, qi.shape[2], 1), torch.finfo(lse.dtype).min)    # not -inf: exp(-inf + inf) is NaN
        l, o = torch.zeros_like(m), torch.zeros(qi.shape, dtype=lse.dtype, device=q.device)
        for j0, j1, partial in mask.columns(i0, i1, T, S):
            s = scores(qi, k[:, :, j0:j1], scale, softcap)
            if partial:
                mask.hide(s.view(B, K, H // K, n, j1 - j0), i0, j0, S - T)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            p = s.sub_(m_new).exp_()
            shrink = (m - m_new).exp_()
            l = l.mul_(shrink).add_(p.sum(-1, keepdim=True))
            o = o.mul_(shrink).add_(p.to(v.dtype) @ v[:, :, j0:j1])
            m = m_new
        some = l > 0
        out[:, i0:i1] = unrows(torch.where(some, o / l, 0.0), n)
        lse[:, :, i0:i1] = torch.where(some, m + l.log(), -torch.inf).view(B, H, n)
    return out, lse


@torch.library.custom_op("forge::blocked_backward", mutates_args=())
def backward(dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
             starts: Tensor | None, causal: bool, window: int | None, scale: float, softcap: float | None
             ) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, T, H, D), dk and dv (B, S, K, D)."""
    B, T, H, _ = q.shape
    S, K = k.shape[1:3]
    mask = Mask(starts, causal, window)
    k, v = k.transpose(1, 2), v.transpose(1, 2)                                 # (B, K, S, D)
    delta = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2) - dlse           # (B, H, T): rowsum(dP * P)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)                         # a row without keys has P = 0
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(k.shape, dtype=lse.dtype, device=q.device) for _ in range(2))
    for i0 in range(0, T if B else 0, ROWS):
        i1 = min(i0 + ROWS, T)
        n = i1 - i0
        qi, doi = rows(q[:, i0:i1], K), rows(dout[:, i0:i1], K)                 # (B, K, G n, D)
        lse_i, delta_i = (x[:, :, i0:i1].reshape(B, K, -1, 1) for x in (lse, delta))
        dqi = torch.zeros(qi.shape, dtype=lse.dtype, device=q.device)
        for j0, j1, partial in mask.columns(i0, i1, T, S):
            kj, vj = k[:, :, j0:j1], v[:, :, j0:j1]
            s = scores(qi, kj, scale, softcap)
            if partial:
                mask.hide(s.view(B, K, H // K, n, j1 - j0), i0, j0, S - T)
            p = (s - lse_i).exp_() if softcap is not None else s.sub_(lse_i).exp_()
            ds = (doi @ vj.transpose(2, 3)).to(p.dtype).sub_(delta_i).mul_(p).mul_(scale)
            if softcap is not None:
                ds.mul_(1 - (s / softcap).clamp_(min=-1).square_())             # tanh' ; a hidden s is -inf
            ds = ds.to(q.dtype)
            dv[:, :, j0:j1] += p.to(v.dtype).transpose(2, 3) @ doi
            dk[:, :, j0:j1] += ds.transpose(2, 3) @ qi
            dqi += ds @ kj
        dq[:, i0:i1] = unrows(dqi, n)
    dk, dv = (x.transpose(1, 2).to(q.dtype).contiguous() for x in (dk, dv))
    return dq, dk, dv


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
      softcap: float | None) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, T), dtype=wide(q.dtype))


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
attend = forward
