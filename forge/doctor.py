"""forge doctor: what this machine has, by measurement, what it means for training, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

import forge
from forge import machine
from forge.memory import memory_path, processor_name
from forge.ops.attention import BACKENDS, Case, attention, verdict

HEAD_DIM = 64
T = 1024
SLOW_DISK = 100e6       # bytes a second, below which saving a checkpoint is felt


def doctor(device: str = "auto") -> Iterator[str]:
    """Lines, each as it is found out. Raises RequestError for a device that is not there."""
    place = machine.pick_device(device)
    machine.settle_cpu()
    yield (f"forge {forge.__version__}, Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} "
           f"{platform.machine()}")
    yield from devices(place)
    yield from dtypes(place)
    yield from compiler(place)
    yield from backends(place)
    yield from disk()


def devices(place: torch.device) -> Iterator[str]:
    there = [name for name, found in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available()),
                                      ("cpu", True)) if found]
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else processor_name()
    others = [other for other in there if other != place.type]
    yield f"device: {place.type}, {name}" + (f" (also: {', '.join(others)})" if others else "")
    if place.type == "cpu" and shutil.which("nvidia-smi"):
        yield ("  an NVIDIA GPU seems to be here, and this torch does not use it: install torch's CUDA build (see "
               "pytorch.org), or a driver that fits it")
    memory, free = machine.memory_bytes(place), psutil.virtual_memory().available
    largest = memory / 16
    yield (f"memory: {memory / 1e9:,.0f} GB" + (f", {free / 1e9:,.0f} GB free" if place.type != "cuda" else "")
           + f": weights, gradients and moments of {largest / 1e6:,.0f} M parameters would fill it; stay below half of that")
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    yield (f"threads: {threads} of {cores} logical cores" + (
        "; another program that computes slows training several times" if place.type == "cpu" else ""))
    if "OMP_NUM_THREADS" in os.environ:
        yield f"  OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} is set; unset it to use all cores"
    load = psutil.cpu_percent(0.3)
    if load > 25:
        yield f"  the cores are {load:.0f} % busy with something else: training beside it is slower by more than that"


def dtypes(place: torch.device) -> Iterator[str]:
    rates = {name: machine.matmul_flops(place, getattr(torch, name)) for name in ("float32", "bfloat16")}
    ratio = rates["bfloat16"] / rates["float32"]
    yield (f"dtypes: float32 {rates['float32'] / 1e12:.3g} TFLOP/s, bfloat16 {rates['bfloat16'] / 1e12:.3g} TFLOP/s in a "
           "matrix product: " + ("bfloat16 trains faster, and is taken" if ratio > 1.2 else
                                 "bfloat16 gains no speed here; float32 is likely to be taken"))
    rate = max(rates.values()) * 0.6        # what a step usually reaches of it
    for parameters in (10e6, 124e6):
        seconds = 6 * parameters * 20 * parameters / rate
        yield (f"  {parameters / 1e6:.0f} M parameters on 20 tokens each would take about {days(seconds)}")


def days(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds < 2 * 86_400 else f"{seconds / 86_400:,.0f} days"


def compiler(place: torch.device) -> Iterator[str]:
    found = machine.compiler()
    if not found:
        yield ("compiler: none; training runs uncompiled, and a step takes about a third longer. Install one: "
               + ("xcode-select --install" if sys.platform == "darwin" else "apt install g++"))
        return
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "a.cpp"
        source.write_text("#include <vector>\nint main() { return std::vector<int>{0}[0]; }\n")
        made = subprocess.run([found, source, "-o", Path(scratch) / "a"], capture_output=True, text=True, check=False)
    if made.returncode:
        yield (f"compiler: {found} fails on a small program ({(made.stderr.splitlines() or ['no message'])[0]}); mend it, "
               "or train with --train.compile False")
    else:
        when = ("a run is compiled where a step then agrees with an uncompiled one and is faster" if place.type == "mps" else
                "runs of more than a minute or two are compiled (20 s the first time, then cached)")
        yield f"compiler: {found} works; {when}"


def backends(place: torch.device) -> Iterator[str]:
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    yield f"attention, {str(dtype)[6:]}, head_dim {HEAD_DIM}, forward and backward over {T:,} tokens:"
    for what, starts in (("one document", False), ("packed documents", True)):
        case = Case(place.type, dtype, HEAD_DIM, False, square=True, single=False, causal=True, window=False, starts=starts,
                    softcap=False, lse=False)
        taken = ""
        for name in BACKENDS:
            reason = verdict(name, case)
            if reason is None:
                taken = taken or name
                ms = attention_ms(name, place, dtype, starts)
                memory = ", memory grows with T²" if name == "reference" else ""
                yield f"  {what}: {name} {ms:.1f} ms, agrees with the reference{memory}"
            else:
                yield f"  {what}: {name} is not taken: {reason}"
    yield f"  training takes the fastest, measured on the model's own shape and remembered in {memory_path()};"
    yield "  remove that file after a change of the machine, or when it was busy at the time"


def attention_ms(name: str, place: torch.device, dtype: torch.dtype, packed: bool) -> float:
    """Milliseconds of a forward and backward, 4 heads: the best of three."""
    q, k, v = (torch.randn(1, T, 4, HEAD_DIM, device=place, dtype=dtype, requires_grad=True) for _ in range(3))
    starts = torch.zeros(1, T, dtype=torch.int32, device=place) if packed else None
    best = float("inf")
    for _ in range(4):
        machine.wait(place)
        began = time.perf_counter()
        out = attention(q, k, v, starts=starts, backend=name)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()
        machine.wait(place)
        best = min(best, time.perf_counter() - began)
    return 1000 * best


def disk() -> Iterator[str]:
    free = shutil.disk_usage(".").free
    try:
        with tempfile.NamedTemporaryFile(dir=".") as file:
            began = time.perf_counter()
            file.write(os.urandom(1 << 20) * 64)
            file.flush()
            os.fsync(file.fileno())
            rate = (64 << 20) / (time.perf_counter() - began)
    except OSError as error:
        yield f"disk: this folder cannot be written ({error.strerror}); name another with --run"
        return
    # a checkpoint holds weights and two moments in float32; three are kept, and one is being written
    yield (f"disk: {free / 1e9:,.0f} GB free here, {rate / 1e6:,.0f} MB/s: room for the checkpoints of a model of "
           f"{free / 48e6:,.0f} M parameters" + ("; saving will be felt on this disk" if rate < SLOW_DISK else ""))
