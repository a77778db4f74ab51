"""What a user types wrong gets one clear paragraph, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import bz2
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

from forge import cli, evaluation

Call = Callable[..., Any]


@pytest.fixture
def mess(tmp_path: Path) -> None:
    files = {"empty.txt": b"", "blank.txt": b" \n\n", "latin.txt": "Él\n".encode("latin-1"),
             "image.png": b"\x89PNG\r\n\x1a\n\0\0", "utf16.txt": "hello".encode("utf-16-le"), "ok.txt": b"some text " * 99,
             "bad.jsonl": b'{"text": "a"}\n{"txt": "b"}\n', "cut.txt.bz2": bz2.compress(b"x" * 999)[:-5],
             "c.toml": b"[modle]\ndim = 3\n", "bad.toml": b"[train]\nsteps = 'ten'\n", "t.json": b"{}"}
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "image.png").write_bytes(files["image.png"])
    (tmp_path / "hollow").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letters.txt").write_text("dear")


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
    (["train", "ok.txt", "--run", "run"], ["run exists", "--resume run", "--run"]),
    (["train", "ok.txt", "--run", "mine"], ["mine exists", "letters.txt", "--run"]),
    (["train", "--resume", "nowhere"], ["nowhere", "no such run"]),
    (["train", "--resume", "taken"], ["taken", "config.json"]),
    (["train", "ok.txt", "--init", "taken"], ["taken", "config.json"]),
    (["train", "--resume", "taken", "--preset", "30m"], ["--resume", "--preset"]),
    (["train", "ok.txt", "--run", "ok.txt/r"], ["ok.txt", "Not a directory"]),
    (["data", "prepare", "ok.txt", "--out", "ok.txt/d"], ["ok.txt", "Not a directory"]),
    (["data", "prepare", "bad.jsonl", "--out", "d"], ["bad.jsonl", " --text-field", " --skip-bad-lines"]),
    (["tokenizer", "train", "ok.txt", "--out", "nowhere/t.json"], ["nowhere/t.json", "no such folder"]),
    (["tokenizer", "compare", "ok.txt", "--tokenizers", "chars"], ["chars", "gpt2"]),
    (["train", "ok.txt", "--config", "bad.toml"], ["bad.toml", "steps='ten'"]),
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
    (["data", "info", "taken"], ["taken is no folder", "data prepare"]),
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of bytes, finished."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the forge is hot and the iron is red\n" * 300)
    flags = ["--model.dim", "16", "--model.n-heads", "2", "--model.n-layers", "2", "--model.seq-len", "32",
             "--train.batch-tokens", "256", "--train.steps", "20", "--train.compile", "False", "--train.dtype", "float32"]
    assert cli.main(["train", str(folder / "text.txt"), *flags, "--run", str(folder / "r")]) == 0
    return folder / "r"


@pytest.mark.parametrize(("argv", "words"), [
    (["sample", "RUN", "--n", 0], ["--n 0"]), (["sample", "RUN", "--max-new-tokens", -1], ["--max-new-tokens -1"]),
    (["sample", "RUN", "--seed", -1], ["--seed -1"]), (["sample", "RUN", "--logit-bias", "a=b"], ["a=b", "ID=BIAS"]),
    (["sample", "RUN", "--logit-bias", "999=1"], ["999", "257"]), (["sample", "RUN", "--stop", ""], ["empty stop"]),
    (["sample", "RUN", "--device", "tpu"], ["tpu", "cpu"]), (["sample", "RUN", "--checkpoint", "7"], ["'7'", "latest"]),
    (["chat", "nowhere"], ["nowhere", "no such run"]), (["chat", "RUN", "--min-p", 2], ["--min-p 2"]),
    (["eval", "RUN", "--tasks", ","], ["','"]), (["eval", "RUN", "--tasks", "blip"], ["blip", "did you mean blimp?"]),
    (["eval", "RUN", "--tasks", "blimp", "--tasks-dir", "evals"], ["evals", "no such folder"]),
    (["eval", "RUN", "--tasks", "piqa"], ["piqa.jsonl"]),
    (["report", "nowhere"], ["nowhere"]), (["report", "RUN", "--out", "."], ["--out .", "folder"]),
    (["sample", "RUN", "--prompt"], ['--prompt ""']), (["eval", "RUN", "--limit", 3], ["--limit 3", "--tasks"]),
    (["eval", "RUN", "nofile.txt", "--tasks", "copa"], ["nofile.txt", "no such file"]),
    (["bench", "generate", "--out", "/nowhere/b.json"], ["/nowhere/b.json", "no such folder"]),
    (["bench", "train", "--out", "/nowhere/b.json"], ["/nowhere/b.json", "no such folder"]),
    (["bench", "train", "--out", "new/"], ["new/", "this is a folder"]),
    (["bench", "train", "--out", ""], ["this is a folder"]),
    (["data", "info", "RUN"], ["no folder", "RUN/data"]), (["tokenizer", "comp"], ["did you mean compare?"]),
    (["bench", "generate", "--preset", "gpt3"], ["gpt3", "did you mean"]), (["bench", "train", "--preset", "x"], ["x"])])
def test_a_wrong_request_of_a_run(argv: list, words: list[str], forge: Call, trained: Path, own_folder: Path) -> None:
    before = sorted(map(str, trained.rglob("*")))
    got = forge(*(trained if word == "RUN" else word for word in argv))
    assert got.code == 2, got
    assert all(word in got.err for word in words), got.err
    assert got.err.startswith("forge: ")
    assert got.err.count("\n") == 1
    assert got.out == ""
    assert sorted(map(str, trained.rglob("*"))) == before
    assert os.listdir(own_folder) == []


def test_sample_in_each_of_its_forms(forge: Call, trained: Path) -> None:
    one = forge("sample", trained, "--prompt", "the ", "--max-new-tokens", 12)
    assert one.code == 0
    assert one.out.startswith("the ")
    assert one.out.count("\n") >= 1
    many = forge("sample", trained, "--prompt", "the ", "iron", "--n", 2, "--max-new-tokens", 12)
    assert many.out.count("--- seed 1\n") == many.out.count("--- seed 2\n") == 2
    assert "--- seed 1\n" + one.out.rstrip("\n") in many.out
    lines = [json.loads(line) for line in forge("sample", trained, "--prompt", "the ", "", "--n", 2, "--max-new-tokens", 12,
                                                "--json", "--logprobs", "--stop", "\\n").out.splitlines()]
    assert [(c["prompt"], c["seed"]) for c in lines] == [("the ", 1), ("the ", 2), ("", 1), ("", 2)]
    assert all(len(c["ids"]) == len(c["logprobs"]) and c["finish"] in ("length", "stop", "end") for c in lines)
    assert all("\n" not in c["text"] for c in lines)
    with_logprobs = forge("sample", trained, "--prompt", "t", "--max-new-tokens", 3, "--temperature", 0, "--logprobs").out
    assert len([line for line in with_logprobs.splitlines() if line.strip().startswith("-")]) == 3
    long = forge("sample", trained, "--prompt", "the iron " * 20, "--max-new-tokens", 5)
    assert "note: the prompt has 181 tokens; the model's context holds 32" in long.err
    assert forge("sample", trained, "--prompt", "t", "--max-new-tokens", 0).out == "t\n"
    assert forge("sample", trained, "--dtype", "bfloat16", "--max-new-tokens", 3).code == 0


def test_chat_keeps_what_was_said(forge: Call, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge import generate

    prompts: list[str] = []
    real = generate.write

    def write(model: object, tokenizer: object, completions: list, **how: object) -> object:
        prompts.extend(c.prompt for c in completions)
        return real(model, tokenizer, completions, **how)       # type: ignore[arg-type]

    monkeypatch.setattr(generate, "write", write)
    monkeypatch.setattr("sys.stdin", io.StringIO("the iron\n\nis red\n/reset\nagain\n"))
    got = forge("chat", trained, "--max-new-tokens", 5, "--temperature", 0)
    assert got.code == 0
    said = got.out.splitlines()
    assert prompts[0] == "the iron\n"
    assert prompts[1].startswith("the iron\n")
    assert prompts[2].startswith(prompts[1])
    assert prompts[2].endswith("\nis red\n")
    assert prompts[3] == "again\n"
    assert len(said) >= 4


def test_eval_keeps_what_it_measured(forge: Call, trained: Path) -> None:
    Path("copa.jsonl").write_text('{"query": "the forge is", "choices": ["hot", "zzz"], "gold": 0}\n' * 3)
    Path("other.txt").write_text("the iron is hot")
    assert "bits per byte" in forge("eval", trained).out
    assert forge("eval", trained, "other.txt", "--tasks", "copa", "--tasks-dir", ".").code == 0
    file, = trained.glob("eval-step_*.json")
    kept = json.loads(file.read_text())
    assert set(kept["texts"]) == {"validation", "other.txt"}
    assert kept["texts"]["other.txt"]["bytes"] == 15
    assert kept["tasks"]["copa"]["n"] == 3
    assert kept["tasks"]["copa"]["chance"] == 0.5
    assert kept["environment"]["torch"]
    only = forge("eval", trained, "--tasks", "copa", "--limit", 2)
    assert "bits per byte" not in only.out
    assert json.loads(file.read_text())["tasks"]["copa"]["n"] == 2
    assert forge("report", trained).out.strip() == str(trained / "report.html")
    assert "copa" in (trained / "report.html").read_text()


def test_eval_of_a_run_that_may_only_be_read(forge: Call, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(evaluation, "write_json", refused)
    got = forge("eval", trained)
    assert got.code == 0
    assert "bits per byte" in got.out
    assert "could not be kept" in got.out + got.err
