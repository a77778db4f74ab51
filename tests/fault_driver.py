"""python tests/fault_driver.py [KILLS] [FLAGS of forge train ...]: kills a run of 300 steps at random instants, resumes it
each time, and compares it with one that nobody disturbed: weights and moments to the bit, every step once.

A third of the kills comes while the run begins, a third after some steps, a third within a save. Each life is forked from
this process, which has loaded all that it needs and used none of it: so it begins at once. On a GPU, where a fork cannot
be: --spawn. What they leave lies in a temporary folder, which is kept when something was amiss.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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


def live(arguments: list[str], spawn: bool, doomed: Callable[[float, int, bool], bool]) -> tuple[int | None, float]:
    """Its exit code, None when it was killed, and the seconds to its first step. It is killed as soon as
    doomed(seconds since it began, steps done by it, whether a save is under way)."""
    metrics = Path(arguments[-1], "metrics.jsonl")
    before = lines(metrics)
    pid, began, first = begin(arguments, spawn), time.monotonic(), 0.0
    while (code := ended(pid)) is None:
        time.sleep(0.0005)
        now, steps_done = time.monotonic() - began, max(0, lines(metrics) - before)
        first = first or (now if steps_done else 0.0)
        if doomed(now, steps_done, any(metrics.parent.glob("checkpoints/.step*"))):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
    return code, first


def lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def never(now: float, steps_done: int, saving: bool) -> bool:
    return False


def doom(kind: int, start_s: float, most_steps: float) -> Callable[[float, int, bool], bool]:
    """One of three ends: at an instant of the beginning, after some steps, or within a save."""
    at, after, delay = random.random() * start_s, random.random() * most_steps, random.random() * 0.01

    def within_a_save(now: float, steps_done: int, saving: bool) -> bool:
        if saving:
            time.sleep(delay)
        return saving

    return (lambda now, steps_done, saving: now > at or steps_done > 0, lambda now, steps_done, saving: steps_done > after,
            within_a_save)[kind]


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
    os.chdir(folder_of_all := tempfile.mkdtemp(prefix="forge-kills-"))
    words = "the forge is hot and the iron is red so we strike while it glows".split()
    Path("text.txt").write_text(" ".join(random.Random(0).choices(words, k=5000)))
    train = ["train", "text.txt", *SETTINGS, "--train.steps", "300", *flags]
    began = time.monotonic()
    code, start_s = live([*train, "--run", "whole"], spawn, never)
    assert code == 0, Path("life.log").read_text()
    print(f"undisturbed: {start_s:.1f} s to the first step, {time.monotonic() - began:.1f} s in all", flush=True)
    done = in_saves = 0
    while True:
        again = ["train", "--resume", "killed"] if Path("killed/config.json").exists() else [*train, "--run", "killed"]
        end = doom(done % 3, start_s, 600 / kills) if done < kills else never       # so that the run lasts for all of them
        code, first = live(again, spawn, end)
        if code is None:
            in_saves += done % 3 == 2
            done += 1
            start_s = min(start_s, first or start_s)        # a resumed run begins sooner
        elif code:
            raise SystemExit(f"a life ended with {code}: {Path('life.log').read_text()[-2000:]}")
        else:
            break
    found = differences("whole", "killed")
    print(f"{done} kills, {in_saves} of them inside a save: "
          + (f"DIFFERENT: {', '.join(found)}; see {folder_of_all}" if found else "equal to the bit"))
    if not found:
        shutil.rmtree(folder_of_all)
    raise SystemExit(bool(found) or done < kills)


if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--spawn"]
    main(int(arguments[0]) if arguments else 200, arguments[1:], "--spawn" in sys.argv)
