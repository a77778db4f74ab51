"""Forge beside nanoGPT on this machine's CPU, in turns: its CPU run, and tokens a second of its GPU shape in float32.

    python benchmarks/nanogpt.py NANOGPT [ROUNDS]

NANOGPT is a clone of github.com/karpathy/nanoGPT in which `python data/shakespeare_char/prepare.py` has been run. Both
train on the first nine tenths of tiny Shakespeare. Writes benchmarks/results/nanogpt.json.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from forge.machine import environment

FORGE = [sys.executable, "-m", "forge.cli"]
CPU_RUN = ["--eval_interval=100000", "--eval_iters=1", "--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4",
           "--n_embd=128", "--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0"]
CPU_SHAPE = ["--model.n-layers", "4", "--model.n-heads", "4", "--model.dim", "128", "--model.ffn-dim", "0",
             "--model.seq-len", "64"]
# the recipe is free: fewer, larger steps of Muon; found by a dozen runs, docs/LOG.md
RECIPE = ["--train.batch-tokens", "1536", "--train.steps", "175", "--optim.muon-lr", "0.03", "--optim.lr", "0.02",
          "--optim.warmup-steps", "10", "--train.eval-every", "0", "--train.sample-every", "0"]
SIX_LAYERS = ["--eval_interval=100000", "--eval_iters=1", "--max_iters=4", "--dropout=0.0", "--dtype=float32"]


def nanogpt_iterations_s(folder: Path, flags: list[str]) -> list[float]:
    """Seconds of each iteration but the first, which evaluates."""
    out = subprocess.run([sys.executable, "train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False",
                          "--log_interval=1", *flags], cwd=folder, check=True, capture_output=True, text=True).stdout
    return [float(ms) / 1000 for ms in re.findall(r"iter \d+: loss [\d.]+, time ([\d.]+)ms", out)][1:]


def forge_run(scratch: Path) -> dict[str, float]:
    """Forge's run of the CPU shape, with nothing remembered and nothing compiled before."""
    cache = scratch / "cache"
    variables = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "XDG_CACHE_HOME": str(cache)}
    began = time.monotonic()
    subprocess.run([*FORGE, "train", *CPU_SHAPE, *RECIPE, "--run", str(scratch / "run")], check=True, capture_output=True,
                   env=variables)
    whole = time.monotonic() - began
    records = [json.loads(line) for line in (scratch / "run" / "metrics.jsonl").read_text().splitlines()]
    return {"forge_training_s": sum(r["step_ms"] for r in records) / 1000, "forge_process_s": whole,
            "forge_val_nats": records[-1]["val_loss"]}


def forge_tokens_per_s(scratch: Path) -> dict[str, float]:
    subprocess.run([*FORGE, "bench", "train", "--preset", "gpt-10m", "--bench-steps", "4", "--out", str(scratch / "b.json")],
                   check=True, capture_output=True)
    result = json.loads((scratch / "b.json").read_text())
    return {"forge_tokens_per_s": result["measured"]["tokens per s"], "forge_compile_s": result["measured"]["compile s"],
            "forge_dtype": result["config"]["train"]["dtype"]}


def main(folder: Path, rounds: int) -> None:
    found: list[dict] = []
    for i in range(rounds):
        with tempfile.TemporaryDirectory() as scratch:
            row: dict = {"nanogpt_training_s": sum(nanogpt_iterations_s(folder, CPU_RUN)), **forge_run(Path(scratch))}
            row["time_ratio"] = row["forge_training_s"] / row["nanogpt_training_s"]
            row["nanogpt_tokens_per_s"] = 64 * 256 / statistics.median(nanogpt_iterations_s(folder, SIX_LAYERS))
            row |= forge_tokens_per_s(Path(scratch))
            row["speed_ratio"] = row["forge_tokens_per_s"] / row["nanogpt_tokens_per_s"]
        found.append(row)
        print(f"round {i + 1}: " + ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                                             for name, value in row.items()), flush=True)
        (Path(__file__).parent / "results" / "nanogpt.json").write_text(json.dumps(
            {"rounds": found, "environment": environment(torch.device("cpu"))}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
