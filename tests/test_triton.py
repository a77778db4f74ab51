"""The Triton kernels without a GPU: in Triton's interpreter, against the reference.

It works on CPU tensors and knows no bfloat16; test_triton_compiled.py compiles, tests/gpu holds what only a GPU can show.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import contract
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from forge.ops.attention import attention, triton

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton has packages for Linux alone")
SMALL = "triton 16x16w4s1 16x16w4s1 16x16w4s1"      # several blocks in few tokens


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if version("triton").startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4: pip install 'numpy<2.4'")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def poisoned() -> Any:
    """Memory that nothing wrote is NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=contract.problems((torch.float32, torch.float16), (16, 48), 40))
def test_any_problem_equals_the_reference(problem: dict[str, Any]) -> None:
    contract.compare(SMALL, **problem, together=True)


@pytest.mark.parametrize("D", triton.HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_head_dim(D: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 70, heads, D).to(dtype) for heads in (2, 1, 1))
    contract.compare("triton", q, k, v, True)


def test_every_length_against_the_block() -> None:
    for T in range(1, 34):
        q, k, v = torch.randn(3, 1, T, 1, 16).unbind(0)
        contract.compare(SMALL, q, k, v, False, together=True)


@pytest.mark.parametrize("rest", [{}, {"window": 100}, {"window": 290, "starts": True, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize(("T", "D"), [(1, 64), (3, 80)])
def test_decoding_in_parts(T: int, D: int, rest: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "DECODE_KEYS", 200)
    monkeypatch.setattr(triton, "SPLIT", 64)
    S = 333
    q, k, v = torch.randn(2, T, 4, D), *torch.randn(2, 2, S, 2, D).unbind(0)
    starts = torch.tensor([[0] * T, [S - 50] * T], dtype=torch.int32)
    contract.compare("triton", q, k, v, True, **rest | ({"starts": starts} if "starts" in rest else {}))
    alone = attention(q[1:], k[1:], v[1:], backend="triton")
    assert torch.equal(attention(q, k, v, backend="triton")[1:], alone)       # whatever is beside it in the batch


def test_corners_of_the_contract() -> None:
    contract.rows_without_keys_give_zeros(SMALL, 16)
    contract.only_visible_keys_matter(SMALL, 16)
    contract.only_visible_keys_matter(SMALL, 16, window=None)
    contract.parts_merge_by_lse(SMALL, 16, torch.float32, 2e-6)
    contract.large_logits(SMALL, 32, size=60)       # at 120 it takes the fused multiply-add, which only a GPU has
    contract.large_logits(SMALL, 32, dtype=torch.float16)
    contract.awkward_gradients(SMALL, 16)
    contract.equal_to_the_bit(SMALL, 16, 130, 2)
    for shape in ((0, 5, 2, 16), (2, 0, 2, 16)):
        contract.empty_inputs("triton", shape)


def test_float32_keeps_its_exactness_across_magnitudes() -> None:
    """Rows 10,000 times larger than others, and tensors far from 1: the scales of the float16 halves follow them."""
    q, k, v = (torch.randn(1, 60, 1, 16) for _ in range(3))
    v[:, ::7] *= 1e4
    contract.compare(SMALL, q, k, v, True)
    contract.compare(SMALL, 1e-6 * q, 1e6 * k, 1e-20 * v, False)


def test_tf32_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    q, k, v = torch.randn(3, 1, 40, 1, 16).unbind(0)
    assert triton.precision(torch.float32) == "tf32"
    contract.compare(SMALL, q, k, v, False)             # exact all the same: the interpreter rounds nothing to TF32


def test_offsets_pass_two_to_the_31() -> None:
    """Rows, heads and batches 2^31 elements and more apart, in memory of which hardly any page is touched."""
    far = 2 ** 31 + 16
    memory = torch.from_numpy(np.empty(3 * far, np.float16))
    q, k, v = torch.randn(3, 2, 2, 1, 16).half().unbind(0)
    for strides in ((far, 16, 16, 1), (2 * 16, far, 16, 1)):
        views = []
        for x, at in ((q, 0), (k, 1), (v, 2)):
            view = memory.as_strided((2, 2, 1, 16), strides, at * far // 3 // 16 * 16)
            view.copy_(x)
            views.append(view)
        assert torch.equal(attention(*views, backend="triton"), attention(q, k, v, backend="triton"))


@pytest.mark.parametrize("starts", [None, torch.zeros(2, 24, dtype=torch.int32)])
def test_compiles_whole_forward_and_backward(starts: torch.Tensor | None) -> None:
    contract.compiles_whole("triton", 16, starts)


def test_works_when_recomputed_and_under_autocast() -> None:
    contract.works_when_recomputed_and_under_autocast("triton", 16)


def test_custom_ops_keep_torchs_rules() -> None:
    q = torch.randn(2, 20, 4, 16, requires_grad=True)
    k, v = (torch.randn(2, 30, 2, 16, requires_grad=True) for _ in range(2))
    starts = torch.zeros(2, 20, dtype=torch.int32)
    torch.library.opcheck(triton.forward, (q, k, v, starts, True, 7, 0.3, 5.0, ""))
    torch.library.opcheck(triton.forward, (q, k, v, None, False, None, 0.3, None, SMALL.removeprefix("triton ")))


@pytest.mark.parametrize("D", [D for D in triton.HEAD_DIMS if not triton.HEAD_DIMS[D][1]])
def test_pointers_and_descriptors_give_equal_bits(D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides that are no multiple of 16 bytes go by pointers; equal results, to the bit."""
    q, k, v = torch.randn(3, 1, 40, 2, D).half().unbind(0)
    apart = [torch.zeros(1, 40, 2 * D + 1).half()[..., :2 * D].unflatten(2, (2, D)).copy_(x) for x in (q, k, v)]
    launch = triton.Launch(q, k, None, True, None, 1.0, None, "")
    assert launch.tma(q, k, v)
    assert not launch.tma(*apart)
    for x, y in zip(contract.run("triton", q, k, v, q, None), contract.run("triton", *apart, q, None)):
        assert torch.equal(x, y)


def test_tiles_are_texts_and_fit_the_gpu() -> None:
    for D in triton.HEAD_DIMS:
        for size in (2, 4):
            for kernel in triton.KERNELS:
                for sm, shared in ((86, 99 << 10), (80, 163 << 10), (90, 227 << 10)):
                    found = triton.candidates(kernel, D, size, sm, shared, False)
                    assert found, (kernel, D, size, sm)
                    assert triton.parse(" ".join(map(str, found))) == found
    with pytest.raises(ValueError, match="128x64w8s3"):
        attention(*torch.randn(3, 1, 4, 1, 16).unbind(0), backend="triton fast")


def test_what_it_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 4, 1, 24)
    assert "head_dim 24 is not one of 16, 32" in str(triton.supports(contract.case_of(q, q)))
    assert "float64" in str(triton.supports(contract.case_of(q.double(), q.double())))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "NVIDIA GPU" in str(triton.supports(contract.case_of(q, q)))
