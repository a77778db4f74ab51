"""What `forge bench train` makes of a profile and of a GPU's name; the command itself is in test_choices.py."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from forge import bench, machine
from forge.config import Interrupted
from forge.presets import preset


@pytest.mark.parametrize(("name", "bfloat16", "fp8"), [
    ("NVIDIA H200", 989e12, 1979e12), ("NVIDIA H100 80GB HBM3", 989e12, 1979e12), ("NVIDIA H100 PCIe", 756e12, 1513e12),
    ("NVIDIA A100-SXM4-80GB", 312e12, None), ("NVIDIA L40S", 362e12, 733e12), ("NVIDIA L4", 121e12, 242e12),
    ("NVIDIA GeForce RTX 4090", 165.2e12, 330.3e12), ("Something of tomorrow", None, None)])
def test_peaks_by_name(name: str, bfloat16: float | None, fp8: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert machine.peak_flops("bfloat16") == bfloat16
    assert machine.peak_flops("fp8") == fp8
    assert machine.peak_flops("float32") is None


def event(name: str, start: float, end: float, annotation: bool = False) -> Any:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=DeviceType.CUDA,
                           is_user_annotation=annotation)


EVENTS = [event("nvjet_tst_256x128", 0, 400), event("dkdv_kernel", 400, 500), event("loss_kernel", 550, 600),
          event("activation_backward_kernel", 600, 640), event("triton_per_fused_add_0", 640, 700),
          event("Memset (Device)", 700, 710), event("void at::native::foreach", 710, 800), event("sgemm", 800, 900),
          event("Optimizer.step#Muon.step", 705, 1000, annotation=True),
          event("Memcpy HtoD", 450, 480)]      # beside other work


def test_a_profile_of_a_gpu_is_parted_by_kernels() -> None:
    parts = bench.gpu_parts(EVENTS, steps=2)
    assert {name: round(2000 * ms) for name, (ms, _) in parts.items()} == {
        "matrix products": 400, "optimizer": 190, "attention": 100, "compiled: norms, rope, sums": 60, "loss": 50,
        "idle": 50, "activations": 40, "copies": 40}
    assert parts["idle"][1] == pytest.approx(50 / 900)
    assert next(iter(parts)) == "matrix products"
    assert bench.kernels(EVENTS, steps=2, most=2) == [("nvjet_tst_256x128", 0.2, 0.5), ("dkdv_kernel", 0.05, 0.5)]


def test_a_signal_ends_it_and_nothing_is_said_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise Interrupted("stopped and saved; go on with: forge train --resume gone", signal.SIGTERM)

    monkeypatch.setattr(bench, "train", stopped)
    with pytest.raises(Interrupted, match=r"^stopped; nothing is kept$") as caught:
        bench.bench_train(preset("shakespeare"))
    assert caught.value.exit_code == 143
