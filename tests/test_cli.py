"""What a user types wrong gets one clear paragraph, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import bz2
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

Call = Callable[..., Any]


@pytest.fixture
def mess(tmp_path: Path) -> None:
    files = {"empty.txt": b"", "blank.txt": b" \n\n", "latin.txt": "Él\n".encode("latin-1"),
             "image.png": b"\x89PNG\r\n\x1a\n\0\0", "utf16.txt": "hello".encode("utf-16-le"), "ok.txt": b"some text " * 99,
             "bad.jsonl": b'{"text": "a"}\n{"txt": "b"}\n', "cut.txt.bz2": bz2.compress(b"x" * 999)[:-5],
             "c.toml": b"[modle]\ndim = 3\n", "t.json": b"{}"}
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "image.png").write_bytes(files["image.png"])
    (tmp_path / "hollow").mkdir()
    (tmp_path / "taken").mkdir()


CASES: list[tuple[list, list[str]]] = [
    (["train", "nowhere.txt"], ["nowhere.txt", "no such file"]),
    (["train", "empty.txt"], ["empty.txt", "no text"]),
    (["train", "blank.txt"], ["blank.txt", "white space"]),
    (["train", "latin.txt"], ["latin.txt", "0xC9", "offset 0", "iconv"]),
    (["train", "utf16.txt"], ["utf16.txt", "UTF-16LE"]),
    (["train", "image.png"], ["image.png", "binary"]),
    (["train", "cut.txt.bz2"], ["cut.txt.bz2", "cut off"]),
    (["train", "bad.jsonl"], ["bad.jsonl, line 2", "'txt'", "--data.text-field"]),
    (["train", "folder"], ["folder", ".png", ".jsonl"]),
    (["train", "hollow"], ["hollow", "nothing"]),
    (["train", "/dev/null"], ["/dev/null", "neither a file"]),
    (["train", "ok.txt", "--preset", "gpt10m"], ["gpt10m", "did you mean gpt-10m?"]),
    (["train", "ok.txt", "--config", "c.toml"], ["modle", "did you mean model?"]),
    (["train", "ok.txt", "--config", "none.toml"], ["none.toml", "No such file"]),
    (["train", "ok.txt", "--model.dmi", 3], ["--model.dmi", "--model.dim"]),
    (["train", "ok.txt", "--model.dim", "wide"], ["--model.dim", "wide"]),
    (["train", "ok.txt", "--model.norm", "batch"], ["--model.norm", "batch", "layer"]),
    (["train", "ok.txt", "--model.dim", 100, "--model.n-heads", 3], ["model.dim=100", "--model.n-heads"]),
    (["train", "ok.txt", "--model.dim", 0], ["model.dim=0", "--model.dim"]),
    (["train", "ok.txt", "--train.steps", -3], ["train.steps=-3", "--train.steps"]),
    (["train", "ok.txt", "--train.minutes", -1], ["train.minutes=-1"]),
    (["train", "ok.txt", "--train.tokens", 0], ["train.tokens=0"]),
    (["train", "ok.txt", "--train.batch-tokens", 1000], ["1000", "--train.batch-tokens 896 or 1024"]),
    (["train", "ok.txt", "--seed", 10**20], ["seed=", "less than"]),
    (["train", "ok.txt", "--model.dim", 10**8], ["GB", "--model.dim"]),
    (["train", "ok.txt", "--train.threads", 10**4], ["threads=10000", "cores"]),
    (["train", "ok.txt", "--train.device", "cuda"], ["cuda", "cpu"]),
    (["train", "ok.txt", "--train.attention", "flash"], ["flash", "blocked"]),
    (["train", "ok.txt", "--model.window", 4, "--train.attention", "sdpa"], ["sdpa", "no window"]),
    (["train", "ok.txt", "--model.vocab-size", 5], ["vocab_size=5", "257"]),
    (["train", "ok.txt", "--data.tokenizer", "bbpe"], ["bbpe", "No such file"]),
    (["train", "ok.txt", "--data.tokenizer", "t.json"], ["tokenizer.json"]),
    (["train", "ok.txt", "--data.valid", "nope"], ["--data.valid", "nope", "no such file"]),
    (["train", "ok.txt", "--run", "taken"], ["taken exists", "--resume taken", "--run"]),
    (["train", "--resume", "nowhere"], ["nowhere", "no such run"]),
    (["train", "--resume", "taken"], ["taken", "config.json"]),
    (["train", "ok.txt", "--init", "taken"], ["taken", "config.json"]),
    (["train", "--resume", "taken", "--preset", "30m"], ["--resume", "--preset"]),
    (["trian"], ["trian", "did you mean train?"]),
    (["sample"], ["run"]),
    (["sample", "nowhere"], ["nowhere", "no such run"]),
    (["sample", "taken"], ["taken", "config.json"]),
    (["sample", "taken", "--temperature", -1], ["--temperature -1"]),
    (["sample", "taken", "--top-p", 0], ["--top-p 0"]),
    (["eval", "nowhere"], ["nowhere"]),
    (["data", "prepare", "ok.txt", "--out", "taken"], ["taken exists"]),
    (["data", "prepare", "--out", "new"], ["no text is named"]),
    (["data", "prepair"], ["did you mean prepare?"]),
    (["data", "info", "taken"], ["tokenizer.json"]),
]


@pytest.mark.usefixtures("mess")
@pytest.mark.parametrize(("argv", "words"), CASES, ids=lambda x: " ".join(map(str, x)))
def test_a_wrong_request(argv: list, words: list[str], forge: Call, tmp_path: Path) -> None:
    before = sorted(map(str, tmp_path.rglob("*")))
    got = forge(*argv)
    assert got.code == 2, got
    assert all(word in got.err for word in words), got.err
    assert "Traceback" not in got.err
    if not got.err.startswith("╭"):
        assert got.err.startswith("forge: ")
        assert got.err.count("\n") == 1
    assert sorted(map(str, tmp_path.rglob("*"))) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(forge: Call, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "x.txt").chmod(0)
    assert "Permission denied" in forge("train", "x.txt").err


def test_an_unreadable_file_by_a_reader_that_fails(forge: Call, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setitem(__import__("forge.data.sources", fromlist=["OPENERS"]).OPENERS, "", refuse)
    got = forge("train", text_file, *TINY)
    assert got.code == 2
    assert "text.txt: Permission denied" in got.err


def test_help_of_every_verb(forge: Call) -> None:
    whole = forge("--help")
    assert whole.code == 0
    assert forge() == whole
    for verb in (["train"], ["sample"], ["eval"], ["data"], ["data", "prepare"], ["data", "info"]):
        assert " ".join(["forge", *verb]) in whole.out
        got = forge(*verb, "--help")
        assert got.code == 0
        assert "usage: forge" in got.out


def test_debug_shows_the_traceback(forge: Call) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        forge("train", "nowhere.txt", "--debug")


def test_a_preset_a_file_and_flags_are_laid_over_each_other(forge: Call, text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[train]\nsteps = 2\n[optim]\nlr = 0.5\n")
    got = forge("train", text_file, *TINY, "--preset", "gpt-10m", "--config", "c.toml", "--optim.lr", 0.25)
    assert got.code == 0, got.err
    from forge.config import load_json
    config = load_json(Path("runs/gpt-10m-1/config.json"))
    assert (config.preset, config.train.steps, config.optim.lr, config.model.mlp) == ("gpt-10m", 2, 0.25, "relu2")
    assert forge("train", text_file, *TINY, "--preset", "gpt-10m", "--train.steps", 1).code == 0
    assert Path("runs/gpt-10m-2").is_dir()
