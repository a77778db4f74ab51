"""The contract of forge.ops.attention over BACKENDS by name, against the reference in float64."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge.ops import attention as module
from forge.ops.attention import BACKENDS, FLOORS, Case, attention, blocked, distance, probe, reference, verdicts

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def case_of(q: Tensor, k: Tensor, causal: bool, window: int | None, starts: Tensor | None, softcap: float | None,
            lse: bool) -> Case:
    return Case("cpu", q.dtype, q.shape[3], q.shape[2] != k.shape[2], q.shape[1] == k.shape[1], q.shape[1] == 1, causal,
                window is not None, starts is not None, softcap is not None, lse)


def run(backend: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, **rest: Any) -> list[Tensor]:
    """output, (lse), dq, dk, dv."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, backend=backend, return_lse=dlse is not None, **rest)
    outs, grads = ([out], [dout]) if dlse is None else (list(out), [dout, dlse])
    if dlse is not None:      # a row that sees no key has lse -inf, from which nothing flows
        outs[1] = torch.where(outs[1].isinf(), 0.0, outs[1])
    return [x.detach() for x in outs] + list(torch.autograd.grad(outs, leaves, [g.to(o.dtype) for g, o in zip(grads, outs)]))


def compare(backend: str, q: Tensor, k: Tensor, v: Tensor, with_lse: bool, together: bool = False, **rest: Any) -> None:
    """together: the gradients as one vector; a few keys alone leave a dq near zero, whose relative error is luck."""
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(q.shape, generator=generator).to(q.dtype)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=generator) if with_lse else None
    ours, plain = (run(name, q, k, v, dout, dlse, **rest) for name in (backend, "reference"))
    exact = run("reference", q.double(), k.double(), v.double(), dout.double(), dlse, **rest)
    names = ["output", "lse", "dq", "dk", "dv"] if with_lse else ["output", "dq", "dk", "dv"]
    if together:
        names[-3:] = ["gradients"]
        for results in (ours, plain, exact):
            results[-3:] = [torch.cat([x.flatten() for x in results[-3:]])]
    for what, x, y, z in zip(names, ours, exact, plain):
        assert distance(x, y) <= 2 * distance(z, y) + FLOORS[q.dtype], what


@settings(max_examples=60, deadline=None)
@given(data=st.data(), backend=st.sampled_from(list(BACKENDS)), dtype=st.sampled_from(DTYPES), K=st.integers(1, 2),
       G=st.integers(1, 3), D=st.sampled_from((4, 16, 24)), B=st.integers(1, 2), causal=st.booleans(),
       with_lse=st.booleans(), softcap=st.sampled_from((None, 5.0)), scale=st.sampled_from((None, 0.3)))
def test_every_backend_equals_the_reference(data: st.DataObject, backend: str, dtype: torch.dtype, K: int, G: int, D: int,
                                            B: int, causal: bool, with_lse: bool, softcap: float | None,
                                            scale: float | None) -> None:
    S = data.draw(st.integers(8, 90))       # with one key the truth of dq is 0, and 16 bit leave their rounding
    T = data.draw(st.one_of(st.just(S), st.just(1), st.integers(1, 90)))
    window = data.draw(st.one_of(st.none(), st.integers(1, 100))) if causal else None
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    starts = None
    if data.draw(st.booleans()):
        starts = torch.randint(0, S + 1, (B, T), generator=generator, dtype=torch.int32).sort(1).values
    # a unit last stride and any others: as views of one fused projection
    q = torch.randn(B, T, (G + 2) * K, D, generator=generator).to(dtype)[:, :, :G * K]
    k, v = torch.randn(B, S, 3 * K, D, generator=generator).to(dtype)[:, :, K:].split(K, 2)
    if reason := BACKENDS[backend].supports(case_of(q, k, causal, window, starts, softcap, with_lse)):
        with pytest.raises(ValueError, match="cannot do this"):
            attention(q, k, v, causal=causal, window=window, starts=starts, softcap=softcap, return_lse=with_lse,
                      backend=backend)
        assert reason
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "ROWS", data.draw(st.sampled_from((16, 64))))
        patch.setattr(blocked, "COLUMNS", data.draw(st.sampled_from((16, 64))))
        compare(backend, q, k, v, with_lse, True, causal=causal, window=window, starts=starts, softcap=softcap, scale=scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 127, 128, 129, 300, 700])
def test_causal_training_shapes(backend: str, T: int) -> None:
    q, k, v = torch.randn(3, 2, T, 4, 16).unbind(0)
    compare(backend, q, k, v, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rest", [{"window": 70}, {"starts": True}, {"window": 70, "starts": True, "softcap": 5.0},
                                  {"causal": False}], ids=str)
def test_blocked_over_several_blocks(rest: dict, dtype: torch.dtype) -> None:
    T = 700
    q, k, v = torch.randn(2, T, 4, 16).to(dtype), *torch.randn(2, 2, T, 2, 16).to(dtype).unbind(0)
    starts = torch.stack([torch.arange(T) // 150 * 150, torch.arange(T) // 301 * 301]).int()
    compare("blocked", q, k, v, True, **rest | ({"starts": starts} if "starts" in rest else {}))


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_rows_without_keys_give_zeros(backend: str) -> None:
    q, k, v = torch.randn(1, 6, 2, 8), torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)
    starts = torch.tensor([[0, 0, 0, 4, 4, 4]])
    out, lse = attention(q, k, v, starts=starts, return_lse=True, backend=backend)
    empty = [0, 1, 3, 4, 5]       # two before the first key, three that start behind their last
    assert (out[:, empty] == 0).all()
    assert (lse[:, :, empty] == -torch.inf).all()
    assert lse[:, :, 2].isfinite().all()
    grads = run(backend, q, k, v, torch.ones_like(q), torch.ones(1, 2, 6), starts=starts)[2:]
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, empty] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_future_and_what_lies_outside_the_window_change_nothing(backend: str) -> None:
    q, k, v = torch.randn(3, 1, 40, 2, 8).unbind(0)
    case = case_of(q, k, True, 5, None, None, False)
    window = None if BACKENDS[backend].supports(case) else 5
    before = attention(q, k, v, window=window, backend=backend)
    for x in (k, v):
        x[:, 20] += 1
    changed = (attention(q, k, v, window=window, backend=backend) != before).any(-1).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == list(range(20, 40 if window is None else 25))


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_partial_results_merge_by_lse_with_gradients(backend: str) -> None:
    q, k, v = torch.randn(3, 1, 30, 2, 8, dtype=torch.float64).unbind(0)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole = attention(q, k, v, causal=False, backend=backend)
    parts = [attention(q, k[:, at], v[:, at], causal=False, return_lse=True, backend=backend)
             for at in (slice(0, 11), slice(11, 30))]
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0).transpose(2, 3)[..., None]   # (2, B, T, H, 1)
    merged = sum(w * out for w, (out, _) in zip(weights, parts))
    dout = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, leaves, dout, retain_graph=True)
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-13)
    for x, y in zip(torch.autograd.grad(merged, leaves, dout), expected):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_large_logits_and_awkward_gradients() -> None:
    q, k, v = torch.randn(3, 1, 60, 2, 16).unbind(0)
    q, k = 120 * q / q.norm(dim=-1, keepdim=True), 4 * k / k.norm(dim=-1, keepdim=True)     # logits up to +-120
    compare("blocked", q, k, v, True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    by_sum = torch.autograd.grad(attention(*leaves, backend="blocked").sum(), leaves)       # a stride-0 gradient
    by_ones = torch.autograd.grad(attention(*leaves, backend="blocked"), leaves, torch.ones_like(q))
    assert all(torch.equal(x, y) for x, y in zip(by_sum, by_ones))


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8)])
def test_empty_inputs(shape: tuple[int, ...]) -> None:
    q = torch.randn(shape, requires_grad=True)
    out, lse = attention(q, q, q, return_lse=True, backend="blocked")
    (out.sum() + lse.sum()).backward()
    assert out.shape == shape
    assert q.grad is not None
    assert q.grad.shape == shape


def test_blocked_is_equal_to_the_bit_run_after_run() -> None:
    q, k, v = torch.randn(3, 2, 600, 4, 16).unbind(0)
    runs = [run("blocked", q, k[:, :, :2], v[:, :, :2], torch.ones_like(q), None, window=100) for _ in range(5)]
    assert all(torch.equal(x, y) for other in runs[1:] for x, y in zip(runs[0], other))


@pytest.mark.parametrize("starts", [None, torch.zeros(2, 24, dtype=torch.int32)])
def test_compiles_whole_forward_and_backward(starts: Tensor | None) -> None:
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, starts=starts), fullgraph=True, backend="aot_eager")
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 24, 2, 8).unbind(0))
    ours = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
    plain = torch.autograd.grad(attention(q, k, v, starts=starts).sum(), (q, k, v))
    for x, y in zip(ours, plain):
        torch.testing.assert_close(x, y)


def test_custom_ops_keep_torchs_rules() -> None:
    q = torch.randn(2, 20, 4, 8, requires_grad=True)
    k, v = (torch.randn(2, 30, 2, 8, requires_grad=True) for _ in range(2))
    starts = torch.zeros(2, 20, dtype=torch.int32)
    torch.library.opcheck(blocked.forward, (q, k, v, starts, True, 7, 0.3, 5.0))
    torch.library.opcheck(blocked.forward, (q, k, v, None, False, None, 0.3, None))


@pytest.mark.parametrize(("change", "words"), [
    ({"k": (1, 8, 3, 8), "v": (1, 8, 3, 8)}, "no multiple"), ({"v": (1, 9, 2, 8)}, r"must be \(B, S, K, D\)"),
    ({"window": 0}, "window=0"), ({"window": 3, "causal": False}, "causal=True"), ({"softcap": -1.0}, "softcap"),
    ({"starts": torch.zeros(1, 3)}, "starts"), ({"backend": "magic"}, "magic"),
    ({"backend": "sdpa", "window": 3}, "no window"),
])
def test_what_does_not_fit_is_named(change: dict, words: str) -> None:
    shapes = {"q": (1, 8, 4, 8), "k": (1, 8, 2, 8), "v": (1, 8, 2, 8)}
    tensors = {name: torch.randn(change.pop(name, shape)) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=words):
        attention(*tensors.values(), **change)
    with pytest.raises(ValueError, match="share dtype"):
        attention(torch.randn(1, 2, 2, 8), *torch.randn(2, 1, 2, 2, 8).double().unbind(0))


CASE = Case("cpu", torch.float32, 8, False, True, False, True, False, False, False, False)


def broken(kind: str) -> ModuleType:
    def attend(q: Tensor, k: Tensor, v: Tensor, starts: Any, causal: bool, *rest: Any) -> tuple[Tensor, Tensor]:
        if kind == "raises":
            raise RuntimeError("no kernel image\nand more")
        out, lse = reference.attend(q, k, v, starts, causal and kind != "leaks", *rest)
        return (out * 1.001 if kind == "off" else out), lse

    return SimpleNamespace(supports=lambda case: None, attend=attend)  # type: ignore[return-value]


@pytest.mark.parametrize(("kind", "words"), [("leaks", "future"), ("off", "output is off"), ("raises", "no kernel image")])
def test_a_broken_backend_is_refused_with_its_reason(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa", broken(kind))
    module.verdict.cache_clear()
    found = verdicts(CASE)
    module.verdict.cache_clear()
    assert words in str(found["sdpa"])
    assert found["blocked"] is None
    assert list(found) == ["sdpa", "blocked"]


@pytest.mark.parametrize("name", BACKENDS)
def test_sound_backends_pass_the_probe(name: str) -> None:
    assert probe(name, CASE) is None


def test_memory_of_blocked_grows_with_T_alone() -> None:
    """The scores of T = 16,384 would take 1 GiB a head in float32; forward and backward stay far below."""
    code = """
import resource, torch
from forge.ops.attention import attention
q = torch.randn(1, 16384, 1, 16, requires_grad=True)
attention(q[:, :64], q[:, :64], q[:, :64], backend="blocked").sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attention(q, q, q, backend="blocked").sum().backward()
unit = 1 if __import__("sys").platform == "darwin" else 1024
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit)
"""
    grown = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert grown < 200 << 20
