"""What every attention backend must do, as checks that the tests of each backend call: against the reference in float64."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from forge.ops.attention import FLOORS, Case, attention, distance


def case_of(q: Tensor, k: Tensor, causal: bool = True, window: int | None = None, starts: Tensor | None = None,
            softcap: float | None = None, lse: bool = False) -> Case:
    return Case(q.device.type, q.dtype, q.shape[3], q.shape[2] != k.shape[2], q.shape[1] == k.shape[1], q.shape[1] == 1,
                causal, window is not None, starts is not None, softcap is not None, lse)


def run(backend: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, **rest: Any) -> list[Tensor]:
    """output, (lse), dq, dk, dv."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, backend=backend, return_lse=dlse is not None, **rest)
    outs, grads = ([out], [dout]) if dlse is None else (list(out), [dout, dlse])
    if dlse is not None:      # a row that sees no key has lse -inf, from which nothing flows
        outs[1] = torch.where(outs[1].isinf(), 0.0, outs[1])
    return [x.detach() for x in outs] + list(torch.autograd.grad(outs, leaves, [g.to(o.dtype) for g, o in zip(grads, outs)]))


def compare(backend: str, q: Tensor, k: Tensor, v: Tensor, with_lse: bool, together: bool = False, **rest: Any) -> None:
    """Output, lse and gradients within twice the error of plain PyTorch in the same dtype plus the floor.

    together: the gradients as one vector; a few keys alone leave a dq near zero, whose relative error is luck."""
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(q.shape, generator=generator).to(q)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=generator).to(q.device) if with_lse else None
    ours, plain = (run(name, q, k, v, dout, dlse, **rest) for name in (backend, "reference"))
    if q.device.type == "mps":      # which has no float64
        q, k, v, dout, dlse, rest["starts"], *results = (x if x is None else x.cpu() for x in (
            q, k, v, dout, dlse, rest.get("starts"), *ours, *plain))
        ours, plain = results[:len(ours)], results[len(ours):]
    exact = run("reference", q.double(), k.double(), v.double(), dout.double(), dlse, **rest)
    names = ["output", "lse", "dq", "dk", "dv"] if with_lse else ["output", "dq", "dk", "dv"]
    if together:
        names[-3:] = ["gradients"]
        for results in (ours, plain, exact):
            results[-3:] = [torch.cat([x.flatten() for x in results[-3:]])]
    for what, x, y, z in zip(names, ours, exact, plain):
        # an lse near 0 is the logarithm of what is near 1: its error counts as it is
        size = min(1.0, float(y.norm()) / max(1, y.numel()) ** 0.5) if what == "lse" else 1.0
        # the rounding of a query's lse weighs each of its gradients alike: over fewer than four nothing averages it out
        floor = FLOORS[q.dtype] * (2 if q.shape[1] < 4 and what not in ("output", "lse") else 1)
        off, allowed = size * distance(x, y), 2 * size * distance(z, y) + floor
        assert off <= allowed, f"{what} is off by {off:.2e}, {allowed:.2e} is allowed"


@st.composite
def problems(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], head_dims: tuple[int, ...], longest: int,
             device: str = "cpu") -> dict[str, Any]:
    """Arguments of compare: any shape, ratio of heads, window, documents and strides."""
    K, G, D, B = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from(head_dims)), draw(st.integers(1, 2))
    S = draw(st.integers(8, longest))       # with one key the truth of dq is 0, and 16 bit leave their rounding
    T = draw(st.one_of(st.just(S), st.just(1), st.integers(1, longest)))
    causal = draw(st.booleans())
    window = draw(st.one_of(st.none(), st.integers(1, longest + 10))) if causal else None
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    starts = None
    if draw(st.booleans()):
        starts = torch.randint(0, S + 1, (B, T), generator=generator, dtype=torch.int32).sort(1).values.to(device)
    # delta comes from the output: in 16 bit, where queries are few, its rounding alone may be more than is allowed
    dtype = draw(st.sampled_from(dtypes if T > 16 else [d for d in dtypes if d.itemsize > 2] or dtypes))
    # a unit last stride and any others: as views of one fused projection
    q = torch.randn(B, T, (G + 2) * K, D, generator=generator).to(device, dtype)[:, :, :G * K]
    k, v = torch.randn(B, S, 3 * K, D, generator=generator).to(device, dtype)[:, :, K:].split(K, 2)
    return {"q": q, "k": k, "v": v, "with_lse": draw(st.booleans()), "causal": causal, "window": window, "starts": starts,
            "softcap": draw(st.sampled_from((None, 5.0))), "scale": draw(st.sampled_from((None, 0.3, -0.3)))}


def rows_without_keys_give_zeros(backend: str, D: int, device: str = "cpu") -> None:
    q, k, v = (torch.randn(1, n, 2, D).to(device) for n in (6, 4, 4))
    starts = torch.tensor([[0, 0, 0, 4, 4, 4]], device=device)
    out, lse = attention(q, k, v, starts=starts, return_lse=True, backend=backend)
    empty = [0, 1, 3, 4, 5]       # two before the first key, three that start behind their last
    assert (out[:, empty] == 0).all()
    assert (lse[:, :, empty] == -torch.inf).all()
    assert lse[:, :, 2].isfinite().all()
    ones = torch.ones(1, 2, 6, device=device)
    grads = run(backend, q, k, v, torch.ones_like(q), ones, starts=starts)[2:]
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, empty] == 0).all()


def only_visible_keys_matter(backend: str, D: int, device: str = "cpu", window: int | None = 5) -> None:
    q, k, v = torch.randn(3, 1, 40, 2, D).to(device).unbind(0)
    before = attention(q, k, v, window=window, backend=backend)
    for x in (k, v):
        x[:, 20] += 1
    changed = (attention(q, k, v, window=window, backend=backend) != before).any(-1).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == list(range(20, 40 if window is None else 20 + window))


def large_logits(backend: str, D: int, device: str = "cpu", dtype: torch.dtype = torch.float32, T: int = 60,
                 size: float = 120) -> None:
    q, k, v = torch.randn(3, 1, T, 2, D).to(device).unbind(0)
    q, k = size * q / q.norm(dim=-1, keepdim=True), D ** 0.5 * k / k.norm(dim=-1, keepdim=True)      # logits up to +-size
    compare(backend, q.to(dtype), k.to(dtype), v.to(dtype), True)


def awkward_gradients(backend: str, D: int, device: str = "cpu") -> None:
    """A gradient of stride 0, and one that is a transposed view."""
    leaves = [x.requires_grad_() for x in torch.randn(3, 1, 60, 2, D).to(device).unbind(0)]
    by_sum = torch.autograd.grad(attention(*leaves, backend=backend).sum(), leaves)
    by_ones = torch.autograd.grad(attention(*leaves, backend=backend), leaves, torch.ones_like(leaves[0]))
    assert all(torch.equal(x, y) for x, y in zip(by_sum, by_ones))
    dout = torch.randn(D, 2, 60, 1, device=device).permute(3, 2, 1, 0)
    dense = torch.autograd.grad(attention(*leaves, backend=backend), leaves, dout.contiguous())
    turned = torch.autograd.grad(attention(*leaves, backend=backend), leaves, dout)
    assert all(torch.equal(x, y) for x, y in zip(dense, turned))


def parts_merge_by_lse(backend: str, D: int, dtype: torch.dtype, tolerance: float, device: str = "cpu") -> None:
    q, k, v = torch.randn(3, 1, 30, 2, D, dtype=dtype).to(device).unbind(0)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole = attention(q, k, v, causal=False, backend=backend)
    parts = [attention(q, k[:, at], v[:, at], causal=False, return_lse=True, backend=backend)
             for at in (slice(0, 11), slice(11, 30))]
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0).transpose(2, 3)[..., None]   # (2, B, T, H, 1)
    merged = sum(w * out for w, (out, _) in zip(weights, parts))
    dout = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, leaves, dout, retain_graph=True)
    torch.testing.assert_close(merged, whole, rtol=0, atol=tolerance)
    for x, y in zip(torch.autograd.grad(merged, leaves, dout), expected):
        torch.testing.assert_close(x, y, rtol=0, atol=10 * tolerance)


def empty_inputs(backend: str, shape: tuple[int, ...], device: str = "cpu") -> None:
    q = torch.randn(shape, requires_grad=True, device=device)
    out, lse = attention(q, q, q, return_lse=True, backend=backend)
    (out.sum() + lse.sum()).backward()
    assert out.shape == shape
    assert q.grad is not None
    assert q.grad.shape == shape


def equal_to_the_bit(backend: str, D: int, T: int, runs: int, device: str = "cpu",
                     dtype: torch.dtype = torch.float32) -> None:
    q, k, v = (torch.randn(2, T, heads, D).to(device, dtype) for heads in (4, 2, 2))
    first, *others = [run(backend, q, k, v, torch.ones_like(q), None, window=100) for _ in range(min(runs, 2))]
    for _ in range(runs - 2):
        others = [run(backend, q, k, v, torch.ones_like(q), None, window=100)]
        assert all(torch.equal(x, y) for x, y in zip(first, others[0]))
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other))


def compiles_whole(backend: str | None, D: int, starts: Tensor | None, device: str = "cpu",
                   compiler: str = "aot_eager") -> None:
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, starts=starts, backend=backend), fullgraph=True,
                             backend=compiler)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 24, 2, D).to(device).unbind(0))
    ours = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
    plain = torch.autograd.grad(attention(q, k, v, starts=starts, backend=backend).sum(), (q, k, v))
    for x, y in zip(ours, plain):
        torch.testing.assert_close(x, y)
    whatever = torch.compile(lambda q, k, v: attention(q, k, v, backend=backend), fullgraph=True, backend=compiler,
                             dynamic=True)
    for T in (24, 40):      # sizes are symbols
        q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, T, 2, D).to(device).unbind(0))
        torch.testing.assert_close(whatever(q, k, v), attention(q, k, v, backend=backend))


def works_when_recomputed_and_under_autocast(backend: str | None, D: int, device: str = "cpu") -> None:
    """Activation checkpointing gives equal gradients; autocast casts to its dtype, gradients come back as float32."""
    leaves = [x.requires_grad_() for x in torch.randn(3, 1, 20, 2, D).to(device).unbind(0)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v, backend=backend)
        assert isinstance(out, Tensor)
        return out

    plain = torch.autograd.grad(call(*leaves).sum(), leaves)
    again = torch.autograd.grad(torch.utils.checkpoint.checkpoint(call, *leaves, use_reentrant=False).sum(), leaves)
    assert all(torch.equal(x, y) for x, y in zip(plain, again))
    half = torch.float16 if backend == "triton" and device == "cpu" else torch.bfloat16     # the interpreter knows no other
    with torch.autocast(device, half):
        out = call(*leaves)
    assert out.dtype == half
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert all(x.dtype == torch.float32 for x in grads)
    for x, y in zip(grads, plain):
        assert distance(x, y) < 0.02
