"""What saving costs the loop, and how soon a run that is told to end is on the disk.

    python benchmarks/saving.py [FLAGS of forge train]       default: the preset 124m, 524,288 tokens a step

A checkpoint is saved every 20 steps. The cost is the time from the 20th to the 60th step (with two saves, hashed and
flushed, and all that they slow down) over that of 40 quiet steps, the median of those in which nothing was saved. After step
70 the run gets SIGTERM. Writes benchmarks/results/saving.json.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from forge import checkpoint
from forge.machine import environment, pick_device

FLAGS = ["--preset", "124m", "--data.tokenizer", "gpt2"]
EVERY, LAST = 20, 70


def steps(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def main(flags: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        process = subprocess.Popen(
            [sys.executable, "-m", "forge.cli", "train", *flags, "--train.steps", "1000", "--train.eval-every", "0",
             "--train.sample-every", "0", "--train.save-every", str(EVERY), "--train.keep", "9", "--run", run],
            stdout=subprocess.DEVNULL)
        while len(steps(run)) < LAST:
            assert process.poll() is None
            time.sleep(0.02)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait()
        stopped_s = time.monotonic() - began
        assert process.returncode == 128 + signal.SIGTERM
        last = checkpoint.load(run)         # its hashes are right
        records = steps(run)
        assert last.state["step"] == records[-1]["step"] >= LAST
        elapsed = {n: checkpoint.load(run, str(n)).state["elapsed_s"] for n in (EVERY, 3 * EVERY)}
        size = sum(file.stat().st_size for file in last.path.iterdir())
        tokens = records[0]["tokens"]
    quiet_s = statistics.median(r["step_ms"] for r in records                      # the second half of each twenty
                                if r["step"] > EVERY and (r["step"] - 1) % EVERY >= EVERY // 2) / 1000
    spent = elapsed[3 * EVERY] - elapsed[EVERY]
    lost_s = (spent - 2 * EVERY * quiet_s) / 2
    found = {"checkpoint_gb": size / 1e9, "tokens_per_step": tokens, "quiet_step_s": quiet_s, "lost_by_a_save_s": lost_s,
             "percent_with_a_save_every_20_steps": 100 * lost_s / (EVERY * quiet_s),
             "percent_with_a_save_every_100_steps": 100 * lost_s / (100 * quiet_s), "from_sigterm_to_exit_s": stopped_s,
             "flags": flags, "environment": environment(pick_device("auto"))}
    (Path(__file__).parent / "results" / "saving.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "environment"}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:] or FLAGS)
