"""How long a user waits: `forge --help`, and `forge train` to its first loss line with an empty and a warm compile cache.

    python benchmarks/road.py [ROUNDS]

Each is a whole process, from its start to its end or to the line. Writes benchmarks/results/road.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from forge.machine import environment

FORGE = [sys.executable, "-m", "forge.cli"]


def help_s() -> float:
    began = time.monotonic()
    subprocess.run([*FORGE, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def first_loss_s(cache: Path, run: Path) -> float:
    variables = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "XDG_CACHE_HOME": str(cache)}
    began = time.monotonic()
    process = subprocess.Popen([*FORGE, "train", "--train.steps", "2", "--run", str(run)], stdout=subprocess.PIPE, text=True,
                               env=variables | {"PYTHONUNBUFFERED": "1"})
    assert process.stdout
    waited = next(time.monotonic() - began for line in process.stdout if line.startswith("step 1 "))
    process.stdout.read()
    assert process.wait() == 0
    return waited


def main(rounds: int) -> None:
    measured: dict[str, list[float]] = {"help_s": [], "first_loss_empty_cache_s": [], "first_loss_warm_cache_s": []}
    for i in range(rounds):
        with tempfile.TemporaryDirectory() as scratch:
            measured["help_s"].append(help_s())
            for name in ("first_loss_empty_cache_s", "first_loss_warm_cache_s"):
                measured[name].append(first_loss_s(Path(scratch), Path(scratch) / name))
        print(f"round {i + 1}: " + ", ".join(f"{name} {values[-1]:.2f}" for name, values in measured.items()), flush=True)
    result = {"measured": {name: {"min": min(v), "median": sorted(v)[len(v) // 2], "max": max(v)} for name, v in
                           measured.items()}, "rounds": rounds, "environment": environment(torch.device("cpu"))}
    Path(__file__).with_name("results").mkdir(exist_ok=True)
    (Path(__file__).parent / "results" / "road.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
