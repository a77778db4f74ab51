"""attention.metal against the reference: on Apple hardware through torch.mps.compile_shader, elsewhere in the emulator, which
runs the same text on CPU tensors, in any order of its threads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import contract
import emulator
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from forge.ops.attention import attention, metal

MPS = torch.backends.mps.is_available()
DEVICE = "mps" if MPS else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the emulator is written for Linux and macOS")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nothing wrote is NaN."""
    torch.manual_seed(0)
    if not MPS:
        monkeypatch.setattr(metal, "compile_for_cpu", emulator.compile_shader)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("D", metal.HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_head_dim(D: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 70, heads, D).to(DEVICE, dtype) for heads in (2, 1, 1))
    contract.compare("metal", q, k, v, True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=contract.problems(DTYPES, (16, 48), 80, DEVICE))
def test_any_problem_equals_the_reference(problem: dict[str, Any]) -> None:
    contract.compare("metal", **problem, together=True)


def test_every_length_against_the_block() -> None:
    for T in range(1, 67):
        q, k, v = torch.randn(3, 1, T, 1, 16).to(DEVICE).unbind(0)
        contract.compare("metal", q, k, v, False, together=True)
