"""Five steps of the 124m model over a very long window on one NVIDIA GPU: losses, seconds, memory.

    python benchmarks/long_context.py TEXT 131072
    python benchmarks/long_context.py TEXT 1048576 --model.window 4096 --model.full-every 4

TEXT must hold more tokens than the window. A step is one window; how much is recomputed follows from the plan. Adds to
benchmarks/results/long_context.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from forge.machine import environment

KEPT = Path(__file__).parent / "results" / "long_context.json"
STEPS = 5


def main(text: str, window: str, flags: list[str]) -> None:
    most, records = 0, []
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        process = subprocess.Popen(
            [sys.executable, "-m", "forge.cli", "train", text, "--preset", "124m", "--data.tokenizer", "gpt2",
             "--model.seq-len", window, "--train.batch-tokens", window, "--train.attention", "triton", *flags,
             "--train.steps", str(STEPS + 1), "--train.eval-every", "0", "--train.sample-every", "0", "--run", run])
        while len(records) < STEPS:         # the sixth is not waited for, nor the evaluation after it
            assert process.poll() is None
            time.sleep(0.5)
            free, whole = torch.cuda.mem_get_info()
            most = max(most, whole - free)
            if (run / "metrics.jsonl").exists():
                records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        process.kill()
        process.wait()
        recompute = json.loads((run / "config.json").read_text())["train"]["recompute"]
    row = {"window": int(window), "flags": flags, "losses": [record["loss"] for record in records], "recompute": recompute,
           "step_s": [record["step_ms"] / 1000 for record in records], "gpu_memory_in_use_gb": most / 1e9,
           "environment": environment(torch.device("cuda"))}
    known = json.loads(KEPT.read_text()) if KEPT.exists() else []
    KEPT.write_text(json.dumps([*known, row], indent=1) + "\n")
    print({key: value for key, value in row.items() if key != "environment"}, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
