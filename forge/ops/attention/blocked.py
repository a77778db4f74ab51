"""Fused attention out of torch's own matrix products: blocks of queries against blocks of keys, softmax between them.

Any device, dtype and head size; nothing of size T x S is held. The forward keeps a running maximum m, sum l and output
o for each query row; the backward computes the probabilities again from the lse that the forward saved.
Powers of 2 instead of e, log2(e) goes into q with the scale: on x86 torch's exp takes 2 to 40 times the time of exp2,
most where an argument is -inf or the result denormal, as behind a mask.
The query heads of a group are neighbouring rows against the group's one key head, so that their sums over heads
happen inside one product. Each gradient is summed in one fixed order: equal to the bit, run after run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from forge.ops.attention.custom_op import differentiable
from forge.ops.attention.reference import check_starts

if TYPE_CHECKING:
    from forge.ops.attention import Case

ROWS, COLUMNS = 256, 512        # queries (times their group's heads) and keys in a block, at most
CELLS = 1 << 18                 # scores in a block for each thread of a CPU: they stay in its cache between operations
LOG2E, LN2 = 1 / math.log(2), math.log(2)


def supports(case: Case) -> str | None:
    return None


class Mask(NamedTuple):
    """Which keys a query may see: causal and window relative to its place, starts per query; and the blocks of it."""

    starts: Tensor | None       # (B K, T) int32
    causal: bool
    window: int | None
    T: int
    S: int

    def rows(self, count: int, group: int, device: torch.device) -> Iterator[tuple[slice, int, int]]:
        """(heads, i0, i1): each block of queries, for slices of the `count` key heads, `group` query heads in each."""
        heads, n = max(count, 1), ROWS                      # the heads together fill a GPU
        if device.type == "cpu":
            reach = self.S if self.window is None else min(self.S, self.window)
            n = max(ROWS // 4, min(ROWS, reach // 8))       # of a wide block on the diagonal half is for nothing
            n = max(n // group, 1)
            cells = group * min(n, self.T) * min(COLUMNS, reach + n)
            heads = torch.get_num_threads() * max(1, CELLS // max(cells, 1))
        for h in range(0, count, heads):
            for i0 in range(0, self.T, n):
                yield slice(h, h + heads), i0, min(i0 + n, self.T)

    def columns(self, heads: slice, i0: int, i1: int) -> Iterator[tuple[int, int, int]]:
        """(j0, j1, last): each block of keys that queries i0 .. i1 see anything of; from last on, starts hide none."""
        shift = self.S - self.T                                         # query i stands at key i + shift
        low = max(0, i0 + shift - self.window + 1) if self.window is not None else 0
        high = min(self.S, i1 + shift) if self.causal else self.S
        last = 0 if self.starts is None else self.S
        if self.starts is not None and self.starts.device.type == "cpu":    # elsewhere a look waits for the device
            low = max(low, int(self.starts[heads, i0].min()))
            last = int(self.starts[heads, i1 - 1].max())
        for j0 in range(low, high, COLUMNS):
            yield j0, min(j0 + COLUMNS, high), last

    def hide(self, s: Tensor, heads: slice, i0: int, i1: int, j0: int, last: int) -> None:
        """Makes -inf of the scores s (heads, queries times group, keys) where the query may not see the key.

        Only the edge is touched, and by sums with a triangle: masked_fill_ takes three times as long.
        """
        n, m, first = i1 - i0, s.shape[2], i0 + self.S - self.T - j0    # query i0 stands at column first
        s = s.unflatten(1, (n, -1))
        if self.causal and (a := max(0, first + 1)) < m:
            s[..., a:].add_(s.new_full((n, m - a), -torch.inf).triu_(first + 1 - a)[:, None])
        if self.window is not None and (a := min(m, first + n - self.window)) > 0:
            s[..., :a].add_(s.new_full((n, a), -torch.inf).tril_(first - self.window)[:, None])
        if self.starts is not None and (a := min(m, last - j0)) > 0:
            j = torch.arange(j0, j0 + a, dtype=torch.int32, device=s.device)
            s[..., :a].masked_fill_(j < self.starts[heads, i0:i1, None, None], -torch.inf)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def factors(q: Tensor) -> torch.dtype:
    """The dtype of what is multiplied: a CPU without matrix units for 16 bit is many times faster in float32."""
    unit = {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"}.get(q.dtype)
    slow = q.device.type == "cpu" and unit is not None and not torch.cpu.get_capabilities().get(unit)
    return torch.float32 if slow else q.dtype


def rows(x: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    """(B, T, H, ...) -> (B K, T G, ...) contiguous: the query heads of a group beside each other."""
    B, T, H = x.shape[:3]
    return x.unflatten(2, (K, H // K)).transpose(1, 2).to(dtype).reshape(B * K, T * (H // K), *x.shape[3:]).contiguous()


def unrows(x: Tensor, B: int, T: int, H: int) -> Tensor:
    """(B K, T G, ...) -> (B, T, H, ...) contiguous."""
    K = x.shape[0] // B if B else 1
    return x.view(B, K, T, H // K, *x.shape[2:]).transpose(1, 2).reshape(B, T, H, *x.shape[2:]).contiguous()


def add_product(into: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """into += x @ y over heads. One call takes all heads together only where `into` is contiguous."""
    return into.baddbmm_(x, y) if into.dtype == x.dtype and into.is_contiguous() else into.add_(x @ y)


class Scratch:
    """Memory for one block of scores after another: fresh memory costs a page fault every 4 KiB."""

    def __init__(self, like: Tensor) -> None:
        self.flat = like.new_empty(0)

    def full(self, value: Tensor, *shape: int) -> Tensor:
        size = math.prod(shape)
        if len(self.flat) < size:
            self.flat = self.flat.new_empty(size)
        return self.flat[:size].view(shape).copy_(value)


@torch.library.custom_op("forge::blocked_forward", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int | None, scale: float,
            softcap: float | None) -> tuple[Tensor, Tensor]:
    """out (B, T, H, D) and lse (B, H, T)."""
    check_starts(starts if q.device.type == "cpu" else None)        # elsewhere a look waits for the device
    B, T, H, _ = q.shape
    S, K = k.shape[1:3]
    if window is not None and (unseen := S - T - window + 1) > 0:       # decoding: copy no more of the cache than is seen
        k, v, S, starts = k[:, unseen:], v[:, unseen:], S - unseen, None if starts is None else starts - unseen
    G = H // K
    mask = Mask(None if starts is None else starts.repeat_interleave(K, 0), causal, window, T, S)
    fold = scale * LOG2E if softcap is None else scale / softcap
    dtype, narrow = q.dtype, factors(q)
    q, k, v = (rows(x, K, narrow) for x in (q, k, v))
    out = torch.empty_like(q, dtype=dtype)
    lse = q.new_empty(q.shape[:2], dtype=wide(dtype))
    scratch, zero = Scratch(lse), lse.new_zeros(())
    for h, i0, i1 in mask.rows(B * K, G, q.device):
        at = slice(i0 * G, i1 * G)
        qi = q[h, at] * fold                                                    # (heads, n G, D)
        m = lse.new_full((*qi.shape[:2], 1), torch.finfo(lse.dtype).min)        # not -inf: exp(-inf + inf) is NaN
        l, o = torch.zeros_like(m), torch.zeros_like(qi, dtype=lse.dtype)
        for j0, j1, last in mask.columns(h, i0, i1):
            s = add_product(scratch.full(zero, *qi.shape[:2], j1 - j0), qi, k[h, j0:j1].transpose(1, 2))
            if softcap is not None:
                s.tanh_().mul_(softcap * LOG2E)
            mask.hide(s, h, i0, i1, j0, last)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            p = s.sub_(m_new).exp2_()
            shrink = m.sub_(m_new).exp2_()
            l.mul_(shrink).add_(p.sum(-1, keepdim=True))
            add_product(o.mul_(shrink), p.to(narrow), v[h, j0:j1])
            m = m_new
        some = l > 0
        out[h, at] = o.div_(l.masked_fill(~some, 1))
        lse[h, at] = torch.where(some, m.mul_(LN2).add_(l.log()), -torch.inf)[..., 0]
    return unrows(out, B, T, H), unrows(lse, B, T, H).transpose(1, 2).contiguous()


@torch.library.custom_op("forge::blocked_backward", mutates_args=())
def backward(dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
             starts: Tensor | None, causal: bool, window: int | None, scale: float, softcap: float | None
             ) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, T, H, D), dk and dv (B, S, K, D).

    The scores lie transposed, keys by queries: then two of the three products that sum up gradients read them as they
    lie, and only the one for dq across.
    """
    B, T, H, _ = q.shape
    S, K = k.shape[1:3]
    G = H // K
    mask = Mask(None if starts is None else starts.repeat_interleave(K, 0), causal, window, T, S)
    fold = scale * LOG2E if softcap is None else scale / softcap
    dtype, narrow = q.dtype, factors(q)
    minus_delta = dlse.transpose(1, 2) - (dout.contiguous().to(lse.dtype) * out).sum(-1)    # (B, T, H): -rowsum(dP * P)
    minus_lse = lse.masked_fill(lse == -torch.inf, torch.inf).transpose(1, 2) * -LOG2E  # a row without keys has P = 0
    minus_delta, minus_lse = (rows(x, K, lse.dtype)[:, None] for x in (minus_delta, minus_lse))
    q, k, v, dout = (rows(x, K, narrow) for x in (q, k, v, dout))
    dq = torch.empty_like(q, dtype=dtype)
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    scratch = Scratch(lse), Scratch(lse)
    for h, i0, i1 in mask.rows(B * K, G, q.device):
        at = slice(i0 * G, i1 * G)
        qi, doi, lse_i, delta_i = q[h, at] * fold, dout[h, at], minus_lse[h, :, at], minus_delta[h, :, at]
        dqi = torch.zeros_like(qi, dtype=lse.dtype)
        for j0, j1, last in mask.columns(h, i0, i1):
            kj, vj = k[h, j0:j1], v[h, j0:j1]
            shape = len(kj), j1 - j0, qi.shape[1]                                       # (heads, m, n G)
            s, ds = (x.full(y, *shape) for x, y in zip(scratch, (lse_i, delta_i)))      # the products are added to it
            add_product(ds, vj, doi.transpose(1, 2))
            if softcap is None:
                add_product(s, kj, qi.transpose(1, 2))
            else:
                t = add_product(torch.zeros_like(s), kj, qi.transpose(1, 2)).tanh_()
                s.add_(t, alpha=softcap * LOG2E)
                ds.mul_(t.square_().neg_().add_(1))                                     # tanh' = 1 - tanh²
            mask.hide(s.transpose(1, 2), h, i0, i1, j0, last)
            p = s.exp2_()
            ds = ds.mul_(p).to(narrow)
            add_product(dv[h, j0:j1], p.to(narrow), doi)
            add_product(dk[h, j0:j1], ds, qi)
            add_product(dqi, ds.transpose(1, 2), kj)
        dq[h, at] = dqi.mul_(scale)
    dk.mul_(LN2 if softcap is None else softcap)                                        # the rest of scale is in q
    return unrows(dq, B, T, H), unrows(dk.to(dtype), B, S, K), unrows(dv.to(dtype), B, S, K)


differentiable(forward, backward, materialize=True)
attend = forward
