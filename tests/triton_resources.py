"""python tests/triton_resources.py 80 90: registers, spilled bytes and shared memory of every Triton kernel, compiled for
these GPUs without one, by the launchers themselves on tensors without memory. JSON."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from forge.ops import activated_linear, cross_entropy
from forge.ops.attention import packed
from forge.ops.attention import triton as launcher

SHARED = {80: 163 << 10, 90: 227 << 10}
DTYPES = ("float32", "bfloat16", "float16")
NAMES = ("forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel", "decode_kernel", "combine_kernel", "split_kernel")


class Driver:
    """Stands for the GPU that is compiled for."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def usage(cubin: bytes) -> dict[str, int]:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", text)}
    return {"registers": found["REG"], "spilled": found["STACK"]}


class Kernel:
    """Compiles where a kernel would be launched."""

    def __init__(self, kernel: Any, name: str, note: Callable[[str, Any], None]) -> None:
        self.kernel, self.name, self.note = kernel, name, note

    def __getitem__(self, grid: tuple) -> Callable[..., None]:
        return lambda **args: self.note(self.name, self.kernel.warmup(grid=(1,), **args))


def kernels(sm: int, D: int, dtype: str) -> dict[str, dict[str, int]]:
    """{"sm_90 forward_kernel bfloat16 128": {registers, spilled, shared, limit}} of causal GQA training and decoding."""
    from triton.runtime import driver

    driver.set_active(Driver(sm))
    launcher.gpu = lambda: (sm, SHARED[sm], 40 << 20)
    found: dict[str, dict[str, int]] = {}

    def note(name: str, compiled: Any) -> None:
        found[f"sm_{sm} {name} {dtype} {D}"] = {**usage(compiled.asm["cubin"]), "shared": compiled.metadata.shared,
                                               "limit": SHARED[sm]}

    def standing_in(module: str, *names: str) -> Any:
        real = importlib.import_module(module)
        return SimpleNamespace(**{name: Kernel(getattr(real, name), name, note) for name in names})

    B, T, H, K = 2, 2048, 4, 2
    q, k, lse = (torch.empty(shape, dtype=dt, device="meta") for shape, dt in (
        ((B, T, H, D), getattr(torch, dtype)), ((B, T, K, D), getattr(torch, dtype)), ((B, H, T), torch.float32)))
    launch = launcher.Launch(q, k, None, True, None, 0.1, None, "")
    launch.kernels = standing_in("forge.ops.attention.triton_kernels", *NAMES)
    launch.forward(q, k, k, q, lse)
    launch.backward(q, None, q, k, k, q, lse, q, k, k)
    launch = launcher.Launch(q[:, :1], k, None, True, None, 0.1, None, "")
    launch.kernels = standing_in("forge.ops.attention.triton_kernels", *NAMES)
    launch.decode(q[:, :1], k, k, q[:, :1], lse)
    if dtype == "float16" or D not in (64, 128, 256):       # nothing is trained in float16; a few head_dims are enough
        return found
    gain, table = (torch.empty(shape, device="meta") for shape in ((D,), (T, 1, D // 2)))
    qkv = torch.empty(B, T, (H + 2 * K) * D, dtype=q.dtype, device="meta")
    rotary = packed.Rotary(qkv, gain, gain, table, table, H, K)
    rotary.kernels = standing_in("forge.ops.attention.rotary_triton", "rotary_kernel", "rotary_backward_kernel")
    rotary.forward(q, k)
    rotary.backward(q, k, qkv)
    if D == 64:         # these know no head_dim
        logits, h, a = (torch.empty(8, n, dtype=q.dtype, device="meta") for n in (50_304, 4096, 2048))
        targets = torch.empty(8, dtype=torch.long, device="meta")
        modules = {module: standing_in(module, *names) for module, names in (
            ("forge.ops.cross_entropy_triton", ["loss_kernel"]),
            ("forge.ops.activated_linear_triton", ["activation_kernel", "activation_backward_kernel"]))}
        with patch.dict(sys.modules, modules):
            cross_entropy.softmax_in_kernel(logits, targets, targets[0], 50_257, 3.0, 0.1, True)
            activated_linear.launch("activation_kernel", a, "swiglu", H=h, A=a)
            activated_linear.launch("activation_backward_kernel", a, "swiglu", DA=a, H=h, DH=h, A=a)
    return found


def every(sm: int) -> dict[str, dict[str, int]]:
    some = (64, 128, 256)
    cases = [(sm, D, dtype) for D in sorted(launcher.HEAD_DIMS, reverse=True) for dtype in DTYPES
             if (D in some) + (sm >= 90) + (dtype != "float16") >= 2]      # of these three two are enough
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:  # it keeps one target
        return {name: numbers for part in pool.map(kernels, *zip(*cases)) for name, numbers in part.items()}


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    print(json.dumps({name: numbers for sm in sys.argv[1:] for name, numbers in every(int(sm)).items()}, indent=0))
