"""The contract of forge.ops.attention over BACKENDS by name, against the reference in float64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import contract
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge.ops import attention as module
from forge.ops.attention import BACKENDS, Case, attention, blocked, passing, probe, reference, verdicts

HERE = ["sdpa", "blocked", "reference"]      # the others have tests of their own: test_triton.py, gpu/, metal/
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), backend=st.sampled_from(HERE), problem=contract.problems(DTYPES, (4, 16, 24), 90))
def test_every_backend_equals_the_reference(data: st.DataObject, backend: str, problem: dict[str, Any]) -> None:
    case = contract.case_of(*(problem[name] for name in ("q", "k", "causal", "window", "starts", "softcap", "with_lse")))
    if reason := BACKENDS[backend].supports(case):
        problem["return_lse"] = problem.pop("with_lse")
        with pytest.raises(ValueError, match="cannot do this"):
            attention(**problem, backend=backend)
        assert reason
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "ROWS", data.draw(st.sampled_from((16, 64))))
        patch.setattr(blocked, "COLUMNS", data.draw(st.sampled_from((16, 64))))
        contract.compare(backend, **problem, together=True)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("T", [1, 127, 128, 129, 300, 700])
def test_causal_training_shapes(backend: str, T: int) -> None:
    q, k, v = torch.randn(3, 2, T, 4, 16).unbind(0)
    contract.compare(backend, q, k, v, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rest", [{"window": 70}, {"starts": True}, {"window": 70, "starts": True, "softcap": 5.0},
                                  {"causal": False}], ids=str)
def test_blocked_over_several_blocks(rest: dict, dtype: torch.dtype) -> None:
    T = 700
    q, k, v = torch.randn(2, T, 4, 16).to(dtype), *torch.randn(2, 2, T, 2, 16).to(dtype).unbind(0)
    starts = torch.stack([torch.arange(T) // 150 * 150, torch.arange(T) // 301 * 301]).int()
    contract.compare("blocked", q, k, v, True, **rest | ({"starts": starts} if "starts" in rest else {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocked_multiplies_in_16_bit_where_the_cpu_has_units_for_it(dtype: torch.dtype,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(2, 300, 4, 64).to(dtype), *torch.randn(2, 2, 300, 2, 64).to(dtype).unbind(0)
    for capabilities, factors in (({}, torch.float32), ({"amx_bf16": True, "amx_fp16": True}, dtype)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert blocked.factors(q) == factors
        for rest in ({}, {"window": 70, "softcap": 5.0}):
            contract.compare("blocked", q, k, v, True, **rest)


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_rows_without_keys_give_zeros(backend: str) -> None:
    contract.rows_without_keys_give_zeros(backend, 8)


@pytest.mark.parametrize("backend", HERE)
def test_the_future_and_what_lies_outside_the_window_change_nothing(backend: str) -> None:
    contract.only_visible_keys_matter(backend, 8, window=None if backend == "sdpa" else 5)


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_partial_results_merge_by_lse_with_gradients(backend: str) -> None:
    contract.parts_merge_by_lse(backend, 8, torch.float64, 1e-13)


def test_large_logits_and_awkward_gradients() -> None:
    contract.large_logits("blocked", 16)
    contract.awkward_gradients("blocked", 16)


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8)])
def test_empty_inputs(shape: tuple[int, ...]) -> None:
    contract.empty_inputs("blocked", shape)


def test_blocked_is_equal_to_the_bit_run_after_run() -> None:
    contract.equal_to_the_bit("blocked", 16, 600, 5)


@pytest.mark.parametrize("starts", [None, torch.zeros(2, 24, dtype=torch.int32)])
def test_compiles_whole_forward_and_backward(starts: Tensor | None) -> None:
    contract.compiles_whole(None, 8, starts)
    contract.compiles_whole("blocked", 8, starts)


@pytest.mark.parametrize("backend", [None, "blocked"])
def test_works_when_recomputed_and_under_autocast(backend: str | None) -> None:
    contract.works_when_recomputed_and_under_autocast(backend, 16)


def test_custom_ops_keep_torchs_rules() -> None:
    q = torch.randn(2, 20, 4, 8, requires_grad=True)
    k, v = (torch.randn(2, 30, 2, 8, requires_grad=True) for _ in range(2))
    starts = torch.zeros(2, 20, dtype=torch.int32)
    torch.library.opcheck(blocked.forward, (q, k, v, starts, True, 7, 0.3, 5.0))
    torch.library.opcheck(blocked.forward, (q, k, v, None, False, None, 0.3, None))


@pytest.mark.parametrize(("change", "words"), [
    ({"k": (1, 8, 3, 8), "v": (1, 8, 3, 8)}, "no multiple"), ({"v": (1, 9, 2, 8)}, r"must be \(B, S, K, D\)"),
    ({"window": 0}, "window=0"), ({"window": 3, "causal": False}, "causal=True"), ({"softcap": -1.0}, "softcap"),
    ({"starts": torch.zeros(1, 3).int()}, "starts"), ({"starts": torch.zeros(1, 8)}, "whole numbers"),
    ({"starts": torch.tensor([[0, 3, 2, 4, 4, 4, 4, 4]])}, "decreases"), ({"window": 2.5}, "whole number"),
    ({"starts": torch.tensor([[0, 3, 2, 4, 4, 4, 4, 4]]), "backend": "reference"}, "decreases"),
    ({"backend": "magic"}, "magic"),
    ({"backend": "sdpa", "window": 3}, "no window"),
])
def test_what_does_not_fit_is_named(change: dict, words: str) -> None:
    shapes = {"q": (1, 8, 4, 8), "k": (1, 8, 2, 8), "v": (1, 8, 2, 8)}
    tensors = {name: torch.randn(change.pop(name, shape)) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=words):
        attention(*tensors.values(), **change)
    with pytest.raises(ValueError, match="share dtype"):
        attention(torch.randn(1, 2, 2, 8), *torch.randn(2, 1, 2, 2, 8).double().unbind(0))
    for wrong in (torch.ones(1, 2, 2, 8).int(), torch.ones(1, 2, 2, 0)):
        with pytest.raises(ValueError, match="the dtype is one of float64"):
            attention(wrong, wrong, wrong)
    with pytest.raises(ValueError, match="4 dimensions"):
        attention(*torch.randn(3, 2, 2, 8).unbind(0))


CASE = Case("cpu", torch.float32, 8, False, True, False, True, False, False, False, False)


def broken(kind: str) -> ModuleType:
    def attend(q: Tensor, k: Tensor, v: Tensor, starts: Any, causal: bool, *rest: Any) -> tuple[Tensor, Tensor]:
        if kind == "raises":
            raise RuntimeError("no kernel image\nand more")
        if kind == "too large":
            raise ValueError("a group of 128 threads")
        out, lse = reference.attend(q, k, v, starts, causal and kind != "leaks", *rest)
        return (out * 1.001 if kind == "off" else out), lse

    return SimpleNamespace(supports=lambda case: None, attend=attend)  # type: ignore[return-value]


@pytest.mark.parametrize(("kind", "words"), [("leaks", "future"), ("off", "output is off"), ("raises", "no kernel image"),
                                             ("too large", "a group of 128")])
def test_a_broken_backend_is_refused_with_its_reason(kind: str, words: str, monkeypatch: pytest.MonkeyPatch,
                                                    tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(BACKENDS, "sdpa", broken(kind))
    module.verdict.cache_clear()
    module.fastest.cache_clear()
    try:
        with pytest.warns(UserWarning, match=f"sdpa is refused here: .*{words}"):
            found = verdicts(CASE)
        assert words in str(found["sdpa"])
        assert found["blocked"] is None
        assert passing(CASE) == ["blocked"]
        module.verdict.cache_clear()        # the next process asks the file
        monkeypatch.setattr(module, "probe", None)
        with pytest.warns(UserWarning, match="refused"):
            assert passing(CASE) == ["blocked"]
    finally:
        module.verdict.cache_clear()


def test_a_broken_backward_is_refused_where_gradients_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = reference.attend(*arguments)
        return out + (out - out.detach()), lse      # the same output, twice the gradient

    monkeypatch.setitem(BACKENDS, "sdpa", SimpleNamespace(supports=lambda case: None, attend=attend))  # type: ignore[arg-type]
    assert "dq is off" in str(probe("sdpa", CASE))
    assert probe("sdpa", CASE._replace(backward=False)) is None


@pytest.mark.parametrize(("training", "gradients"), [(True, True), (True, False), (False, True)])
def test_the_choice_knows_whether_gradients_are_asked_for(training: bool, gradients: bool,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(module, "choose", lambda long, *case: seen.append(Case(*case).backward) or "reference")
    q = torch.randn(1, 4, 2, 8, requires_grad=gradients)
    with torch.set_grad_enabled(training):
        attention(q, q.detach(), q.detach())
    assert seen == [training and gradients]


@pytest.mark.parametrize("name", HERE)
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
