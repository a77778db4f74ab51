"""What two minutes on one NVIDIA GPU buy: bits per byte on novels that were not trained on, Forge beside nanochat.

    python benchmarks/novels.py NOVELS NANOCHAT nanochat    its d12 and d8
    python benchmarks/novels.py NOVELS NANOCHAT forge       three seeds of Forge, on the same machine and at once
    python benchmarks/novels.py NOVELS                      Forge, on a part of the training novels: to choose its recipe

NOVELS holds train-*.jsonl.bz2 and valid-00.jsonl.bz2, NANOCHAT a clone of karpathy/nanochat. Each trains for as many steps
as fit into 120 s, found by a short run before; what is compiled in the first steps is not counted, nor is the evaluation.
nanochat gets the same novels in pieces of some 4,000 characters, since its loader keeps no more of a document than a window
holds; a tokenizer of its own, full attention, 262,144 tokens a step. Writes benchmarks/results/novels.json.
"""

from __future__ import annotations

import bz2
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from forge.machine import environment

SECONDS = 120
RECIPE = ["--preset", "124m", "--model.n-kv-heads", "6", "--model.dropout", "0.3", "--optim.weight-decay", "0.4",
          "--train.batch-tokens", "65536", "--train.eval-every", "0", "--train.sample-every", "0"]
BPE = "8192"
SEEDS = (1, 2, 3)
NANOCHAT_BATCH = 262_144
PIECE = 4000
WARM = 10       # steps at the beginning that are not counted


def forge(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "forge.cli", *map(str, arguments)], check=True)


def forge_run(data: Path, run: Path, steps: int, seed: int) -> tuple[list[dict[str, Any]], float]:
    """(records, seconds that are counted)."""
    forge("train", data, *RECIPE, "--train.steps", steps, "--seed", seed, "--run", run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    typical = statistics.median(record["step_ms"] for record in records[WARM:])
    return records, (WARM * typical + sum(record["step_ms"] for record in records[WARM:])) / 1000


def train_forge(data: Path, scratch: Path, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    _, short = forge_run(data, scratch / "short", 60, 0)
    steps, rows = int(SECONDS / (short / 60)), []
    for seed in seeds:
        records, seconds = forge_run(data, scratch / f"run-{seed}", steps, seed)
        last = records[-1]
        rows.append({"seed": seed, "bits_per_byte": last["val_bpb"], "seconds": seconds, "steps": steps,
                     "tokens": last["tokens"], "first_step_s": records[0]["step_ms"] / 1000})
        print("forge", rows[-1], flush=True)
    return rows


def pieces(text: str) -> list[str]:
    found, piece = [], ""
    for paragraph in text.split("\n\n"):
        piece += ("\n\n" if piece else "") + paragraph
        if len(piece) >= PIECE:
            found.append(piece)
            piece = ""
    return [*found, piece] if piece else found


class Nanochat:
    def __init__(self, folder: Path, scratch: Path, train: list[str], valid: list[str]) -> None:
        import pyarrow
        import pyarrow.parquet

        self.folder, stubs, texts = folder, scratch / "stubs", scratch / "base" / "base_data_climbmix"
        stubs.mkdir()
        texts.mkdir(parents=True)
        (stubs / "wandb.py").write_text("def init(*_, **__): raise RuntimeError('not here')\n")
        for name, novels in (("shard_00000.parquet", train), ("shard_00001.parquet", valid)):      # the last is validation
            table = pyarrow.table({"text": [piece for novel in novels for piece in pieces(novel)]})
            pyarrow.parquet.write_table(table, texts / name, row_group_size=256)
        path = os.pathsep.join([str(stubs), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, "NANOCHAT_BASE_DIR": str(scratch / "base"), "PYTHONPATH": path}
        self.call("scripts.tok_train")

    def call(self, module: str, *arguments: object) -> str:
        done = subprocess.run([sys.executable, "-m", module, *map(str, arguments)], cwd=self.folder, env=self.environment,
                              capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        return done.stdout

    def run(self, depth: int, steps: int, *more: object) -> str:
        return self.call("scripts.base_train", f"--depth={depth}", "--window-pattern=L", f"--num-iterations={steps}",
                         f"--total-batch-size={NANOCHAT_BATCH}", "--core-metric-every=-1", "--sample-every=-1", *more)

    def train(self, depth: int, steps: int) -> dict[str, Any]:
        out = self.run(depth, steps, "--eval-tokens=851968", "--eval-every=100000")
        ms = [float(found) for found in re.findall(r"dt: ([\d.]+)ms", out)]
        seconds = (WARM * statistics.median(ms[WARM:]) + sum(ms[WARM:])) / 1000
        return {"depth": depth, "steps": steps, "tokens": steps * NANOCHAT_BATCH, "seconds": seconds,
                "bits_per_byte": float(re.findall(r"Validation bpb: ([\d.]+)", out)[-1])}

    def in_time(self, depth: int) -> dict[str, Any]:
        ms = [float(found) for found in re.findall(r"dt: ([\d.]+)ms", self.run(depth, 30, "--eval-every=-1"))]
        row = self.train(depth, int(1000 * SECONDS / statistics.median(ms[WARM:])))
        print("nanochat", row, flush=True)
        return row


def main(novels: Path, nanochat: Path | None, part: str = "forge") -> None:
    lines, valid = ([line for file in sorted(novels.glob(f"{part}-*.jsonl.bz2"))
                     for line in bz2.decompress(file.read_bytes()).decode().splitlines(keepends=True)]
                    for part in ("train", "valid"))
    if nanochat is None:
        lines, valid = [line for i, line in enumerate(lines) if i % 12 != 5], lines[5::12]
    kept = Path(__file__).parent / "results" / "novels.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    found |= {"seconds": SECONDS, "recipe": RECIPE, "bpe": BPE,
              "environment": environment(torch.device("cuda")) | {"argv": []}}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if nanochat is not None and part == "nanochat":
            texts = ([json.loads(line)["text"] for line in part] for part in (lines, valid))
            peer = Nanochat(nanochat, scratch, *texts)
            found[part] = [peer.in_time(depth) for depth in (12, 8)]
        else:
            for name, text in (("train", lines), ("valid", valid)):
                (scratch / f"{name}.jsonl").write_text("".join(text), encoding="utf-8")
            forge("data", "prepare", scratch / "train.jsonl", "--valid", scratch / "valid.jsonl", "--tokenizer", "bpe",
                  "--bpe-vocab", BPE, "--out", scratch / "data")
            found["forge"] = train_forge(scratch / "data", scratch, SEEDS if nanochat else SEEDS[:1])
    if nanochat is not None:
        kept.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None, *sys.argv[3:])
