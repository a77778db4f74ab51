"""Resume at the demo's own shape, compiled, default settings: killed without warning twice, against an uninterrupted run.

    python benchmarks/resume.py [STEPS]

Prints whether every remaining loss and the final weights are equal to the bit, and exits 1 if not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def records(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("tokens_per_s", "step_ms")} for line in lines]


def main(steps: int) -> int:
    command = [sys.executable, "-m", "forge.cli", "train"]
    begin = ["--train.steps", str(steps), "--train.save-every", str(steps // 20)]
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder) / "whole", Path(folder) / "parts"
        subprocess.run([*command, *begin, "--run", str(whole)], check=True, stdout=subprocess.DEVNULL)
        arguments = [*begin, "--run", str(parts)]
        for step in (steps // 3, 2 * steps // 3):
            process = subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL)
            while not (parts / "metrics.jsonl").exists() or len((parts / "metrics.jsonl").read_bytes().splitlines()) < step:
                time.sleep(0.01)
            process.kill()
            process.wait()
            print(f"killed at step {len((parts / 'metrics.jsonl').read_bytes().splitlines())}", flush=True)
            arguments = ["--resume", str(parts)]
        subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)
        last = (whole / "latest").read_text().strip()
        weights = [(run / "checkpoints" / last / "weights.safetensors").read_bytes() for run in (whole, parts)]
        losses = records(whole) == records(parts)
        print(f"{steps} steps: records equal: {losses}; final weights equal: {weights[0] == weights[1]}")
        return 0 if losses and weights[0] == weights[1] else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 300))
