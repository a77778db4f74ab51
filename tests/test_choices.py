from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._inductor.exc import InductorError

from forge import choices, machine, plan
from forge.config import Config, Interrupted, ModelConfig, RequestError, TrainConfig
from forge.memory import Memory

CPU = torch.device("cpu")
BASE = Config(model=ModelConfig(vocab_size=32, dim=16, n_layers=1, n_heads=2, seq_len=16).resolve(),
              train=TrainConfig(batch_tokens=64, steps=10))


@pytest.fixture
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "forge" / "measured.json"


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Trial seconds by (dtype, attention, threads, compiled), in place of measuring; what was asked for is noted."""
    table: dict = {"asked": []}

    def trial_s(m: ModelConfig, t: TrainConfig, mask: bool, compiled: bool, rows: int = 0) -> float:
        key = (t.dtype, t.attention, t.threads, compiled)
        table["asked"].append(key)
        found = table.get(key, 1.0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(choices, "trial_s", trial_s)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    return table


def chosen(c: Config, **train: object) -> tuple[TrainConfig, str]:
    lines: list[str] = []
    t = choices.choose(replace(c, train=replace(c.train, **train)), CPU, False, lines.append).train  # type: ignore[arg-type]
    return t, "\n".join(lines)


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize(("figures", "expected"), [
    ({}, ("float32", "sdpa", 4)),
    ({("bfloat16", "sdpa", 4, False): 0.5}, ("bfloat16", "sdpa", 4)),
    ({("bfloat16", "sdpa", 4, False): 0.97}, ("float32", "sdpa", 4)),        # not worth it
    ({("float32", "blocked", 4, False): 0.5}, ("float32", "blocked", 4)),
    ({("float32", "sdpa", 2, False): 0.9, ("float32", "sdpa", 1, False): 0.5}, ("float32", "sdpa", 1)),
    ({("bfloat16", "sdpa", 4, False): 0.6, ("bfloat16", "blocked", 4, False): 0.5, ("bfloat16", "blocked", 2, False): 0.4},
     ("bfloat16", "blocked", 2))])
def test_the_fastest_trial_is_taken(times: dict, figures: dict, expected: tuple) -> None:
    times |= figures
    t, said = chosen(BASE)
    assert (t.dtype, t.attention, t.threads) == expected
    assert all(f"{1000 * s:.3g} ms" in said for s in figures.values())


@pytest.mark.usefixtures("nothing_known")
def test_what_was_asked_for_is_not_tried_against_others(times: dict) -> None:
    times |= {("float32", "sdpa", 4, False): 9.0}
    t, _ = chosen(BASE, dtype="bfloat16", attention="blocked", threads=3, compile=False)
    assert (t.dtype, t.attention, t.compile) == ("bfloat16", "blocked", False)
    assert {key[:2] for key in times["asked"]} == {("bfloat16", "blocked")}


def test_it_is_measured_once(times: dict, nothing_known: Path) -> None:
    times |= {("bfloat16", "sdpa", 4, False): 0.5}
    first = chosen(BASE)
    n = len(times["asked"])
    assert n > 2
    times |= {("bfloat16", "sdpa", 4, False): 2.0}      # another time it would be slower
    assert chosen(BASE) == first
    assert len(times["asked"]) == n
    nothing_known.write_text("{ damaged")
    assert chosen(BASE)[0].dtype == "float32"
    assert len(times["asked"]) == 2 * n
    json.loads(nothing_known.read_text())


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.skipif(machine.compiler() is None, reason="no C++ compiler is here")
def test_compiling_pays_in_a_long_run_when_it_is_faster(times: dict) -> None:
    compiled = ("float32", "sdpa", 4, True)
    times |= {compiled: 0.5}
    assert not chosen(BASE)[0].compile                                              # ten steps of two seconds
    assert "saves no time" in chosen(BASE)[1]
    assert compiled not in times["asked"]
    assert chosen(BASE, compile=True)[0].compile                                    # but who asks for it gets it
    assert chosen(BASE, steps=1000)[0].compile
    assert chosen(BASE, steps=None, minutes=30.0)[0].compile
    assert not chosen(BASE, steps=None, minutes=0.5)[0].compile
    assert not chosen(BASE, steps=1000, minutes=0.5)[0].compile                      # the first to end
    assert not chosen(BASE, steps=1000, compile=False)[0].compile


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.skipif(machine.compiler() is None, reason="no C++ compiler is here")
@pytest.mark.parametrize(("figure", "why"), [
    (1.5, "it is no faster"), (InductorError(RuntimeError("no omp.h"), None), "no omp.h")])
def test_a_compiler_that_fails_or_gains_nothing_is_not_used(times: dict, figure: object, why: str) -> None:
    times |= {("float32", "sdpa", 4, True): figure}
    t, said = chosen(BASE, steps=1000)
    assert not t.compile
    assert why in said


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.skipif(machine.compiler() is None, reason="no C++ compiler is here")
def test_a_signal_while_compiling_ends_it(times: dict) -> None:
    wrapped = InductorError(RuntimeError("stopped"), None)
    wrapped.__cause__ = RuntimeError("a layer between")
    wrapped.__cause__.__context__ = Interrupted("stopped", 2)
    times |= {("float32", "sdpa", 4, True): wrapped}
    with pytest.raises(Interrupted):
        chosen(BASE, steps=1000)


def test_without_a_compiler_it_says_what_that_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "compiler", lambda: None)
    t, said = chosen(BASE, steps=100_000)
    assert not t.compile
    assert said.count("no C++ compiler is here; with one (apt install g++)") == 1
    with pytest.raises(RequestError, match=r"--train.compile True: no C\+\+ compiler"):
        choices.require(replace(BASE, train=replace(BASE.train, compile=True)), CPU)


@pytest.mark.parametrize("mask", [False, True])
def test_a_real_trial_takes_time_and_leaves_the_threads_as_they_were(mask: bool) -> None:
    before = torch.get_num_threads()
    t = replace(BASE.train, device="cpu", dtype="float32", attention="blocked", threads=1, micro_batch=2)
    assert 0 < choices.trial_s(BASE.model, t, mask, False) < 5
    assert torch.get_num_threads() == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_backend_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(RequestError, match="did you mean sdpa"):
        choices.require(replace(BASE, train=replace(BASE.train, attention="sdpo")), CPU)
    with pytest.raises(RequestError, match="packed documents apart"):
        choices.choose(replace(BASE, train=replace(BASE.train, attention="sdpa")), CPU, True, print)


def test_a_gpu_measures_tiles_for_long_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(choices, "fastest", lambda case, *shape: asked.append(shape) or "triton")
    monkeypatch.setattr(choices, "tuned", lambda case, *shape: "triton 64x64w4s3 64x64w4s2 128x64w8s3")
    monkeypatch.setattr(machine, "matmul_flops", lambda *_, **__: 1e15)
    fits = choices.case(BASE.model, torch.device("cuda"), "bfloat16", True)
    for t, words in ((replace(BASE.train, minutes=5), 1), (replace(BASE.train, minutes=600), 4), (BASE.train, 1),
                     (replace(BASE.train, steps=None, tokens=10 ** 18), 4)):
        assert len(choices.on_gpu(replace(BASE, train=t), fits).split()) == words
    assert asked[0] == (16, 2, 2)
    monkeypatch.setattr(choices, "fastest", lambda case, *shape: "sdpa")
    assert choices.on_gpu(replace(BASE, train=replace(BASE.train, minutes=600)), fits) == "sdpa"


def test_a_cpu_takes_few_windows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda _: 10 ** 12)
    for threads, tokens in ((1, 2048), (2, 2048), (8, 8192), (64, 16_384)):
        t = replace(BASE.train, batch_tokens=65_536, dtype="float32", device="cpu", threads=threads)
        assert plan.fit(replace(BASE, train=t), CPU)[0].train.micro_batch * 16 == tokens


def test_the_matrix_rate_is_a_rate() -> None:
    assert 1e8 < machine.matmul_flops(CPU, torch.float32, 128, 0.05) < 1e15


def test_a_home_that_cannot_be_written_costs_only_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert Memory("here")("x", lambda: 3.0) == 3.0


Call = Callable[..., object]


def test_doctor_tells_and_advises(forge: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "matmul_flops", lambda *_: 1e12)
    got = forge("doctor")
    assert got.code == 0
    for word in ("device: cpu", "memory:", "threads:", "dtypes: float32 1 TFLOP/s", "compiler:", "one document: sdpa",
                 "packed documents: blocked", "packed documents: sdpa is not taken: it cannot keep packed documents apart",
                 "disk:"):
        assert word in got.out
    monkeypatch.setattr(machine, "compiler", lambda: None)
    assert "compiler: none; training runs uncompiled" in forge("doctor").out
    assert forge("doctor", "--device", "tpu").code == 2


def test_bench_train_and_generate(forge: Call) -> None:
    tiny = ("--model.dim", 16, "--model.n-heads", 2, "--model.n-layers", 2, "--model.seq-len", 32, "--train.batch-tokens",
            256, "--train.compile", False)
    got = forge("bench", "train", *tiny, "--bench-steps", 2, "--profile", "--out", "b.json")
    assert got.code == 0, got.err
    result = json.loads(Path("b.json").read_text())
    assert result["measured"]["tokens per s"] == pytest.approx(256_000 / result["measured"]["step ms"])
    shares = [share for _, share in result["profile"].values()]
    assert {"attention", "matrix products of the layers", "head and loss", "optimizer: Muon"} <= set(result["profile"])
    assert 0.9 < sum(shares) < 1.2
    assert result["environment"]["torch"] == torch.__version__
    assert result["config"]["model"]["dim"] == 16
    assert os.listdir() == ["b.json"]
    got = forge("bench", "generate", "--preset", "shakespeare", "--prompt-tokens", 8, "--new-tokens", 4, "--batches", 1, 3,
                "--dtypes", "float32", "--out", "g.json")
    assert got.code == 0, got.err
    rows = json.loads(Path("g.json").read_text())["measured"]
    assert [row["batch"] for row in rows] == [1, 3]
    assert all(row["new_tokens_per_s"] > 1 for row in rows)
    assert forge("bench", "generate", "--preset", "shakespeare", "--prompt-tokens", 500).code == 2
    assert forge("bench", "tarin").code == 2
    assert forge("bench", "train", "--bench-steps", 0).code == 2
