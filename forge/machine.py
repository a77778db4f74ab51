"""What this machine offers a run: device, dtype, threads, compiler. Found once, kept in the run's config."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import psutil
import torch

import forge
from forge.config import RequestError, nearest
from forge.memory import processor_name


def pick_device(name: str) -> torch.device:
    """cuda, mps or cpu: the first that is there, or the one named. Raises RequestError when that is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(device for device, found in there.items() if found))
    if name not in there:
        raise RequestError(f"device {name}: there is no such device; {nearest(name, ['auto', *there])}")
    if not there[name]:
        found = ", ".join(device for device in there if there[device])
        raise RequestError(f"device {name}: torch {torch.__version__} finds no such device here (found: {found}); name one "
                           "of those, or leave it out")
    return torch.device(name)


def settle_cpu(threads: int = 0) -> None:
    """Sets what a CPU must have before the first large operation, for results that are equal to the bit.

    Denormals are flushed: peaked logits otherwise cost ten times the time, and threads inherit the setting from the
    one that makes them. Then each function that MKL's vector library computes is called once on one number: its first
    call chooses the kernel, and when threads make it together one may take a less accurate one (pytorch#188792).
    """
    if threads:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    for dtype in (torch.float32, torch.float64):
        for function in (torch.exp, torch.log, torch.sqrt, torch.sin, torch.cos, torch.tanh, torch.erf, torch.log1p):
            function(torch.ones(1, dtype=dtype))


def wait(device: torch.device) -> None:
    """Until the device has done what it was given; a CPU always has."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def matmul_flops(device: torch.device, dtype: torch.dtype, n: int = 0, seconds: float = 0.5) -> float:
    """FLOP/s of a product of two (n, n) matrices: the best of those that fit into so many seconds."""
    n = n or (8192 if device.type == "cuda" else 1024)
    # random numbers: a GPU that multiplies ones is cooler, and so faster, than one that trains
    a = torch.randn(n, n, generator=torch.Generator(device).manual_seed(0), device=device, dtype=dtype)
    a @ a
    wait(device)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        a @ a
        wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * n ** 3 / best


# Dense TFLOP/s (no sparsity, sums in float32) of the makers' data sheets: (in the GPU's name, bfloat16, fp8)
PEAKS = (("B300", 2250, 4500), ("B200", 2250, 4500), ("GH200", 989, 1979), ("H200", 989, 1979), ("H100 NVL", 835, 1671),
         ("H100 PCIe", 756, 1513), ("H100", 989, 1979), ("A100", 312, None), ("A800", 312, None), ("L40S", 362, 733),
         ("L40", 181, 362), ("L4", 121, 242), ("A40", 150, None), ("A10G", 70, None), ("A10", 125, None),
         ("RTX 6000 Ada", 364, 729), ("RTX A6000", 155, None), ("RTX 5090", 209.5, 419), ("RTX 4090", 165.2, 330.3),
         ("RTX 3090", 71, None))


def without_fp8(device: torch.device) -> str | None:
    """Why the device cannot multiply in 8 bits; None: it can."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= (8, 9):
        return None
    return f"it needs compute capability 8.9 (Ada, Hopper) or newer, and this GPU has {major}.{minor}"


def peak_flops(dtype: str) -> float | None:
    """The dense rate, FLOP/s, that the maker of the GPU states; None: it is not in the table."""
    if not torch.cuda.is_available() or dtype not in ("bfloat16", "fp8"):
        return None
    name = torch.cuda.get_device_name()
    for known, *rates in PEAKS:
        if known in name:
            rate = rates[dtype == "fp8"]
            return None if rate is None else rate * 1e12
    return None


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Equal to the bit, run after run. It must hold before the model is compiled: without it a compiled embedding
    backward adds in any order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")     # read when cuBLAS is first used
    settings: Any = torch.utils.deterministic      # a module with a property, which its type does not know
    before, fill = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(on)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fill


def compiler() -> str | None:
    """The C++ compiler that torch.compile would call; None: there is none, and training runs uncompiled."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["clang++"] if sys.platform == "darwin" else ["g++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def memory_bytes(device: torch.device) -> int:
    """All that the device has; an Apple GPU, which shares the machine's, what macOS recommends it to take."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return torch.mps.recommended_max_memory() if device.type == "mps" else psutil.virtual_memory().total


def free_bytes(device: torch.device) -> int:
    """What a run may take: of an NVIDIA GPU what no other process holds, elsewhere all there is."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_bytes(device)


def bound_memory(device: torch.device) -> None:
    """On an Apple GPU memory runs out at what macOS recommends; torch would let it grow to 1.7 times that, into swap."""
    if device.type == "mps":
        torch.mps.set_per_process_memory_fraction(1.0)


def out_of_memory(error: RuntimeError) -> bool:
    """Whether a device's memory ran out, which MPS says with a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "MPS backend out of memory" in str(error)


def empty_cache(device: torch.device) -> None:
    """Gives back to the system what torch keeps of a GPU's memory for later."""
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()


def environment(device: torch.device) -> dict[str, object]:
    """What environment.json holds: versions, processor, memory, device."""
    packages = {name: version(name) for name in ("torch", "numpy", "tokenizers", "safetensors")}
    return {"forge": forge.__version__, "python": platform.python_version(), **packages, "platform": platform.platform(),
            "processor": processor_name(), "cores": psutil.cpu_count(logical=False), "threads": torch.get_num_threads(),
            "memory_bytes": psutil.virtual_memory().total, "device": device.type,
            "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None, "argv": sys.argv}
