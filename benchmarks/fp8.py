"""What --train.fp8 gives and costs on one NVIDIA GPU: the step of 3b in bfloat16 and with fp8, and the losses of 1b.

    python benchmarks/fp8.py TEXT

TEXT: some million tokens. 1b takes 50 steps of 65,536 tokens with fp8, without, and without with another seed; the measure
is the mean |difference| of the losses over the last 20. Writes benchmarks/results/fp8.json as far as it has come; what is
there is not measured again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from forge.machine import environment

KEPT = Path(__file__).parent / "results" / "fp8.json"
STEPS, COMPARED = 50, 20
FORGE = [sys.executable, "-m", "forge.cli"]
FLAG = {"bfloat16": "--train.no-fp8", "fp8": "--train.fp8"}


def bench(kind: str, scratch: Path) -> dict[str, Any]:
    out = scratch / f"{kind}.json"
    subprocess.run([*FORGE, "bench", "train", "--preset", "3b", "--train.batch-tokens", "524288", "--bench-steps", "1",
                    "--train.attention", "triton", FLAG[kind], "--out", out], check=True)
    return json.loads(out.read_text())["measured"]


def losses(text: str, kind: str, seed: int, scratch: Path) -> list[float]:
    run = scratch / f"{kind}-{seed}"
    process = subprocess.Popen(
        [*FORGE, "train", text, "--preset", "1b", "--data.tokenizer", "gpt2", "--train.batch-tokens", "65536",
         "--optim.warmup-steps", "10", "--train.attention", "triton", "--train.steps", str(STEPS + 1), FLAG[kind],
         "--train.eval-every", "0", "--train.sample-every", "0", "--seed", str(seed), "--run", run])
    records: list[dict[str, Any]] = []
    while len(records) < STEPS:         # the last is not waited for, nor the evaluation after it
        assert process.poll() is None
        time.sleep(0.5)
        if (run / "metrics.jsonl").exists():
            records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    process.kill()
    process.wait()
    return [record["loss"] for record in records[:STEPS]]


def main(text: str) -> None:
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if not found:
        found["environment"] = environment(torch.device("cuda")) | {"argv": []}
    with tempfile.TemporaryDirectory() as name:
        for kind in FLAG if "3b fp8" not in found else ():      # both in one run
            found[f"3b {kind}"] = bench(kind, Path(name))
            KEPT.write_text(json.dumps(found, indent=1) + "\n")
        print(f"3b: {found['3b fp8']['tokens per s'] / found['3b bfloat16']['tokens per s']:.3f} x bfloat16", flush=True)
        known = "1b bfloat16 seed 1"
        for kind, seed in (("bfloat16", 1), ("fp8", 1), ("bfloat16", 2)):
            if (at := f"1b {kind} seed {seed}") not in found:
                found[at] = losses(text, kind, seed, Path(name))
            KEPT.write_text(json.dumps(found, indent=1) + "\n")
            apart = sum(abs(x - y) for x, y in zip(found[at][-COMPARED:], found[known][-COMPARED:])) / COMPARED
            print(f"{at} against {known}: {apart:.4f} nats, at the end {found[at][-1]:.4f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
