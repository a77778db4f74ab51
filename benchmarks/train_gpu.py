"""Forge's training step beside nanoGPT's and nanochat's on one NVIDIA GPU, in turns: tokens/s, FLOP/s, memory.

    python benchmarks/train_gpu.py NANOGPT NANOCHAT [ROUNDS]

Both are clones of their repositories (karpathy/nanoGPT, karpathy/nanochat). nanoGPT: its own bench.py, GPT-2 124M without
biases, T = 1,024, random tokens; the best of some batches. nanochat: its d12 with full attention, T = 2,048, its optimizer,
524,288 random tokens a step. FLOPs of all by Forge's convention: 6 x matrix parameters + 12 x heads x head_dim x mean
visible keys a layer. Writes benchmarks/results/train_gpu.json.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from forge.machine import environment

NANOGPT_BATCHES = (32, 64, 96)
STEP_TOKENS = 524_288
FORGE = {"forge gpt2-124m": ["--preset", "gpt2-124m", "--model.no-bias", "--profile"],
         "forge gpt2-124m, 64 windows at a time": ["--preset", "gpt2-124m", "--model.no-bias", "--train.micro-batch", "64"],
         "forge 124m, T 2,048": ["--preset", "124m", "--model.seq-len", "2048", "--profile"],
         "forge 30m": ["--preset", "30m", "--profile"],
         "forge 1b": ["--preset", "1b", "--bench-steps", "3"],
         "forge 3b": ["--preset", "3b", "--bench-steps", "2", "--train.batch-tokens", "524288"]}
PEAK = "\nimport torch; print('peak bytes', torch.cuda.max_memory_reserved())"


def nanogpt(folder: Path, batch: int) -> dict[str, float]:
    flags = [f"--batch_size={batch}", "--real_data=False"]
    code = f"import runpy, sys; sys.argv[1:] = {flags}; runpy.run_path('bench.py')" + PEAK
    out = subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True).stdout
    ms, peak = (float(re.search(pattern, out)[1]) for pattern in (r"time per iteration: ([\d.]+)ms", r"peak bytes (\d+)"))
    return {"tokens_per_s": 1000 * batch * 1024 / ms, "step_ms": ms, "peak_gb": peak / 1e9}


def nanochat_step(folder: str, depth: int = 12, batch: int = 32, T: int = 2048, V: int = 32_768) -> dict[str, float]:
    """In a process of its own: its modules have names that others may have too."""
    sys.path.insert(0, folder)
    from nanochat.gpt import GPT, GPTConfig

    torch.set_float32_matmul_precision("high")
    dim, head_dim = depth * 64, 128
    heads = -(-dim // head_dim)
    with torch.device("meta"):
        model = GPT(GPTConfig(sequence_len=T, vocab_size=V, n_layer=depth, n_head=heads, n_kv_head=heads,
                              n_embd=heads * head_dim, window_pattern="L"))
    model.to_empty(device="cuda")
    model.init_weights()
    matrices = model.num_matmul_params()
    compiled, optimizer = torch.compile(model, dynamic=False), model.setup_optimizer()
    x, y = torch.randint(V, (2, batch, T), device="cuda").unbind(0)
    parts, times = STEP_TOKENS // (batch * T), []
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(parts):
            (compiled(x, y) / parts).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    step_s = statistics.median(times[3:])
    flops = 6 * matrices + 12 * depth * heads * head_dim * (T + 1) / 2
    return {"tokens_per_s": STEP_TOKENS / step_s, "step_ms": 1000 * step_s, "flops_per_token": flops,
            "tflops": flops * STEP_TOKENS / step_s / 1e12, "peak_gb": torch.cuda.max_memory_reserved() / 1e9}


def nanochat(folder: Path) -> dict[str, float]:
    out = subprocess.run([sys.executable, __file__, "--nanochat", folder], check=True, capture_output=True, text=True).stdout
    return dict(json.loads(out.splitlines()[-1]))


def forge(arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "b.json"
        subprocess.run([sys.executable, "-m", "forge.cli", "bench", "train", "--bench-steps", "8", *arguments, "--out", out],
                       check=True, capture_output=True)
        result = json.loads(out.read_text())
    measured, config = result["measured"], result["config"]
    row = {"tokens_per_s": measured["tokens per s"], "step_ms": measured["step ms"], "tflops": measured["TFLOP/s"],
           "mfu_percent": measured["MFU, % of the maker's bfloat16 peak"], "compile_s": measured["compile s"],
           "peak_gb": measured["peak memory GB"], "micro_batch": config["train"]["micro_batch"],
           "attention": config["train"]["attention"], "deterministic": config["train"]["deterministic"]}
    return row | ({"profile": result["profile"]} if "profile" in result else {})


def main(nanogpt_folder: Path, nanochat_folder: Path, rounds: int) -> None:
    found: dict[str, list[dict]] = {}
    for _ in range(rounds):
        turns = {**{f"nanoGPT, batch {n}": lambda n=n: nanogpt(nanogpt_folder, n) for n in NANOGPT_BATCHES},
                 "nanochat d12": lambda: nanochat(nanochat_folder),
                 **{name: lambda a=arguments: forge(a) for name, arguments in FORGE.items()}}
        for name, measure in turns.items():
            try:
                row = measure()
            except subprocess.CalledProcessError as error:
                row = {"failed": str(error.stderr)[-2000:]}
            found.setdefault(name, []).append(row)
            print(name, {key: round(value, 1) for key, value in row.items() if isinstance(value, float)} or row, flush=True)
            (Path(__file__).parent / "results" / "train_gpu.json").write_text(json.dumps(
                {"measured": found, "environment": environment(torch.device("cuda"))}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--nanochat":
        print(json.dumps(nanochat_step(sys.argv[2])))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
