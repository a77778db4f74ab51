"""Whether the fast path learns alike: 200 steps of the preset `shakespeare`, two seeds, in float32 on a CPU or compiled in
bfloat16 on an NVIDIA GPU, whichever is here; the losses of both are kept in benchmarks/results/curve.json.

    python benchmarks/curve.py          on either machine; where both have been it says how far they are apart

The measure is the mean |difference| of the losses over steps 150 to 200.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

KEPT = Path(__file__).parent / "results" / "curve.json"


def losses(device: str, dtype: str, seed: int) -> list[float]:
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        flags = (f"--train.device {device} --train.dtype {dtype} --seed {seed} --train.steps 200 --train.sample-every 0 "
                 "--train.eval-every 0").split()
        subprocess.run([sys.executable, "-m", "forge.cli", "train", *flags, "--run", run], check=True,
                       stdout=subprocess.DEVNULL)
        return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def apart(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a[149:200], b[149:200])) / 51


if __name__ == "__main__":
    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    known = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for seed in (1, 2):
        known[f"{device} {dtype} seed {seed}"] = losses(device, dtype, seed)
    KEPT.write_text(json.dumps(known) + "\n")
    for one, other in (("cpu float32 seed 1", "cpu float32 seed 2"), ("cuda bfloat16 seed 1", "cuda bfloat16 seed 2"),
                       ("cpu float32 seed 1", "cuda bfloat16 seed 1"), ("cpu float32 seed 2", "cuda bfloat16 seed 2")):
        if one in known and other in known:
            print(f"{one} against {other}: {apart(known[one], known[other]):.4f} nats")
