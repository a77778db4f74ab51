"""Shared by the tests: a folder of one's own, a small text, and the command line called as a user would."""

from __future__ import annotations

import importlib.util
import os
import platform
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "20000")        # as forge.cli.main does, before torch is loaded
if importlib.util.find_spec("triton") and "TRITON_INTERPRET" not in os.environ:     # tests/gpu is run with it at 0
    os.environ["TRITON_INTERPRET"] = "1"        # Triton's own functions take it from here when they are loaded
    import triton.language  # noqa: F401

    del os.environ["TRITON_INTERPRET"]          # test_triton.py sets it again: elsewhere the backend needs a GPU

import torch

from forge import cli

WORDS = "the forge is hot and the iron is red so we strike while it glows and cool it in the well at night".split()


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the Metal kernels ran, if they did: the dots would be the same."""
    if (emulator := sys.modules.get("emulator")) is None:
        return
    where = "the emulator: torch finds no Apple GPU here"
    if torch.backends.mps.is_available():
        where = f"this Apple GPU (macOS {platform.mac_ver()[0]}, {platform.machine()})"
    elif reason := emulator.no_sanitizers():
        where += f"; not under the sanitizers: {reason}"
    terminalreporter.write_line(f"Metal kernels: on {where}; torch {torch.__version__}")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder, and leaves the user's cache alone."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests measure of this machine is not kept for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def forge(capfd: pytest.CaptureFixture) -> Callable[..., Outcome]:
    """forge("train", "x.txt", "--seed", 2) -> what the command would exit with and print."""

    def call(*argv: object) -> Outcome:
        capfd.readouterr()
        try:
            code = cli.main([str(word) for word in argv])
        except SystemExit as error:
            code = int(error.code or 0)
        return Outcome(code, *capfd.readouterr())

    return call


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """About 20 kB of words in random order."""
    random_ = random.Random(0)
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(random_.choices(WORDS, k=8)) + "." for _ in range(500)) + "\n")
    return path


TINY = ("--model.dim", 16, "--model.n-heads", 2, "--model.n-layers", 2, "--model.seq-len", 32, "--train.batch-tokens",
        256, "--train.compile", False, "--train.sample-every", 0, "--train.dtype", "float32")
