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
from forge.config import Config, RequestError
from forge.memory import processor_name

MICRO_BATCH_TOKENS = {"mps": 16_384, "cuda": 65_536}     # in one forward; more gains nothing
THREAD_TOKENS = 1024    # on a CPU, for each thread: 16,384 on two, which leave its caches, took a quarter more time


def pick_device(name: str) -> torch.device:
    """cuda, mps or cpu: the first that is there, or the one named. Raises RequestError when that is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(device for device, found in there.items() if found))
    if not there.get(name):
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


def matmul_flops(device: torch.device, dtype: torch.dtype, n: int = 0, seconds: float = 0.5) -> float:
    """FLOP/s of a product of two (n, n) matrices: the best of those that fit into so many seconds."""
    n = n or (8192 if device.type == "cuda" else 1024)
    a = torch.ones(n, n, device=device, dtype=dtype)
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    a @ a
    wait()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        a @ a
        wait()
        best = min(best, time.perf_counter() - began)
    return 2 * n ** 3 / best


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
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def require_memory(config: Config, device: torch.device) -> None:
    """Raises RequestError when weights, gradients and moments, four float32 numbers a parameter, cannot fit."""
    need, there = 16 * config.model.parameters, memory_bytes(device)
    if need > there:
        raise RequestError(f"a model of {config.model.parameters:,} parameters needs {need / 1e9:,.0f} GB for weights, "
                           f"gradients and moments, and {device.type} has {there / 1e9:,.0f} GB; name a smaller --preset, "
                           "or set a smaller --model.dim or --model.n-layers")


def micro_batch(config: Config, device: torch.device, dtype: torch.dtype) -> int:
    """Sequences in one forward: the largest divisor of the batch whose activations take a quarter of the memory."""
    m = config.model
    memory = memory_bytes(device)
    # kept for the backward, a token and layer: about 12 vectors of width dim and 4 of the MLP's width
    token_bytes = m.n_layers * (12 * m.dim + 4 * m.ffn_dim) * dtype.itemsize
    tokens = MICRO_BATCH_TOKENS.get(device.type, min(THREAD_TOKENS * max(2, torch.get_num_threads()), 16_384))
    most = min(tokens, memory // 4 // token_bytes)
    sequences = config.train.batch_tokens // m.seq_len
    return max(d for d in range(1, max(1, most // m.seq_len) + 1) if sequences % d == 0)


def environment(device: torch.device) -> dict[str, object]:
    """What environment.json holds: versions, processor, memory, device."""
    packages = {name: version(name) for name in ("torch", "numpy", "tokenizers", "safetensors")}
    return {"forge": forge.__version__, "python": platform.python_version(), **packages, "platform": platform.platform(),
            "processor": processor_name(), "cores": psutil.cpu_count(logical=False), "threads": torch.get_num_threads(),
            "memory_bytes": psutil.virtual_memory().total, "device": device.type,
            "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None, "argv": sys.argv}
