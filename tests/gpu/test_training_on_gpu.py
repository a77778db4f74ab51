"""Training on an NVIDIA GPU: its ops against their references, the recorded step, equality to the bit, memory that runs out.
Run by hand, as test_attention_on_gpu.py is; what was seen is in docs/RESULTS.md."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import test_activated_linear
import test_cross_entropy
import test_float8
import test_packed
import torch
from safetensors.torch import load_file

from forge.graph import Replayed
from forge.ops import cross_entropy

DTYPES = (torch.bfloat16, torch.float32)
TRAIN = [sys.executable, "-m", "forge.cli", "train"]
SMALL = ["--preset", "30m", "--data.tokenizer", "gpt2", "--train.attention", "triton", "--model.dropout", "0.1",
         "--model.n-layers", "4", "--train.eval-every", "0", "--train.sample-every", "0"]
RUN = [*TRAIN, *SMALL, "--train.batch-tokens", "32768", "--train.micro-batch", "8", "--train.steps", "14",
       "--train.save-every", "5"]


@pytest.mark.parametrize("chunk", [1 << 28, 1 << 23])
@pytest.mark.parametrize(("softcap", "z_loss"), [(None, 0.0), (3.0, 0.1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_equals_the_reference(dtype: torch.dtype, softcap: float | None, z_loss: float, chunk: int,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = test_cross_entropy.inputs

    def on_gpu(dtype: torch.dtype, V: int) -> list[torch.Tensor]:
        return [x.detach().cuda().requires_grad_(x.requires_grad) for x in inputs(dtype, N=700, C=64, V=V)]

    monkeypatch.setattr(test_cross_entropy, "inputs", on_gpu)
    monkeypatch.setattr(cross_entropy, "GPU_CHUNK_LOGITS", chunk)
    test_cross_entropy.compare(dtype, softcap, z_loss, V=50_257)


@pytest.mark.parametrize("kind", test_activated_linear.KINDS)
@pytest.mark.parametrize("width", [1024, 344])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_activations_equal_the_reference(dtype: torch.dtype, width: int, kind: str) -> None:
    test_activated_linear.compare(kind, dtype, width, "cuda")


@pytest.mark.parametrize("variant", test_packed.VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_attention_equals_the_reference(dtype: torch.dtype, variant: str) -> None:
    test_packed.compare(test_packed.VARIANTS[variant], dtype, "cuda", backend="triton")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(48, 96, 64), (4096, 3072, 8192)])
def test_products_in_8_bits_equal_the_reference(shape: tuple[int, int, int], compiled: bool) -> None:
    test_float8.compare(*shape, "cuda", compiled)


def test_a_recording_does_what_the_function_does() -> None:
    w = torch.randn(64, 64, device="cuda", requires_grad=True)
    w.grad = torch.zeros_like(w)

    def step(x: torch.Tensor, none: None) -> torch.Tensor:
        loss = (x @ w).square().mean()
        loss.backward()
        return loss.detach()

    with torch.cuda.stream(torch.cuda.Stream()):
        replayed = Replayed(step)
        for _ in range(6):
            x = torch.randn(32, 64, device="cuda")
            w.grad.zero_()
            loss = replayed(x, None).clone()
            grad = w.grad.clone()
            w.grad.zero_()
            assert torch.equal(loss, step(x, None))
            assert torch.equal(grad, w.grad)
    assert replayed.calls == 6


def result(run: Path) -> tuple[list[dict], dict[str, torch.Tensor]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = ("tokens_per_s", "step_ms")
    return ([{key: value for key, value in record.items() if key not in times} for record in records],
            load_file(run / "checkpoints" / "step_000014" / "weights.safetensors"))


def same(one: tuple[list[dict], dict], other: tuple[list[dict], dict]) -> bool:
    return one[0] == other[0] and all(torch.equal(x, other[1][name]) for name, x in one[1].items())


def test_twice_and_killed_the_bits_are_the_same(tmp_path: Path) -> None:
    for name in ("one", "two"):
        subprocess.run([*RUN, "--run", tmp_path / name], check=True, capture_output=True)
    killed = tmp_path / "killed"
    process = subprocess.Popen([*RUN, "--run", killed], stdout=subprocess.DEVNULL)
    while not (killed / "checkpoints" / "step_000005").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    subprocess.run([*TRAIN, "--resume", killed], check=True, capture_output=True)
    whole = result(tmp_path / "one")
    assert same(whole, result(tmp_path / "two"))
    assert same(whole, result(killed))


def test_when_memory_runs_out_it_goes_on_with_less(tmp_path: Path) -> None:
    """The plan takes all that is free, and gets a part of it."""
    code = ("import sys, torch; from forge.cli import main; torch.cuda.set_per_process_memory_fraction(0.04); "
            "sys.exit(main(sys.argv[1:]))")
    arguments: list[Any] = ["train", *SMALL, "--run", tmp_path / "r", "--train.micro-batch", "128", "--train.batch-tokens",
                            "131072", "--train.steps", "4"]
    got = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert got.returncode == 0, got.stderr
    assert "out of memory" in got.stdout
    assert "so it goes on with" in got.stdout
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 4
