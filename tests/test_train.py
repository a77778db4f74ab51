"""Whole runs: against themselves (resumed = uninterrupted, accumulated = at once) and against the world (it learns)."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file

import forge
from forge import checkpoint, config
from forge.config import Config
from forge.evaluation import evaluate
from forge.model.transformer import Transformer

Call = Callable[..., Any]


def records(run: str | Path) -> list[dict]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def without_times(lines: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in ("tokens_per_s", "step_ms")} for line in lines]


def weights(run: str | Path, which: str = "latest") -> dict[str, torch.Tensor]:
    return load_file(checkpoint.load(Path(run), which).path / "weights.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_it_learns_a_known_text_and_writes_it(forge: Call, tmp_path: Path) -> None:
    line = "the quick brown fox jumps over the lazy dog.\n"
    (tmp_path / "fox.txt").write_text(line * 200)
    done = forge("train", "fox.txt", "--run", "r", *TINY, "--model.dim", 32, "--model.seq-len", 64, "--train.batch-tokens",
                 1024, "--train.steps", 150, "--optim.lr", 0.01, "--train.sample-every", 1000)
    assert done.code == 0, done.err
    last = records("r")[-1]
    assert last["val_loss"] < 0.2, last
    assert done.out.count("--- sample") == 2
    for word in ("bytes to train on", "tokenizer: bytes, 257", "parameters", "budget: 150 steps", "The run lies in r"):
        assert word in done.out
    written = forge("sample", "r", "--prompt", line * 2 + "the quick", "--temperature", 0, "--max-new-tokens", 100)
    assert line * 3 in written.out
    score = evaluate("r", checkpoint="latest")
    assert (score.loss, score.bpb) == (pytest.approx(last["val_loss"]), pytest.approx(last["val_bpb"]))
    assert f"{score.bpb:.4f} bits per byte" in forge("eval", "r", "--checkpoint", "latest").out
    assert evaluate("r", ("fox.txt",)).bytes == 9000
    assert "--- sample" not in forge("train", "fox.txt", *TINY, "--train.steps", 1).out      # TINY: --train.sample-every 0


def forget(run: str, step: int) -> None:
    """Puts a run back to what it was some time after checkpoint `step`: later ones gone, later records still there."""
    for later in checkpoint.steps(Path(run)):
        if later > step:
            shutil.rmtree(checkpoint.folder(Path(run), later))


@pytest.mark.parametrize("settings", [("--model.dropout", 0.2), ("--optim.optimizer", "adamw", "--train.micro-batch", 2)])
def test_resumed_twice_equals_uninterrupted(settings: tuple, forge: Call, text_file: Path) -> None:
    arguments = ("train", text_file, *TINY, *settings, "--train.steps", 12, "--train.eval-every", 4, "--train.save-every",
                 3, "--train.keep", 99)
    assert forge(*arguments, "--run", "whole").code == 0
    assert forge(*arguments, "--run", "parts").code == 0
    for step in (9, 3):
        forget("parts", step)
        resumed = forge("train", "--resume", "parts")
        assert f"resumed parts at step {step}\nsteps {step + 1} to 12, after its last save, will be taken" in resumed.out
        assert without_times(records("parts")) == without_times(records("whole"))
        assert equal(weights("parts"), weights("whole"))
    assert checkpoint.named(Path("parts"), "best") == checkpoint.named(Path("whole"), "best")


def test_compiled_and_killed_twice_equals_uninterrupted(text_file: Path) -> None:
    """Default settings, in processes of their own that are killed without warning."""
    command = [sys.executable, "-m", "forge.cli", "train"]
    arguments = [str(text_file), "--model.dim", "16", "--model.n-heads", "2", "--model.n-layers", "1", "--model.seq-len",
                 "32", "--train.batch-tokens", "256", "--train.steps", "60", "--train.save-every", "5", "--model.dropout",
                 "0.1", "--train.compile", "True"]
    subprocess.run([*command, *arguments, "--run", "whole"], check=True, capture_output=True)
    begin = [*arguments, "--run", "parts"]
    for step in (10, 30):
        process = subprocess.Popen([*command, *begin], stdout=subprocess.DEVNULL)
        metrics = Path("parts/metrics.jsonl")
        while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > step):
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
        process.wait()
        assert checkpoint.steps(Path("parts"))[-1] < 60
        begin = ["--resume", "parts"]
    subprocess.run([*command, *begin], check=True, capture_output=True)
    assert without_times(records("parts")) == without_times(records("whole"))
    assert equal(weights("parts"), weights("whole"))
    assert config.load_json(Path("whole/config.json")).train.compile


def test_killed_before_its_first_checkpoint_it_begins_again(forge: Call, text_file: Path) -> None:
    arguments = ("train", text_file, *TINY, "--train.steps", 3)
    forge(*arguments, "--run", "whole")
    forge(*arguments, "--run", "parts")
    forget("parts", 0)
    (Path("parts/metrics.jsonl")).write_text('{"step": 1, "lo')
    assert forge("train", "--resume", "parts").code == 0
    assert without_times(records("parts")) == without_times(records("whole"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(number: signal.Signals, text_file: Path) -> None:
    arguments = [*map(str, ("train", text_file, *TINY, "--train.minutes", 5, "--train.eval-every", 0, "--run", "r"))]
    process = subprocess.Popen([sys.executable, "-m", "forge.cli", *arguments], stderr=subprocess.PIPE, text=True)
    while not (Path("r/metrics.jsonl").exists() and Path("r/metrics.jsonl").stat().st_size):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "forge train --resume r" in err
    found = checkpoint.load(Path("r"))
    assert found.state["step"] == records("r")[-1]["step"] > 0
    assert 0 < found.state["elapsed_s"] < 60


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_text_is_prepared_leaves_nothing(number: signal.Signals, text_file: Path) -> None:
    Path("big.txt").write_bytes(text_file.read_bytes() * 1000)
    process = subprocess.Popen([sys.executable, "-m", "forge.cli", "train", "big.txt", "--run", "new/r"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(Path("new").glob(".r.partial*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert not Path("new").exists()


def test_a_finished_run_says_so_and_a_longer_budget_goes_on(forge: Call, text_file: Path) -> None:
    forge("train", text_file, *TINY, "--train.steps", 3, "--run", "r")
    before = records("r")
    again = forge("train", "--resume", "r")
    assert (again.code, records("r")) == (0, before)
    assert "r is finished: step 3" in again.out
    unasked = forge("train", "--resume", "r", "--train.steps", 5)
    assert (unasked.code, records("r")) == (2, before)
    assert "add --yes" in unasked.err
    longer = forge("train", "--resume", "r", "--train.steps", 5, "--yes")
    assert longer.code == 0, longer.err
    assert "change: train.steps 3 -> 5" in longer.out
    assert [line["step"] for line in records("r")] == [1, 2, 3, 4, 5]
    refused = forge("train", "--resume", "r", "--model.dim", 32)
    assert refused.code == 2
    assert "--model.dim 32: this run has 16" in refused.err
    assert forge("train", "--resume", "r", "--preset", "30m").code == 2


def test_what_is_left_to_be_derived_is_derived_when_a_run_goes_on(forge: Call, text_file: Path) -> None:
    forge("train", text_file, *TINY, "--train.steps", 3, "--train.micro-batch", 2, "--run", "r")
    before = json.loads(Path("r/config.json").read_text())["train"]
    endless = forge("train", "--resume", "r", "--train.steps", "None", "--yes")
    assert endless.code == 2
    assert "the run would have no end" in endless.err
    left = ("--train.micro-batch", 0, "--train.recompute", "auto", "--train.eval-every", "None")
    again = forge("train", "--resume", "r", *left, "--yes")      # finished: the change is kept nevertheless
    assert again.code == 0, again.err
    assert "change: train.micro_batch 2 -> 8" in again.out
    assert "is finished" in again.out
    assert json.loads(Path("r/config.json").read_text())["train"] == before | {"micro_batch": 8}
    longer = forge("train", "--resume", "r", *left, "--train.steps", 5, "--yes")
    assert longer.code == 0, longer.err
    assert [line["step"] for line in records("r")] == [1, 2, 3, 4, 5]


def test_accumulated_equals_at_once(forge: Call, text_file: Path) -> None:
    for rows in (8, 2, 1):
        forge("train", text_file, *TINY, "--train.steps", 5, "--train.micro-batch", rows, "--run", f"r{rows}")
    for rows in (2, 1):
        for a, b in zip(records("r8"), records(f"r{rows}")):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


def test_one_seed_gives_one_run(forge: Call, text_file: Path) -> None:
    for run, seed in (("a", 1), ("b", 1), ("c", 2)):
        forge("train", text_file, *TINY, "--train.steps", 4, "--seed", seed, "--run", run)
    assert without_times(records("a")) == without_times(records("b")) != without_times(records("c"))
    assert equal(weights("a"), weights("b"))


def test_every_record_has_its_fields(forge: Call, text_file: Path) -> None:
    forge("train", text_file, *TINY, "--train.steps", 6, "--train.eval-every", 4, "--train.sample-every", 3, "--run", "r")
    lines = records("r")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in lines] == [256 * i for i in range(1, 7)]
    for line in lines:
        assert {"loss", "lr", "grad_norm", "tokens_per_s", "step_ms"} <= line.keys()
        assert ("val_bpb" in line) == ("val_loss" in line) == (line["step"] in (4, 6))
        assert ("sample" in line) == (line["step"] in (3, 6))
    environment = json.loads(Path("r/environment.json").read_text())
    assert environment["torch"] == torch.__version__.split("+")[0] or environment["torch"] == torch.__version__


def test_a_budget_ends_with_the_first_of_its_limits(forge: Call, text_file: Path) -> None:
    forge("train", text_file, *TINY, "--train.steps", 50, "--train.tokens", 1000, "--run", "tokens")
    assert [records("tokens")[-1][k] for k in ("step", "tokens")] == [4, 1024]
    forge("train", text_file, *TINY, "--train.steps", 10**9, "--train.minutes", 0.02, "--run", "minutes")
    elapsed = checkpoint.load(Path("minutes")).state["elapsed_s"]
    assert 1.2 <= elapsed < 3
    assert "val_bpb" in records("minutes")[-1]
    derived = forge("train", text_file, *TINY, "--train.batch-tokens", 4096, "--run", "derived")
    assert "10 rounds over the text" in derived.out
    assert "--model.dropout 0.1" in derived.out


def test_a_run_from_anothers_weights(forge: Call, text_file: Path, tmp_path: Path) -> None:
    forge("train", text_file, *TINY, "--train.steps", 60, "--optim.lr", 0.01, "--run", "first")
    (tmp_path / "other.txt").write_text("the iron glows and the well is cool\n" * 50)
    done = forge("train", "other.txt", "--init", "first", "--train.steps", 2, "--train.compile", False, "--run", "second")
    assert done.code == 0, done.err
    assert records("second")[0]["loss"] < records("first")[0]["loss"] - 1
    assert Path("second/tokenizer.json").read_bytes() == Path("first/tokenizer.json").read_bytes()
    refused = forge("train", "other.txt", "--init", "first", "--model.dim", 32, "--run", "third")
    assert refused.code == 2
    assert "--model.dim 32" in refused.err
    assert not Path("third").exists()
    assert forge("train", "other.txt", "--init", "nowhere").code == 2


@pytest.mark.parametrize("n", [10, 300, 1000])
def test_a_very_short_text_trains(n: int, forge: Call, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text(("To be, or not to be. " * 50)[:n])
    done = forge("train", "short.txt", *TINY, "--model.seq-len", 128, "--train.batch-tokens", 256, "--train.steps", 2,
                 "--run", "r")
    assert done.code == 0, done.err
    assert ("less than one window of 128" in done.out) == (n < 140)
    assert math.isfinite(records("r")[-1]["val_bpb"])


def test_a_folder_of_documents_with_a_window_and_another_validation_text(forge: Call, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(25):
        (tmp_path / "texts" / f"{i:02}.md").write_text(f"Document {i} has a few words. " * 5)
    (tmp_path / "valid.txt").write_text("Document 99 has a few words.")
    done = forge("train", "texts", *TINY, "--model.window", 8, "--train.steps", 2, "--run", "r")
    assert done.code == 0, done.err
    assert "25 documents" in done.out
    assert "attention: blocked" in done.out
    assert "sdpa: it knows no window" in done.out
    assert "hides no key" not in done.out
    done = forge("train", "texts", *TINY, "--data.valid", "valid.txt", "--train.steps", 2, "--run", "s")
    assert "28 bytes, from valid.txt" in done.out
    assert evaluate("s").bytes == 28
    done = forge("train", "texts", *TINY, "--model.window", 99, "--train.steps", 2, "--run", "t")
    assert "note: model.window=99 hides no key from" in done.out


def test_prepared_data_trains_alike_and_only_with_its_tokenizer(forge: Call, text_file: Path) -> None:
    assert forge("data", "prepare", text_file, "--out", "shards").code == 0
    info = forge("data", "info", "shards")
    assert "train: 1 documents" in info.out
    for source, run in ((text_file, "a"), ("shards", "b")):
        assert forge("train", source, *TINY, "--train.steps", 3, "--run", run).code == 0
    assert without_times(records("a")) == without_times(records("b"))
    assert not Path("b/data").exists()
    forge("train", text_file, *TINY, "--data.tokenizer", "chars", "--train.steps", 1, "--run", "c")
    refused = forge("train", "shards", *TINY, "--data.tokenizer", "c/tokenizer.json", "--run", "d")
    assert refused.code == 2
    assert "another tokenizer" in refused.err
    for flags in (("--data.tokenizer", "chars"), ("--data.valid", text_file)):
        refused = forge("train", "shards", *TINY, *flags, "--run", "d")
        assert refused.code == 2
        assert "is prepared" in refused.err
    assert not Path("d").exists()
    assert forge("data", "prepare", text_file, "--out", "shards").code == 2


def test_a_step_that_is_no_number_changes_nothing(forge: Call, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms, clip = iter([1, 1, torch.nan, 1, torch.nan]), torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda *given: clip(*given) * next(norms))
    got = forge("train", text_file, *TINY, "--train.steps", 5, "--train.save-every", 1, "--train.keep", 9, "--run", "r")
    assert got.code == 0
    assert "step 3 skipped" in got.out
    assert [line.get("windows") for line in records("r")] == [None, None, [16, 24], None, [32, 40]]
    assert [line.get("skipped") for line in records("r")] == [None, None, True, None, True]
    assert [line["loss"] is None for line in records("r")] == [False, False, True, False, True]
    assert checkpoint.steps(Path("r")) == [1, 2, 4, 5]     # none among skipped steps, but the last
    two, four, five = (checkpoint.load(Path("r"), str(step)) for step in (2, 4, 5))
    assert equal(four.weights, five.weights)
    assert equal(four.optimizer, five.optimizer)
    assert not equal(two.weights, four.weights)


def test_too_many_steps_that_are_no_numbers_stop(forge: Call, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forge("train", text_file, *TINY, "--train.steps", 2, "--run", "r")
    before = weights("r")
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda *_: torch.tensor(torch.nan))
    failed = forge("train", "--resume", "r", "--train.steps", 40, "--yes")
    assert failed.code == 1
    assert "went back from step 10 to 2" in failed.out
    assert "8 steps in a row, up to step 10" in failed.err
    assert "every part gives numbers" in failed.err
    assert "block 0" in failed.err
    assert equal(weights("r"), before)


def test_a_damaged_checkpoint_fails_with_1(forge: Call, text_file: Path) -> None:
    forge("train", text_file, *TINY, "--train.steps", 2, "--run", "r")
    (checkpoint.load(Path("r")).path / "optimizer.safetensors").unlink()
    for arguments in (("sample", "r"), ("eval", "r"), ("train", "--resume", "r", "--train.steps", 3, "--yes")):
        failed = forge(*arguments)
        assert failed.code == 1
        assert "optimizer.safetensors is missing" in failed.err


def test_python_trains_and_loads(text_file: Path) -> None:
    c = Config(model=config.ModelConfig(dim=16, n_heads=2, n_layers=1, seq_len=32), data=config.DataConfig(
        text=(str(text_file),)), train=config.TrainConfig(steps=2, batch_tokens=256, compile=False))
    run = forge.train(c, run="r")
    model, tokenizer = forge.load_model(run)
    assert sum(p.numel() for p in model.parameters()) == model.config.parameters
    assert tokenizer.vocab_size == model.config.vocab_size == 257
    text = forge.sample(run, "the forge", max_new_tokens=20, seed=3)
    assert text == forge.sample(run, "the forge", max_new_tokens=20, seed=3)
    assert math.isfinite(forge.evaluate(run).bpb)


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.2 GiB, max allowed: 18.1 GiB). Tried to allocate 1 GiB")],
    ids=["CUDA", "MPS"])
def test_when_memory_runs_out_it_goes_on_with_less(forge: Call, text_file: Path, error: RuntimeError,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times, at steps of different settings; the losses are those of a run that had room enough."""
    arguments = ("train", text_file, *TINY, "--train.steps", 6, "--train.micro-batch", 8)
    forge(*arguments, "--run", "room")
    rows, forward = [], Transformer.forward
    fails = iter([False, False, True, False, True])

    def full(self: Transformer, inputs: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if self.training:
            rows.append((len(inputs), self.recompute))
            if next(fails, False):
                raise error
        return forward(self, inputs, *rest)

    monkeypatch.setattr(Transformer, "forward", full)
    got = forge(*arguments, "--run", "tight")
    assert got.code == 0
    assert got.out.count(f"out of memory ({str(error)[:17]}") == 2
    assert "activations" in got.out
    assert len(set(rows)) == 3
    kept = config.load_json(Path("tight/config.json")).train
    assert rows[-1] == (kept.micro_batch, kept.recompute)
    for one, other in zip(records("room"), records("tight"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)


def test_without_a_smaller_setting_it_stops_with_a_table(forge: Call, text_file: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Transformer, "mean_nats", full)
    failed = forge("train", text_file, *TINY, "--train.steps", 2, "--run", "r")
    assert failed.code == 1
    assert "no smaller setting is left" in failed.err
    assert "weights" in failed.err
    assert "in all" in failed.err
