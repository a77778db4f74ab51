"""Faults, one by one: what a run must survive, and what must never reach its weights. fault_driver.py kills at length."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import TINY
from test_train import Call, equal, forget, records, weights, without_times

from forge import checkpoint, cli, generate, training
from forge.config import Failure, RequestError
from forge.data.loader import Batch
from forge.evaluation import Score
from forge.guard import HISTORY, LEAST, PATIENCE, Guard, diagnosis
from forge.metrics import Metrics
from forge.model.transformer import Transformer

HERE = Path(__file__).parent


def test_twenty_kills(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, HERE / "fault_driver.py", "20"], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(HERE.parent)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 kills" in done.stdout
    assert "equal to the bit" in done.stdout


def test_thousands_of_damaged_files() -> None:
    done = subprocess.run([sys.executable, HERE / "fuzz.py", "4000"], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(HERE.parent)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4,000 mutations, 0 faults" in done.stdout


# --- the guard

def judged(guard: Guard, *pairs: tuple[float, float]) -> list[bool]:
    return [bool(guard.judge(torch.tensor(loss), torch.tensor(norm))) for loss, norm in pairs]


def test_what_is_no_number_is_bad_from_the_first_step() -> None:
    guard = Guard(torch.device("cpu"))
    assert judged(guard, (torch.nan, 1.0), (2.0, torch.inf), (2.0, 1.0), (-torch.inf, 1.0)) == [True, True, False, True]
    assert guard.count == 1


def test_a_spike_is_bad_once_enough_is_known_and_only_upwards() -> None:
    torch.manual_seed(0)
    guard = Guard(torch.device("cpu"))
    steps = [(3 + 0.1 * a, 1 + 0.1 * b) for a, b in torch.randn(400, 2).clamp(-3, 3).tolist()]
    assert not any(judged(guard, *steps[:LEAST - 1]))
    assert judged(guard, (9.0, 1.0)) == [False]                 # one step too early, and so accepted
    guard = Guard(torch.device("cpu"))
    assert not any(judged(guard, *steps))
    before = guard.accepted.clone()
    assert judged(guard, (4.0, 1.0), (3.0, 2.0)) == [True, True]
    assert torch.equal(guard.accepted, before)                  # bad steps are not compared with
    assert judged(guard, (0.1, 0.1)) == [False]
    assert guard.count == 401


def test_the_judgement_is_mean_and_deviation_of_the_last_accepted() -> None:
    """Against the same written out in float64, over a drift that leaves the first steps behind."""
    torch.manual_seed(0)
    guard, kept, steep = Guard(torch.device("cpu")), [], 0
    for i in range(400):
        now = torch.tensor([5 - i / 100, 2.0]) + 0.3 * torch.randn(2) + (torch.randn(2) > 2.2) * 3
        last = torch.stack(kept[-HISTORY:]).double() if kept else torch.zeros(1, 2).double()
        limit = last.mean(0) + 6 * torch.maximum(last.std(0, correction=0), torch.tensor([0.01, 0.05]) * torch.tensor(
            [1.0, float(last.mean(0)[1])]))
        loss_above, norm_above = (now.double() > limit).tolist() if len(kept) >= LEAST else (False, False)
        bad = loss_above or (norm_above and steep < PATIENCE)
        steep = steep + 1 if norm_above else 0
        assert bool(guard.judge(*now)) == bad, i
        if not bad:
            kept.append(now)
    assert 300 < len(kept) < 400


def test_a_steep_place_is_borne_and_a_rising_loss_is_not() -> None:
    """High gradients with the loss as it was, for longer than a batch can be blamed; and a loss that has jumped."""
    guard = Guard(torch.device("cpu"))
    torch.manual_seed(0)
    assert not any(judged(guard, *[(3 + 0.1 * a, 1 + 0.1 * b) for a, b in torch.rand(60, 2).tolist()]))
    assert judged(guard, *[(3.0, 9.0)] * 6) == [True] * PATIENCE + [False] * 3
    assert judged(guard, (3.0, 1.0), *[(3.0, 90.0)] * 4) == [False] + [True] * PATIENCE + [False]
    assert all(judged(guard, *[(9.0, 1.0)] * 20))


def test_a_text_known_by_heart_is_no_spike() -> None:
    guard = Guard(torch.device("cpu"))
    assert not any(judged(guard, *[(0.001, 0.01)] * 50, (0.05, 0.0125)))


def spiky(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], float]) -> list[int]:
    """Gradients times bad(window of the step), which grows as training goes on; the windows that were seen."""
    seen: list[int] = []
    feed, clip = training.Feed.__call__, torch.nn.utils.clip_grad_norm_

    def note(self: training.Feed, first: int, count: int) -> Batch:
        seen.append(first)
        return feed(self, first, count)

    monkeypatch.setattr(training.Feed, "__call__", note)
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda *given: clip(*given) * bad(seen[-1]))
    return seen


def test_a_spike_is_skipped_and_recorded(forge: Call, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spiky(monkeypatch, lambda window: 1e3 if window == 45 * 8 else 1.0)
    got = forge("train", text_file, *TINY, "--train.steps", 50, "--train.micro-batch", 8, "--run", "r")
    assert got.code == 0, got.err
    assert "step 46 skipped: loss" in got.out
    bad = [line for line in records("r") if line.get("skipped")]
    assert [(line["step"], line["windows"]) for line in bad] == [(46, [360, 368])]
    assert bad[0]["grad_norm"] > 100


def test_the_guard_is_kept_over_a_resume(forge: Call, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spike twenty steps behind a checkpoint, fewer than it needs to know by itself."""
    spiky(monkeypatch, lambda window: 1e3 if window == 69 * 8 else 1.0)
    arguments = ("train", text_file, *TINY, "--train.steps", 72, "--train.micro-batch", 8, "--train.save-every", 50,
                 "--train.keep", 9)
    for run in ("whole", "parts"):
        assert forge(*arguments, "--run", run).code == 0
    assert [line["step"] for line in records("whole") if line.get("skipped")] == [70]
    forget("parts", 50)
    assert forge("train", "--resume", "parts").code == 0
    assert without_times(records("parts")) == without_times(records("whole"))
    assert equal(weights("parts"), weights("whole"))


def test_after_bad_steps_in_a_row_it_goes_back_and_passes_them(forge: Call, text_file: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spiky(monkeypatch, lambda window: torch.nan if 27 * 8 <= window < 40 * 8 else 1.0)
    arguments = ("train", text_file, *TINY, "--train.steps", 40, "--train.save-every", 10, "--train.micro-batch", 8)
    got = forge(*arguments, "--run", "r")
    assert got.code == 0, got.err
    assert "went back from step 35 to 20" in got.out
    went = [line for line in records("r") if "went_back_from" in line]
    assert [(line["step"], line["went_back_from"], line["next_window"]) for line in went] == [(20, 35, 280)]
    assert [line["step"] for line in records("r") if line not in went] == list(range(1, 41))
    # 280 .. 320 are bad, too: five steps of them are skipped, and then it goes on
    assert [line["step"] for line in records("r") if line.get("skipped")] == [21, 22, 23, 24, 25]
    assert seen[35] == 280
    assert seen[-1] == 280 + 19 * 8
    assert forge("report", "r").code == 0
    assert "returns to a checkpoint" in Path("r/report.html").read_text()
    # killed behind that, it goes on in the same place
    lines, end = records("r"), weights("r")
    forget("r", 30)
    assert forge("train", "--resume", "r").code == 0
    assert without_times(records("r")) == without_times(lines)
    assert equal(weights("r"), end)
    # and killed before it had saved anything behind that, it goes back once more
    forget("r", 20)
    assert forge("train", "--resume", "r").code == 0
    assert without_times(records("r")) == without_times(lines)


def test_poisoned_weights_are_thrown_away(forge: Call, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that flips in memory: every step is bad, and the checkpoint before is good."""
    calls, clip = [0], torch.nn.utils.clip_grad_norm_

    def poison(parameters: Iterator[torch.nn.Parameter], most: float) -> torch.Tensor:
        calls[0] += 1
        given = list(parameters)
        if calls[0] == 14:
            given[0].data[ord("e"), 3] = torch.inf
        return clip(given, most)

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", poison)
    got = forge("train", text_file, *TINY, "--train.steps", 30, "--train.save-every", 10, "--run", "r")
    assert got.code == 0, got.err
    assert "to 10; it goes on" in got.out
    assert all(torch.isfinite(w).all() for w in weights("r").values())


def test_the_diagnosis_names_the_first_part(forge: Call, text_file: Path) -> None:
    from forge import load_model

    forge("train", text_file, *TINY, "--train.steps", 1, "--run", "r")
    model, _ = load_model("r")
    batch = Batch(torch.zeros(2, 32, dtype=torch.long), torch.zeros(2, 32, dtype=torch.long), None)
    assert "every part gives numbers" in diagnosis(model, batch)
    model.blocks[1].mlp.up.weight.data[0, 0] = torch.nan
    words = diagnosis(model, batch)
    assert "the first part that gives no number is block 1" in words
    assert "block 0" in words


# --- checkpoints

def hurt(path: Path, damage: str) -> None:
    raw = path.read_bytes()
    middle = len(raw) // 2
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(raw[:middle] + (b"" if damage == "cut" else bytes([raw[middle] ^ 4]) + raw[middle + 1:]))


@pytest.mark.parametrize("file", [*checkpoint.FILES, "MANIFEST.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "removed"])
def test_a_damaged_checkpoint_is_set_aside(file: str, damage: str, tmp_path: Path) -> None:
    for step in (3, 6):
        checkpoint.save(tmp_path, step, {"w": torch.randn(50)}, {"w/m": torch.randn(50)}, {"step": step}, 9, False)
    hurt(checkpoint.folder(tmp_path, 6) / file, damage)
    said: list[str] = []
    found = checkpoint.newest(tmp_path, said.append)
    assert found is not None
    assert found.state == {"step": 3}
    aside = tmp_path / "checkpoints" / "damaged_step_000006"
    assert "step_000006 is damaged" in said[0]
    assert str(aside) in said[0]
    assert "is damaged" in (aside / "REASON.txt").read_text()
    assert checkpoint.load(tmp_path).state == {"step": 3}


def test_from_the_checkpoint_before_a_damaged_one_the_run_ends_alike(forge: Call, text_file: Path) -> None:
    arguments = ("train", text_file, *TINY, "--train.steps", 9, "--train.save-every", 3, "--train.keep", 9)
    forge(*arguments, "--run", "whole")
    forge(*arguments, "--run", "r")
    forget("r", 6)
    hurt(checkpoint.folder(Path("r"), 6) / "optimizer.safetensors", "flipped")
    got = forge("train", "--resume", "r")
    assert got.code == 0, got.err
    assert "resumed r at step 3" in got.out
    assert equal(weights("r"), weights("whole"))
    assert without_times(records("r")) == without_times(records("whole"))


def test_a_name_is_given_when_all_is_on_the_disk(forge: Call, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and folder are flushed before the rename, the records of its steps before the checkpoint is begun."""
    done: list[str] = []
    flush, rename, sync, start = checkpoint.flush, Path.rename, Metrics.sync, checkpoint.Writer.start

    def note(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            done.append(f"{name} {given[0].name}" if isinstance(given[0], Path) else name)
            return real(*given)
        return noted

    for target, name, real in ((checkpoint, "flush", flush), (Path, "rename", rename), (Metrics, "sync", sync),
                               (checkpoint.Writer, "start", start)):
        monkeypatch.setattr(target, name, note(name, real))
    forge("train", text_file, *TINY, "--train.steps", 2, "--run", "r")
    at = done.index("rename .step_000002.partial")
    assert {f"flush {file}" for file in (*checkpoint.FILES, "MANIFEST.json", ".step_000002.partial")} <= set(done[:at])
    assert done.index("sync") < done.index("start") < at < done.index("flush checkpoints")
    assert done.index("flush checkpoints") < done.index("flush .latest.partial") < done.index("rename .latest.partial")


def test_every_nth_is_kept_besides(forge: Call, text_file: Path) -> None:
    forge("train", text_file, *TINY, "--train.steps", 11, "--train.save-every", 1, "--train.keep-every", 4,
          "--train.eval-every", 0, "--run", "r")
    assert checkpoint.steps(Path("r")) == [4, 8, 10, 11]


def fill(*, limit: int) -> None:
    """No file of this process grows beyond so many bytes: a write fails, since Python ignores SIGXFSZ."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def test_a_full_disk_costs_a_save_and_not_the_run(text_file: Path) -> None:
    """Half of a checkpoint does not fit for a while; the run goes on, leaves nothing half-written, and saves again."""
    arguments = [*map(str, ("train", text_file, *TINY, "--train.steps", 60, "--train.save-every", 10, "--train.eval-every",
                            0))]
    code = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
from forge import cli, checkpoint
import test_nothing_lost as t, resource
save, n = checkpoint.save, [0]
def tight(*given, **names):
    n[0] += 1
    if 2 <= n[0] <= 4:
        t.fill(limit=n[0] * 4000)
    try:
        return save(*given, **names)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpoint.save = tight
sys.exit(cli.main({arguments!r} + sys.argv[1:]))
"""
    done = subprocess.run([sys.executable, "-c", code, "--run", "r"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the checkpoint could not be saved") == 3
    assert checkpoint.steps(Path("r"))[-1] == 60
    assert not list(Path("r/checkpoints").glob(".*"))
    assert [line["step"] for line in records("r")] == list(range(1, 61))


def test_when_the_last_save_fails_it_exits_with_1(forge: Call, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forge("train", text_file, *TINY, "--train.steps", 3, "--run", "r")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        failed = forge("train", "--resume", "r", "--train.steps", 6, "--yes")
    assert failed.code == 1
    assert "the last checkpoint could not be saved" in failed.err
    assert "go on from step 3" in failed.err
    assert not list(Path("r/checkpoints").glob(".*"))
    assert forge("train", "--resume", "r").code == 0
    assert checkpoint.steps(Path("r"))[-1] == 6


def test_a_best_that_was_not_saved_is_none(forge: Call, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, n = checkpoint.save_file, [0]

    def sometimes(*given: Any) -> None:
        n[0] += 1
        if n[0] == 3:           # the first file of the second checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*given)

    losses = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(training, "score", lambda *_: Score(next(losses), 1.0, 1, 1))
    monkeypatch.setattr(checkpoint, "save_file", sometimes)
    assert forge("train", text_file, *TINY, "--train.steps", 12, "--train.eval-every", 4, "--run", "r").code == 0
    state = checkpoint.load(Path("r")).state
    assert (state["best_step"], state["best_loss"]) == (12, 2.0)        # the third is better than what is on the disk
    assert checkpoint.load(Path("r"), "best").state["step"] == 12


def test_old_checkpoints_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, {"w": torch.zeros(1000)}, {}, {"step": step}, 9, step == 2)
    free = iter([0, 0, 0, 10 ** 9, 10 ** 9, 10 ** 9])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=next(free)))
    checkpoint.save(tmp_path, 6, {"w": torch.zeros(1000)}, {}, {"step": 6}, 9, False)
    assert checkpoint.steps(tmp_path) == [2, 4, 5, 6]       # the best stays


def test_records_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    from rich.console import Console

    with Metrics(tmp_path / "metrics.jsonl", 0, Console(quiet=True)) as metrics:
        real = metrics.file

        class Full:
            def fileno(self) -> int:
                return real.fileno()

            def write(self, data: bytes) -> int:
                if space[0] == 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                n = real.write(data[:space[0]])
                space[0] -= n
                return n

            def close(self) -> None:
                real.close()

        metrics.file, space = Full(), [30]      # type: ignore[assignment]
        for step in range(1, 6):
            metrics.append({"step": step, "loss": 1.0})
        with pytest.raises(OSError, match="No space"):
            metrics.sync()
        space[0] = 10 ** 6
        metrics.sync()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]


# --- long runs

def growth(steps: int) -> list[tuple[int, int, int]]:
    """(bytes, open files, threads) of this process at each checkpoint of a run of so many steps. At length, by hand:
    python -c 'import test_nothing_lost as t; print(t.growth(10_000))' in a folder with a text.txt."""
    process, seen = psutil.Process(), []
    start = checkpoint.Writer.start

    def note(self: checkpoint.Writer, *given: Any) -> None:
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)        # what is free goes back to the system, or it swings by 46 MB
        seen.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
        start(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Writer, "start", note)
        cli.main([*map(str, ("train", "text.txt", *TINY, "--model.n-layers", 1, "--train.steps", steps, "--train.eval-every",
                             steps // 20, "--train.save-every", steps // 20, "--run", "long"))])
    return seen


def test_nothing_grows(text_file: Path) -> None:
    seen = growth(1000)
    assert len(seen) == 20
    assert min(size for size, _, _ in seen[15:]) - min(size for size, _, _ in seen[5:10]) < 8 << 20
    assert {rest[1:] for rest in seen[15:]} <= {rest[1:] for rest in seen[5:10]}


def test_a_clock_that_is_set_does_no_harm(forge: Call, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets go by a clock that only runs."""
    real, days = time.time, iter(range(0, 10 ** 9, 86_400))
    monkeypatch.setattr(time, "time", lambda: real() - next(days))
    began = time.monotonic()
    assert forge("train", text_file, *TINY, "--train.minutes", 0.03, "--run", "r").code == 0
    assert 1.8 <= checkpoint.load(Path("r")).state["elapsed_s"] < 4
    assert time.monotonic() - began < 30


# --- one writer

def test_a_second_writer_is_refused_and_named(forge: Call, text_file: Path) -> None:
    forge("train", text_file, *TINY, "--train.steps", 2, "--run", "r")
    code = ("import pathlib, time; from forge.checkpoint import lock\n"
            "with lock(pathlib.Path('r')): print('held', flush=True); time.sleep(60)")
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    refused = forge("train", "--resume", "r", "--train.steps", 3, "--yes")
    assert refused.code == 2
    assert f"process {holder.pid}" in refused.err
    assert forge("eval", "r").code == 0                     # readers need no lock
    holder.kill()                                           # and leaves its lock file behind
    holder.wait()
    assert forge("train", "--resume", "r", "--train.steps", 3, "--yes").code == 0


# --- signals

def start(text: Path, *more: object) -> subprocess.Popen:
    """In a process that ignores no signal, as it would if these tests were started with nohup."""
    return subprocess.Popen([sys.executable, "-m", "forge.cli", *map(str, ("train", text, *TINY, *more, "--run", "r"))],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))


def test_nohup_keeps_a_run_going(text_file: Path) -> None:
    command = [sys.executable, "-m", "forge.cli", *map(str, ("train", text_file, *TINY, "--train.steps", 40, "--run", "r"))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for_a_record(process)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert records("r")[-1]["step"] == 40


def wait_for_a_record(process: subprocess.Popen) -> None:
    while not (Path("r/metrics.jsonl").exists() and Path("r/metrics.jsonl").stat().st_size):
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGHUP"])
def test_warnings_of_schedulers_save(name: str, text_file: Path) -> None:
    process = start(text_file, "--train.minutes", 5, "--train.eval-every", 0)
    wait_for_a_record(process)
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + getattr(signal, name)
    assert "--resume r" in err
    assert checkpoint.load(Path("r")).state["step"] == records("r")[-1]["step"]


def test_a_signal_while_the_first_step_is_compiled_leaves_at_once(text_file: Path) -> None:
    """The compiler's own cache is empty, so that it would take long."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path("inductor").absolute())}
    process = subprocess.Popen([sys.executable, "-m", "forge.cli", *map(str, (
        "train", text_file, *TINY, "--train.compile", True, "--train.steps", 9, "--run", "r"))], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (Path("r/metrics.jsonl").exists()):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(2)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, "nothing to save" in err) == (128 + signal.SIGTERM, True), err
    assert time.monotonic() - began < 10


def test_a_signal_within_a_step_does_not_wait_for_its_end(forge: Call, text_file: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is begun anew: the run ends as one that nobody stopped."""
    arguments = ("train", text_file, *TINY, "--train.steps", 9, "--train.micro-batch", 2, "--train.eval-every", 5)
    forge(*arguments, "--run", "whole")
    feed, seen = training.Feed.__call__, []

    def interrupted(self: training.Feed, first: int, count: int) -> Batch:
        seen.append(first)
        if first == 6 * 8 + 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return feed(self, first, count)

    with monkeypatch.context() as patch:
        patch.setattr(training.Feed, "__call__", interrupted)
        assert forge(*arguments, "--run", "r").code == 128 + signal.SIGTERM
    assert seen[-1] == 6 * 8 + 2
    assert checkpoint.load(Path("r")).state["step"] == records("r")[-1]["step"] == 6
    assert forge("train", "--resume", "r").code == 0
    assert without_times(records("r")) == without_times(records("whole"))
    assert equal(weights("r"), weights("whole"))


@pytest.mark.parametrize("phase", ["score", "write", "save"])
def test_a_signal_in_every_phase(phase: str, forge: Call, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the run evaluates, writes a sample or saves; the state after the step is on the disk then."""
    module = checkpoint if phase == "save" else training
    real = getattr(module, phase)

    sent: list[int] = []

    def interrupted(*given: Any, **names: Any) -> Any:
        if checkpoint.steps(Path("r")) and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return real(*given, **names)

    monkeypatch.setattr(module, phase, interrupted)
    got = forge("train", text_file, *TINY, "--train.steps", 400, "--train.eval-every", 3, "--train.sample-every", 3,
                "--train.save-every", 1, "--run", "r")
    assert got.code == 128 + signal.SIGTERM
    assert "stopped and saved" in got.err
    assert checkpoint.load(Path("r")).state["step"] == records("r")[-1]["step"] < 400
    if phase == "write":
        assert len(records("r")[-1]["sample"]) < 20         # of 120: it was broken off


def test_a_second_signal_leaves_at_once_with_the_last_checkpoint_whole(text_file: Path) -> None:
    code = """
import sys, time
from forge import checkpoint, cli
real = checkpoint.save_file
def slow(*given):
    if checkpoint.steps(__import__("pathlib").Path("r")):
        print("saving", flush=True)
        time.sleep(60)
    real(*given)
checkpoint.save_file = slow
cli.main(sys.argv[1:])
"""
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, (
        "train", text_file, *TINY, "--train.minutes", 5, "--train.eval-every", 0, "--train.save-every", 3, "--run", "r"))],
        stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "saving" not in process.stdout.readline():
        assert process.poll() is None
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert process.wait(timeout=5) == -signal.SIGINT
    assert checkpoint.load(Path("r")).state["step"] == 3


# --- memory

@pytest.mark.parametrize("phase", ["optimizer", "clip"])
def test_memory_that_runs_out_in_an_update_undoes_it(phase: str, forge: Call, text_file: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Some weights are changed by then: it goes back to the checkpoint, and on with less memory, to the same losses."""
    arguments = ("train", text_file, *TINY, "--train.steps", 9, "--train.micro-batch", 8, "--train.save-every", 4)
    forge(*arguments, "--run", "room")
    calls = [0]
    name = "torch.optim.AdamW.step" if phase == "optimizer" else "torch.nn.utils.clip_grad_norm_"
    real = torch.optim.AdamW.step if phase == "optimizer" else torch.nn.utils.clip_grad_norm_

    def full(*given: Any, **names: Any) -> Any:
        calls[0] += 1
        if calls[0] == 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return real(*given, **names)

    monkeypatch.setattr(name, full)
    got = forge(*arguments, "--run", "tight")
    assert got.code == 0, got.err
    assert "out of memory" in got.out
    for one, other in zip(records("room"), records("tight"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)


# --- resuming with changes

@pytest.mark.parametrize("answer", ["", "n", "yes"])
def test_a_terminal_is_asked(answer: str, forge: Call, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forge("train", text_file, *TINY, "--train.steps", 2, "--run", "r")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    got = forge("train", "--resume", "r", "--train.steps", 3)
    assert "change: train.steps 2 -> 3" in got.out
    assert (got.code, len(records("r"))) == ((0, 3) if answer == "yes" else (2, 2))


def test_what_may_change_is_listed_and_what_may_not_is_refused(forge: Call, text_file: Path) -> None:
    forge("train", text_file, *TINY, "--train.steps", 3, "--run", "r")
    got = forge("train", "--resume", "r", "--train.steps", 5, "--train.micro-batch", 2, "--yes")
    assert got.code == 0, got.err
    assert "change: train.micro_batch 8 -> 2" in got.out
    for flags, word in ((("--model.n-layers", 3), "--model.n-layers 3"), (("--data.tokenizer", "chars"), "--data.tokenizer"),
                        (("--train.batch-tokens", 512), "--train.batch-tokens 512")):
        refused = forge("train", "--resume", "r", *flags, "--yes")
        assert refused.code == 2
        assert word in refused.err


@pytest.mark.parametrize("flags", [("--train.steps", -5), ("--train.micro-batch", -3), ("--train.keep", -1),
                                   ("--train.micro-batch", 3), ("--train.steps", 2), ("--train.tokens", 300)], ids=str)
def test_a_change_that_cannot_be_is_refused_before_it_is_written(flags: tuple, forge: Call, text_file: Path) -> None:
    forge("train", text_file, *TINY, "--train.steps", 3, "--run", "r")
    before = Path("r/config.json").read_bytes()
    refused = forge("train", "--resume", "r", *flags, "--yes")
    assert refused.code == 2, refused
    assert "change:" not in refused.out
    assert Path("r/config.json").read_bytes() == before


def test_what_is_gone_from_a_run_is_named(forge: Call, text_file: Path) -> None:
    forge("train", text_file, *TINY, "--train.steps", 3, "--run", "whole")
    for file, code, words in (("data", 1, "r/data is gone"), ("config.json", 2, "config.json"),
                              ("tokenizer.json", 1, "put back its copy, r/data/tokenizer.json"),
                              ("environment.json", 0, "cannot be told"), ("latest", 0, "done"), ("best", 0, "done"),
                              ("metrics.jsonl", 0, "no records of the steps 1 to 3")):
        shutil.rmtree("r", ignore_errors=True)
        shutil.copytree("whole", "r")
        path = Path("r", file)
        (shutil.rmtree if path.is_dir() else os.unlink)(path)
        got = forge("train", "--resume", "r", "--train.steps", 5, "--yes")
        assert got.code == code, got
        assert words in got.out + got.err, (file, got)


def test_a_damaged_record_takes_no_other_with_it(forge: Call, text_file: Path) -> None:
    forge("train", text_file, *TINY, "--train.steps", 9, "--run", "r")
    lines = Path("r/metrics.jsonl").read_bytes().splitlines(keepends=True)
    Path("r/metrics.jsonl").write_bytes(b"".join([*lines[:4], b"{%$}\n", *lines[5:]]))
    assert forge("train", "--resume", "r", "--train.steps", 11, "--yes").code == 0
    after = Path("r/metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert (len(after), after[:4], after[5:9]) == (11, lines[:4], lines[5:])


def test_shards_that_do_not_fit_on_the_disk(text_file: Path) -> None:
    code = ("import sys, test_nothing_lost as t; from forge import cli; t.fill(limit=9000)\n"
            "sys.exit(cli.main(['train', 'text.txt', '--data.tokenizer', 'bytes', '--run', 'r']))")
    path = os.pathsep.join([str(HERE), str(HERE.parent)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1
    assert done.stderr.startswith("forge: ")
    assert "Traceback" not in done.stderr
    assert not list(Path().glob("*r*partial*"))
    assert not Path("r").exists()


def test_a_folder_without_a_config_is_taken_over(forge: Call, text_file: Path) -> None:
    arguments = ("train", text_file, *TINY, "--train.steps", 3)
    forge(*arguments, "--run", "whole")
    forge(*arguments, "--run", "r")
    Path("r/config.json").unlink()
    Path(".r.partial-999999999").mkdir()            # of a process that was killed
    Path("r/data/train/index.json").unlink()
    got = forge(*arguments, "--run", "r")
    assert got.code == 0, got.err
    assert equal(weights("r"), weights("whole"))
    assert not list(Path().glob(".r.partial*"))


def test_an_index_names_no_file_that_leaves_the_folder(forge: Call, text_file: Path) -> None:
    forge("data", "prepare", text_file, "--out", "shards")
    index = Path("shards/train/index.json")
    (Path("secret.bin")).write_bytes(Path("shards/train/shard_00000.bin").read_bytes())
    index.write_text(index.read_text().replace("shard_00000.bin", "../../secret.bin"))
    failed = forge("data", "info", "shards")
    assert failed.code == 1
    assert "damaged" in failed.err


def test_other_data_is_refused(forge: Call, text_file: Path) -> None:
    forge("data", "prepare", text_file, "--out", "shards")
    forge("train", "shards", *TINY, "--train.steps", 2, "--run", "r")
    shutil.rmtree("shards")
    text_file.write_text(text_file.read_text()[::-1])
    forge("data", "prepare", text_file, "--out", "shards")
    refused = forge("train", "--resume", "r", "--train.steps", 4, "--yes")
    assert refused.code == 2
    assert "shards holds other tokens" in refused.err


def test_memory_that_runs_out_beside_the_steps_costs_no_step(forge: Call, text_file: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """In an evaluation, which takes fewer windows at a time then, and in a sample."""
    arguments = ("train", text_file, *TINY, "--train.steps", 4, "--train.eval-every", 2)
    forge(*arguments, "--run", "room")
    forward = Transformer.forward

    def tight(self: Transformer, inputs: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if not self.training and len(inputs) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, inputs, *rest)

    def none(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Transformer, "forward", tight)
    monkeypatch.setattr(generate, "next_logits", none)
    got = forge(*arguments, "--train.sample-every", 2, "--run", "tight")
    assert got.code == 0, got.err
    assert "no memory left to write on" in got.out
    assert [line["loss"] for line in records("tight")] == [line["loss"] for line in records("room")]
    assert records("tight")[-1]["val_loss"] == pytest.approx(records("room")[-1]["val_loss"], rel=1e-6)


def test_all_damaged_is_a_failure_and_no_new_beginning(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"w": torch.zeros(3)}, {}, {}, 2, False)
    (checkpoint.folder(tmp_path, 1) / "state.json").unlink()
    said: list[str] = []
    with pytest.raises(Failure, match="no whole checkpoint left"):
        checkpoint.newest(tmp_path, said.append)
    assert "set aside" in said[0]
    with pytest.raises(RequestError, match="no whole checkpoint"):
        checkpoint.load(tmp_path)
    with pytest.raises(Failure, match="no whole checkpoint left"):      # nor at the next try
        checkpoint.newest(tmp_path, said.append)
