"""Each script of examples/ runs as a user would run it."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *argv: object) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name, *map(str, argv)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_scripts_that_train_write_and_measure(text_file: Path) -> None:
    trained = run("train_and_write.py", text_file, "r", 12)
    assert "done: 12 steps" in trained
    lines = run("many_texts.py", "r", "the", "iron").splitlines()
    assert len(lines) == 6
    assert all(" nats, " in line for line in lines)
    surprise = run("surprise.py", "r", "the forge is hot").splitlines()
    assert surprise[-1].endswith("bits per byte in all")
    measured = run("measure.py", "r", text_file)
    assert "bits per byte" in measured
    assert "accuracy" in measured
    # the same text by another way: summed log-probabilities over bytes
    assert 0 < float(surprise[-1].split()[0]) < 20


def test_attention_in_a_model_of_ones_own_learns_to_look_back() -> None:
    last = run("own_model.py", 120).splitlines()[-1]
    assert float(last.split()[3]) < 1.5


def test_attention_in_a_model_of_transformers_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["", "41"])
    made = runpy.run_path(str(EXAMPLES / "llama_attention.py"))
    lines = capsys.readouterr().out.splitlines()
    assert 0 < float(lines[0].split()[-1]) < 1e-4       # 0 would be PyTorch's attention beside itself
    assert float(lines[1].split()[2]) > 5 > 2 > float(lines[-1].split()[3])
    mask, positions = torch.ones_like(made["batch"]), torch.arange(128).remainder(64)[None]
    mask[0, :5] = 0
    with pytest.raises(ValueError, match="hides padding"):
        made["model"](made["batch"], attention_mask=mask)
    with pytest.raises(ValueError, match="leave position_ids out"):
        made["model"](made["batch"], position_ids=positions, use_cache=False)


def test_every_script_is_tested() -> None:
    source = Path(__file__).read_text()
    for script in EXAMPLES.glob("*.py"):
        assert f'"{script.name}"' in source


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_each_says_how_to_run_it(script: Path) -> None:
    assert f"python examples/{script.name}" in script.read_text().split('"""')[1]
