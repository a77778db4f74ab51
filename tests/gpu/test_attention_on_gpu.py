"""Attention on an NVIDIA GPU. Run by hand: TRITON_INTERPRET=0 python -m pytest tests/gpu (-n 12 of pytest-xdist compiles in
parallel); what was seen is in docs/RESULTS.md."""

from __future__ import annotations

from typing import Any

import contract
import pytest
import torch
from hypothesis import given, settings

from forge.ops import attention as module
from forge.ops.attention import Case, attention, triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def poisoned() -> Any:
    """Memory that nothing wrote is NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", triton.HEAD_DIMS)
def test_any_problem_equals_the_reference(D: int, dtype: torch.dtype) -> None:
    @settings(max_examples=5, deadline=None)
    @given(problem=contract.problems((dtype,), (D,), 300, "cuda"))
    def check(problem: dict[str, Any]) -> None:
        contract.compare("triton", **problem, together=True)

    check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_every_length_against_the_block(D: int, dtype: torch.dtype) -> None:
    for T in range(1, 130):
        q, k, v = torch.randn(3, 1, T, 1, D).to("cuda", dtype).unbind(0)
        contract.compare("triton", q, k, v, False, together=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [64, 80, 128])
@pytest.mark.parametrize("rest", [{}, {"window": 700, "starts": True}], ids=str)
def test_long_sequences_and_groups(D: int, dtype: torch.dtype, rest: dict) -> None:
    T = 1500
    q, k, v = (torch.randn(2, T, heads, D).to("cuda", dtype) for heads in (8, 2, 2))
    starts = torch.stack([torch.arange(T) // 400 * 400, torch.arange(T) // 999 * 999]).int().cuda()
    contract.compare("triton", q, k, v, True, **rest | ({"starts": starts} if rest else {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "D"), [(1, 64), (1, 128), (3, 80)])
def test_decoding_in_parts(T: int, D: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, n, heads, D).to("cuda", dtype) for n, heads in ((T, 8), (3000, 2), (3000, 2)))
    for rest in ({}, {"window": 1000}):
        contract.compare("triton", q, k, v, True, **rest)
        assert torch.equal(attention(q, k, v, backend="triton", **rest)[1:],
                           attention(q[1:], k[1:], v[1:], backend="triton", **rest))


def test_corners_of_the_contract() -> None:
    contract.rows_without_keys_give_zeros("triton", 16, "cuda")
    contract.only_visible_keys_matter("triton", 16, "cuda")
    contract.only_visible_keys_matter("triton", 16, "cuda", window=None)
    contract.parts_merge_by_lse("triton", 64, torch.float32, 2e-6, "cuda")
    contract.awkward_gradients("triton", 64, "cuda")
    for shape in ((0, 5, 2, 16), (2, 0, 2, 16)):
        contract.empty_inputs("triton", shape, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_large_logits(D: int, dtype: torch.dtype) -> None:
    contract.large_logits("triton", D, "cuda", dtype, T=300)


def test_float32_keeps_its_exactness_across_magnitudes() -> None:
    q, k, v = (torch.randn(1, 500, 1, 64, device="cuda") for _ in range(3))
    v[:, ::7] *= 1e4
    contract.compare("triton", q, k, v, True)
    contract.compare("triton", 1e-6 * q, 1e6 * k, 1e-20 * v, False)


def test_tf32_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 500, 2, 64, device="cuda").unbind(0)
    exact = attention(q.double(), k.double(), v.double(), backend="reference")
    ours = module.distance(attention(q, k, v, backend="triton"), exact)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    asked = module.distance(attention(q, k, v, backend="triton"), exact)
    assert ours < 2e-6 < 1e-5 < asked < 3e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D", triton.HEAD_DIMS)
def test_a_thousand_runs_are_equal_to_the_bit(D: int, dtype: torch.dtype) -> None:
    contract.equal_to_the_bit("triton", D, 400, 1000, "cuda", dtype)


def test_offsets_pass_two_to_the_31() -> None:
    far = 2 ** 31 + 16
    memory = torch.empty(3 * far, dtype=torch.float16, device="cuda")
    q, k, v = torch.randn(3, 2, 2, 1, 16).half().cuda().unbind(0)
    for strides in ((far, 16, 16, 1), (2 * 16, far, 16, 1), (2 * 16 + 8, far + 1, 16, 1)):
        views = []
        for x, at in ((q, 0), (k, 1), (v, 2)):
            view = memory.as_strided((2, 2, 1, 16), strides, at * far // 3 // 16 * 16)
            view.copy_(x)
            views.append(view)
        for x, y in zip(contract.run("triton", q, k, v, q, None), contract.run("triton", *views, q, None)):
            assert torch.equal(x, y)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_whole_forward_and_backward(compiler: str) -> None:
    contract.compiles_whole("triton", 64, None, "cuda", compiler)
    contract.compiles_whole(None, 64, torch.zeros(2, 24, dtype=torch.int32, device="cuda"), "cuda", compiler)


def test_works_when_recomputed_and_under_autocast() -> None:
    contract.works_when_recomputed_and_under_autocast("triton", 64, "cuda")


def test_custom_ops_keep_torchs_rules() -> None:
    q = torch.randn(2, 20, 4, 16, device="cuda", requires_grad=True)
    k, v = (torch.randn(2, 30, 2, 16, device="cuda", requires_grad=True) for _ in range(2))
    starts = torch.zeros(2, 20, dtype=torch.int32, device="cuda")
    torch.library.opcheck(triton.forward, (q, k, v, starts, True, 7, 0.3, 5.0, ""))


def peak(T: int, window: int | None, dtype: torch.dtype = torch.bfloat16) -> int:
    q, k, v = (torch.randn(1, T, heads, 64, device="cuda", dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, v, window=window, backend="triton").sum().backward()
    torch.cuda.synchronize()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_is_linear_in_T(dtype: torch.dtype) -> None:
    """peak = a + b T + c T² over T = 2k .. 64k: the last term is less than a hundredth of the whole at 64k."""
    peak(2048, None, dtype)         # the first call leaves what it compiled with
    Ts = [2048 * 2 ** i for i in range(6)]
    peaks = torch.tensor([peak(T, None, dtype) for T in Ts], dtype=torch.float64)
    x = torch.tensor(Ts, dtype=torch.float64) / Ts[-1]
    a, b, c = torch.linalg.lstsq(torch.stack([x ** 0, x, x * x], 1), peaks[:, None]).solution.flatten().tolist()
    assert abs(c) < 0.01 * (a + b + c), (Ts, peaks.tolist())


def test_a_quarter_of_a_million_tokens_with_a_window() -> None:
    assert peak(262_144, 4096) < 2 ** 31


def test_the_choice_is_measured_and_tiles_are_found() -> None:
    case = Case("cuda", torch.bfloat16, 64, False, True, False, True, False, True, False, False)
    assert module.verdicts(case)["triton"] is None
    assert module.fastest(case, 1024, 8, 8) == "triton"
    backend = module.tuned(case, 1024, 8, 8)
    assert len(backend.split()) == 4
    q, k, v = torch.randn(3, 1, 300, 2, 64).to("cuda", torch.bfloat16).unbind(0)
    contract.compare(backend, q, k, v, False, starts=torch.zeros(1, 300, dtype=torch.int32, device="cuda"))
