from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge import checkpoint
from forge.config import Failure, RequestError
from forge.metrics import cut, duration


def save(run: Path, step: int, best: bool = False, keep: int = 2) -> None:
    checkpoint.save(run, step, {"w": torch.full((3,), float(step))}, {"w/m": torch.zeros(3)}, {"step": step}, keep, best)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    save(tmp_path, 5)
    found = checkpoint.load(tmp_path)
    assert found.path.name == "step_000005"
    assert found.weights["w"].tolist() == [5.0] * 3
    assert (list(found.optimizer), found.state) == (["w/m"], {"step": 5})
    assert sorted(p.name for p in found.path.iterdir()) == sorted([*checkpoint.FILES, "MANIFEST.json"])
    assert not [p for p in tmp_path.rglob("*") if "partial" in p.name]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step, best=step == 3)
    assert checkpoint.steps(tmp_path) == [3, 6, 7]
    assert [checkpoint.load(tmp_path, which).state["step"] for which in ("latest", "best", "6")] == [7, 3, 6]


def test_best_is_the_latest_while_none_was_measured(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert checkpoint.load(tmp_path, "best").state["step"] == 1


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no checkpoint yet"):
        checkpoint.load(tmp_path)
    save(tmp_path, 1)
    for which in ("7", "newest"):
        with pytest.raises(RequestError, match=r"it has: latest, best, 1"):
            checkpoint.load(tmp_path, which)


@pytest.mark.parametrize("file", [*checkpoint.FILES, "MANIFEST.json"])
@pytest.mark.parametrize("damage", ["removed", "cut", "altered", "emptied"])
def test_a_part_missing_or_altered_is_a_failure(file: str, damage: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = checkpoint.folder(tmp_path, 2) / file
    raw = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        middle = len(raw) // 2
        path.write_bytes({"cut": raw[:-1] if file.endswith("tensors") else raw[:middle], "emptied": b"",
                          "altered": raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1:]}[damage])
    with pytest.raises(Failure, match=r"step_000002 is damaged: .*other checkpoints: 1"):
        checkpoint.load(tmp_path)
    assert checkpoint.load(tmp_path, "1").state["step"] == 1


def test_a_save_that_dies_halfway_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def dies(path: Path) -> str:
        assert checkpoint.steps(tmp_path) == [1]        # what is being written is not seen
        raise ZeroDivisionError

    monkeypatch.setattr(checkpoint, "sha256", dies)
    with pytest.raises(ZeroDivisionError):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert checkpoint.steps(tmp_path) == [1]
    assert checkpoint.load(tmp_path).state["step"] == 1
    save(tmp_path, 2)
    assert checkpoint.load(tmp_path).state["step"] == 2


def test_records_after_the_step_and_broken_ones_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {i}}}\n' for i in range(1, 6)]
    for tail, step, kept in (("", 3, 3), ('{"step": 6', 9, 5), ('{"step": 6}', 9, 5), ("", 0, 0)):
        path.write_text("".join(lines) + tail)
        assert cut(path, step) == (kept, 5)
        assert path.read_text() == "".join(lines[:kept])


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0, 45, 185, 9600, 277_000)] == ["0 s", "45 s", "3:05 min", "2:40 h", "3 d 4 h"]
