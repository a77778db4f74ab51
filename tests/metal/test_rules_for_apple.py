"""The rules that the rest of the road holds on an Apple GPU, each by the function that decides; none is seen on one here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge import choices, machine, optim, plan, training
from forge.config import Config, ModelConfig, OptimConfig, TrainConfig
from forge.data.loader import Feed
from forge.metrics import Reading
from forge.model.transformer import Transformer
from forge.ops.attention import BACKENDS, Case

APPLE = torch.device("mps")
BASE = Config(model=ModelConfig(vocab_size=32, dim=16, n_layers=1, n_heads=2, seq_len=16).resolve(),
              train=TrainConfig(batch_tokens=64, steps=100_000))
SMALL = ("--model.dim", 16, "--model.n-heads", 2, "--model.n-layers", 2, "--model.seq-len", 32, "--train.batch-tokens", 256,
         "--train.compile", False, "--train.sample-every", 0, "--train.dtype", "float32")


@pytest.fixture
def apple(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """An Apple GPU of 32 GB, and trial milliseconds by (dtype, attention, compiled) in place of measuring."""
    table: dict[Any, Any] = {"asked": [], "fault": None}

    def trial_s(m: ModelConfig, t: TrainConfig, mask: bool, compiled: bool, rows: int = 0) -> float:
        table["asked"].append((t.device, t.threads))
        return float(table.get((t.dtype, t.attention, compiled), 1.0))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 24 << 30)
    monkeypatch.setattr(choices, "passing", lambda case: ["metal", "blocked"])
    monkeypatch.setattr(choices, "verdicts", lambda case: {})
    monkeypatch.setattr(choices, "trial_s", trial_s)
    monkeypatch.setattr(choices, "compiled_fault", lambda m, t, mask: table["fault"])
    return table


def chosen(**train: Any) -> tuple[TrainConfig, str]:
    said: list[str] = []
    c = replace(BASE, train=replace(BASE.train, **train))
    return choices.choose(c, machine.pick_device("auto"), False, said.append).train, "\n".join(said)


def test_the_device_is_found(apple: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.pick_device("auto").type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.pick_device("auto").type == "cuda"
    assert machine.pick_device("mps").type == "mps"


@pytest.mark.parametrize(("figures", "expected"), [
    ({}, ("float32", "metal")),
    ({("bfloat16", "metal", False): 0.5}, ("bfloat16", "metal")),
    ({("bfloat16", "metal", False): 0.97}, ("float32", "metal")),           # not worth it
    ({("float32", "blocked", False): 0.5}, ("float32", "blocked"))])
def test_dtype_and_attention_by_a_measured_step(apple: dict, figures: dict, expected: tuple) -> None:
    apple |= figures
    t, _ = chosen(compile=False)
    assert (t.device, t.dtype, t.attention) == ("mps", *expected)
    assert {device for device, _ in apple["asked"]} == {"mps"}
    assert len({threads for _, threads in apple["asked"]}) == 1         # the CPU's threads are no matter


def test_it_is_compiled_only_where_that_passes_a_probe_and_is_faster(apple: dict) -> None:
    apple[("float32", "metal", True)] = 0.5
    assert chosen()[0].compile
    apple["fault"] = "compiled, a step is off by 1.0e+00 of the uncompiled, 1e-03 is allowed"
    t, said = chosen()
    assert not t.compile
    assert "off by 1.0e+00" in said


def test_the_probe_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    t = replace(BASE.train, device="cpu", dtype="float32", attention="blocked", threads=1, micro_batch=2)
    monkeypatch.setattr(Transformer, "compile_parts", lambda self: None)
    assert choices.compiled_fault(BASE.model, t, True) is None

    def wrong(self: Transformer) -> None:
        self.mean_nats = lambda *inputs: 1.01 * Transformer.mean_nats(self, *inputs)       # type: ignore[method-assign]

    monkeypatch.setattr(Transformer, "compile_parts", wrong)
    assert "is off by 1.0e-02" in str(choices.compiled_fault(BASE.model, t, False))

    def no_number(self: Transformer) -> None:
        self.blocks[0].mlp.down.weight.register_hook(lambda grad: grad * torch.nan)

    monkeypatch.setattr(Transformer, "compile_parts", no_number)
    assert "is off by nan" in str(choices.compiled_fault(BASE.model, t, False))

    def broken(self: Transformer) -> None:
        def fails(*_: object) -> None:
            raise TimeoutError      # an error without words
        self.mean_nats = fails      # type: ignore[method-assign, assignment]

    monkeypatch.setattr(Transformer, "compile_parts", broken)
    assert choices.compiled_fault(BASE.model, t, False) == "the compiler failed (TimeoutError)"


def test_memory_is_what_the_system_recommends(apple: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.free_bytes(APPLE) == 24 << 30
    bounds: list[float] = []
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", bounds.append)
    machine.bound_memory(APPLE)
    machine.bound_memory(torch.device("cpu"))
    assert bounds == [1.0]
    assert machine.out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"))
    assert not machine.out_of_memory(RuntimeError("shapes do not fit"))
    device = replace(BASE.train, device="mps", dtype="float32", micro_batch=0)
    fitting, words = plan.fit(replace(BASE, train=device), APPLE)
    assert "of 23 GB free" in words
    assert fitting.train.micro_batch == 4


def test_nothing_is_pinned_or_copied_behind_the_hosts_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Feed(None, 16, 1, False, APPLE).stream is None       # type: ignore[arg-type]
    late: list[bool] = []
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *args, **rest: late.append(rest.get("non_blocking", False)) or to(
        x, *args, **rest))
    Reading(1, 0.1, (0, 8), *torch.ones(3).unbind(0))
    assert late == [False]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_bad_step_changes_nothing_though_the_fused_step_takes_no_note(optimizer: Any, monkeypatch: pytest.MonkeyPatch
                                                                        ) -> None:
    """pytorch#186360: on MPS fused AdamW steps whatever found_inf says."""
    monkeypatch.setattr(optim, "HOST_MASKS", {"cpu"})
    model = Transformer(BASE.model)
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    optimizers = optim.optimizers(model, OptimConfig(optimizer=optimizer), torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    for bad in (1.0, 0.0):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optim.step(optimizers, torch.tensor(bad))
        changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before)]
        assert not any(changed) if bad else all(changed)
        assert bool(optim.state_tensors(model, optimizers)) != bool(bad)


class Dtypes(TorchDispatchMode):
    """What operations give, while a step is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        self.seen |= {x.dtype for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out


def test_no_step_needs_float64(forge: Callable[..., Any], text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And evaluation neither; sampling reads logits on the CPU."""
    steps = Dtypes()
    for owner, name in ((Transformer, "forward"), (training.Guard, "judge"), (optim, "step")):
        monkeypatch.setattr(owner, name, in_mode(steps, getattr(owner, name)))
    assert forge("train", text_file, *SMALL, "--train.steps", 3, "--train.attention", "blocked", "--run", "r").code == 0
    assert torch.float32 in steps.seen
    assert torch.float64 not in steps.seen


def in_mode(mode: TorchDispatchMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with mode:
            return function(*args)
    return call


def test_training_has_one_shape(forge: Callable[..., Any], text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS makes a graph for every shape that it meets. An evaluation has two: its last windows may be fewer."""
    shapes: dict[bool, set] = {True: set(), False: set()}
    forward = Transformer.forward

    def noted(self: Transformer, inputs: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes[self.training].add(tuple(inputs.shape))
        return forward(self, inputs, *rest)

    monkeypatch.setattr(Transformer, "forward", noted)
    assert forge("train", text_file, *SMALL, "--train.steps", 6, "--train.micro-batch", 4, "--run", "r").code == 0
    assert shapes[True] == {(4, 32)}
    assert len(shapes[False]) <= 2


def test_what_attention_may_be_taken() -> None:
    def reason(name: str, dtype: torch.dtype = torch.float32, head_dim: int = 64) -> str | None:
        found: str | None = BACKENDS[name].supports(Case(
            "mps", dtype, head_dim, grouped=True, square=True, single=False, causal=True, window=True, starts=True,
            softcap=True, lse=True))
        return found

    assert reason("metal") is None
    assert reason("metal", torch.bfloat16, 128) is None
    assert reason("metal", torch.float64) == "knows no float64"
    assert "head_dim 72" in str(reason("metal", head_dim=72))
    assert reason("blocked", head_dim=72) is None
    assert reason("triton") == "needs an NVIDIA GPU"
    assert reason("sdpa") is not None
    plain = Case("mps", torch.float32, 64, grouped=False, square=True, single=False, causal=True, window=False, starts=False,
                 softcap=False, lse=False)
    assert "T² memory" in str(BACKENDS["sdpa"].supports(plain))
