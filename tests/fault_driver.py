"""python tests/fault_driver.py [KILLS] [FLAGS of forge train ...]: kills a run of 300 steps at random instants, resumes it
each time, and compares it with one that nobody disturbed: weights and moments to the bit, every step once.

A third of the kills waits for a save that is under way. Each life is forked from this process, which has loaded all that it
needs and used none of it: so it begins at once. On a GPU, where a fork cannot be: --spawn.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

import forge.training  # noqa: F401  (loaded before the forks)
from forge import cli
from forge.checkpoint import folder, steps

TIMES = ("tokens_per_s", "step_ms")
SETTINGS = ("--model.dim 16 --model.n-heads 2 --model.n-layers 2 --model.seq-len 32 --model.dropout 0.1 "
            "--train.batch-tokens 256 --train.compile False --train.dtype float32 --train.sample-every 0 "
            "--train.eval-every 30 --train.save-every 7 --train.threads 1").split()


def begin(arguments: list[str], spawn: bool) -> int:
    """The process of a new life."""
    if spawn:
        with Path("life.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "forge.cli", *arguments], stdout=log, stderr=log).pid
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open("life.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    os._exit(cli.main(arguments))


def ended(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def live(arguments: list[str], spawn: bool, kill_after: float | None, in_save: bool) -> tuple[int | None, float]:
    """Its exit code, None when it was killed, and the seconds to its first record. To be killed: so many seconds after it
    began, or soon after a save of its began."""
    pid, began, first = begin(arguments, spawn), time.monotonic(), 0.0
    metrics = Path(arguments[-1], "metrics.jsonl")
    while (code := ended(pid)) is None:
        time.sleep(0.0005)
        now = time.monotonic() - began
        if not first and metrics.exists() and metrics.stat().st_size:
            first = now
        if kill_after is None:
            continue
        saving = in_save and any(metrics.parent.glob("checkpoints/.step*"))
        if saving or now > kill_after + (30 if in_save else 0):
            if saving:
                time.sleep(random.random() * 0.01)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
    return code, first


def records(run: str) -> list[dict]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def differences(one: str, other: str) -> list[str]:
    """What two finished runs differ in."""
    found = [] if records(one) == records(other) else ["metrics.jsonl"]
    if [record["step"] for record in records(other)] != list(range(1, len(records(one)) + 1)):
        found.append("steps")
    last = steps(Path(one))[-1]
    for name in ("weights", "optimizer"):
        a, b = (load_file(folder(Path(run), last) / f"{name}.safetensors") for run in (one, other))
        if a.keys() != b.keys() or any(not a[key].equal(b[key]) for key in a):
            found.append(name)
    return found


def main(kills: int, flags: list[str], spawn: bool) -> None:
    words = "the forge is hot and the iron is red so we strike while it glows".split()
    Path("text.txt").write_text(" ".join(random.Random(0).choices(words, k=5000)))
    train = ["train", "text.txt", *SETTINGS, "--train.steps", "300", *flags]
    began = time.monotonic()
    code, start_s = live([*train, "--run", "whole"], spawn, None, False)
    assert code == 0, Path("life.log").read_text()
    steps_s = sum(json.loads(line)["step_ms"] for line in Path("whole/metrics.jsonl").read_text().splitlines()) / 1000
    print(f"undisturbed: {start_s:.1f} s to the first step, {steps_s:.1f} s of steps, {time.monotonic() - began:.1f} s in "
          "all", flush=True)
    done, in_saves = 0, 0
    while True:
        again = ["train", "--resume", "killed"] if Path("killed/config.json").exists() else [*train, "--run", "killed"]
        in_save = done % 3 == 2
        kill_after = random.random() * (start_s + 2 * steps_s / kills)     # so that the run lasts for all of them
        code, first = live(again, spawn, kill_after if done < kills else None, in_save)
        if code is None:
            done, in_saves = done + 1, in_saves + in_save
            start_s = min(start_s, first or start_s)        # a resumed run begins sooner
        elif code:
            raise SystemExit(f"a life ended with {code}: {Path('life.log').read_text()[-2000:]}")
        else:
            break
    found = differences("whole", "killed")
    print(f"{done} kills, {in_saves} of them inside a save: "
          + (f"DIFFERENT: {', '.join(found)}" if found else "equal to the bit"))
    raise SystemExit(bool(found) or done < kills)


if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--spawn"]
    main(int(arguments[0]) if arguments else 200, arguments[1:], "--spawn" in sys.argv)
