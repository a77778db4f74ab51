"""attention.metal against the reference: on Apple hardware through torch.mps.compile_shader, elsewhere in the emulator,
which runs the same text on CPU tensors, in any order of its threads."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import contract
import emulator
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from forge.ops.attention import metal

MPS = torch.backends.mps.is_available()
DEVICE = "mps" if MPS else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SOURCE = metal.SOURCE
BARRIER = re.compile(r"(threadgroup|simdgroup)_barrier\(mem_flags::mem_threadgroup\);")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the emulator is written for Linux and macOS")
emulated = pytest.mark.skipif(MPS, reason="what only the emulator can see")


@pytest.fixture(autouse=True)
def shaders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nothing wrote is NaN."""
    torch.manual_seed(0)
    if not MPS:
        monkeypatch.setattr(metal, "compile_for_cpu", emulator.compile_shader)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["rows", "tiles"])
def design(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both designs, whatever the table takes."""
    monkeypatch.setattr(metal, "DESIGNS", dict.fromkeys(metal.DESIGNS, request.param))
    return str(request.param)


def random(T: int, D: int, heads: tuple[int, int] = (2, 1), S: int | None = None, dtype: torch.dtype = torch.float32
           ) -> tuple[torch.Tensor, ...]:
    H, K = heads
    return tuple(torch.randn(2, n, h, D).to(DEVICE, dtype) for n, h in ((T, H), (S or T, K), (S or T, K)))


# --- against the reference

FEATURES: dict[str, dict[str, Any]] = {
    "causal": {}, "full": {"causal": False}, "window": {"window": 20}, "documents": {"starts": (0, 9, 40)},
    "softcap": {"softcap": 5.0}, "all at once": {"window": 20, "starts": (0, 9, 40), "softcap": 5.0, "scale": 0.3}}


@pytest.mark.parametrize("D", metal.DESIGNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("design")
def test_every_head_dim_dtype_and_feature(D: int, dtype: torch.dtype) -> None:
    for name, feature in FEATURES.items():
        T, S = (70, 70) if name != "full" else (45, 70)
        if "starts" in feature:
            first, second, third = feature["starts"]
            starts = torch.tensor([[first] * 9 + [second] * 31 + [third] * 30] * 2, dtype=torch.int32, device=DEVICE)
            feature = feature | {"starts": starts}
        contract.compare("metal", *random(T, D, S=S, dtype=dtype), True, **feature)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=contract.problems(DTYPES, (16, 48), 80, DEVICE))
@pytest.mark.usefixtures("design")
def test_any_problem_equals_the_reference(problem: dict[str, Any]) -> None:
    contract.compare("metal", **problem, together=True)


@pytest.mark.usefixtures("design")
def test_every_length_against_the_block() -> None:
    for T in range(1, 67):
        contract.compare("metal", *random(T, 16, (1, 1)), False, together=True)


@pytest.mark.usefixtures("design")
def test_corners_of_the_contract() -> None:
    contract.rows_without_keys_give_zeros("metal", 32, DEVICE)
    contract.only_visible_keys_matter("metal", 32, DEVICE)
    contract.only_visible_keys_matter("metal", 32, DEVICE, window=None)
    contract.parts_merge_by_lse("metal", 32, torch.float32, 2e-6, DEVICE)
    for dtype in DTYPES:
        contract.large_logits("metal", 32, DEVICE, dtype)
    contract.awkward_gradients("metal", 32, DEVICE)
    contract.equal_to_the_bit("metal", 32, 100, 3, DEVICE)
    for shape in ((0, 4, 2, 32), (2, 0, 2, 32)):
        contract.empty_inputs("metal", shape, DEVICE)
    # one query against many keys, and more queries than keys
    contract.compare("metal", *random(1, 32, S=99), True, together=True)
    contract.compare("metal", *random(50, 32, S=20), True)


def test_the_ops_keep_torchs_rules() -> None:
    q, k, v = (x.requires_grad_() for x in random(20, 16))
    starts = torch.zeros(2, 20, dtype=torch.int32, device=DEVICE)
    torch.use_deterministic_algorithms(False)       # opcheck compares memory that nothing wrote
    torch.library.opcheck(metal.forward, (q, k, v, starts, True, 7, 0.3, None))
    out, lse = metal.forward(q.detach(), k.detach(), v.detach(), None, True, None, 0.3, None)
    inputs = [x.detach() for x in (q, k, v)]
    torch.library.opcheck(metal.backward, (out, None, *inputs, out, lse, None, True, None, 0.3, None))
    contract.compiles_whole("metal", 16, None, DEVICE)
    contract.works_when_recomputed_and_under_autocast("metal", 16, DEVICE)


def test_a_model_trains_as_with_the_reference(forge: Callable[..., Any], text_file: Path) -> None:
    losses = []
    for backend in ("metal", "reference"):
        run = forge("train", text_file, "--model.dim", 64, "--model.n-heads", 4, "--model.n-kv-heads", 2,
                    "--model.n-layers", 2, "--model.seq-len", 64, "--train.batch-tokens", 512, "--train.steps", 20,
                    "--train.sample-every", 0, "--train.eval-every", 0, "--train.dtype", "float32", "--train.device", DEVICE,
                    "--train.compile", False, "--train.attention", backend, "--run", backend)
        assert run.code == 0, run.err
        losses.append([json.loads(line)["loss"] for line in Path(backend, "metrics.jsonl").read_text().splitlines()])
    assert len(losses[0]) == 20
    assert max(abs(x - y) for x, y in zip(*losses)) < 1e-5
    assert losses[0][-1] < losses[0][0] - 0.1


def test_the_table_takes_both_designs() -> None:
    assert set(metal.DESIGNS.values()) == {"rows", "tiles"}


# --- what only the emulator can see

@emulated
def test_any_order_of_the_threads_gives_equal_bits(design: str) -> None:
    for D in (32, 80):
        q, k, v = random(70, D)
        plain, *shuffled = [run_with_seed(seed, q, k, v) for seed in range(4)]
        assert all(torch.equal(x, y) for other in shuffled for x, y in zip(plain, other))


def run_with_seed(seed: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    with emulator.schedule(seed):
        return contract.run("metal", q, k, v, torch.ones_like(q), None, window=30)


MUTANTS = {f"line {text.count(chr(10)) + 1}": (text, rest) for text, rest in (
    (SOURCE.read_text()[:at.start()], SOURCE.read_text()[at.end():]) for at in BARRIER.finditer(SOURCE.read_text()))}


@emulated
@pytest.mark.parametrize("line", MUTANTS)
def test_a_barrier_that_is_missing_is_seen(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in turn is taken out of the text: then the results of its kernel are wrong, or the emulator raises."""
    before, after = MUTANTS[line]
    mutant = tmp_path / "attention.metal"
    mutant.write_text(before + after)
    monkeypatch.setattr(metal, "SOURCE", mutant)
    monkeypatch.setattr(metal, "DESIGNS", {64: "rows" if "// --- tiles" in after else "tiles"})
    metal.library.cache_clear()
    try:
        metal.library(torch.float32, 64, metal.DESIGNS[64], emulator.compile_shader)        # it still compiles
        with pytest.raises((AssertionError, RuntimeError)):
            contract.compare("metal", *random(70, 64), True)
    finally:
        metal.library.cache_clear()


@emulated
@pytest.mark.skipif(bool(emulator.no_sanitizers()), reason=str(emulator.no_sanitizers()))
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_the_sanitizers_find_nothing(sanitizer: str, design: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No race between threads, and no access outside of an array, in any kernel."""
    monkeypatch.setattr(metal, "compile_for_cpu", lambda source: emulator.compile_shader(source, sanitizer=sanitizer))
    for D in (16, 80):
        q, k, v = (x[:1] for x in random(40, D))
        contract.run("metal", q, k, v, torch.ones_like(q), torch.ones(1, 2, 40), window=17)


def test_the_text_is_what_metals_compiler_takes() -> None:
    """What the emulator does not insist on; address spaces, C++14 and threadgroup memory it does."""
    text = SOURCE.read_text(encoding="ascii")
    assert max(map(int, re.findall(r"\[\[buffer\((\d+)\)\]\]", text))) < 31
    code = re.sub(r"//.*", "", text)
    for word in ("double", "auto ", "if constexpr", "atomic", "[=]", "[&]", "function_constant"):
        assert word not in code
    for line in code.splitlines():      # a bare pointer would be one to thread memory, which the emulator lets pass
        for pointer in re.findall(r"(\w+)?\s*(?:const\s+)?\b(?:float|int|T|simdgroup_float8x8)\*", line):
            assert pointer in ("device", "threadgroup", "thread", "constant"), line
