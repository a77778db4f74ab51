"""The run folder on disk. A checkpoint is written beside, flushed, and published by one rename; it knows no model.

checkpoints/step_000500/ holds weights.safetensors, optimizer.safetensors, state.json and MANIFEST.json with the size
and sha256 of each. The files `latest` and `best` hold the name of one of them. Who trains holds a lock on the folder; who
reads needs none, since what a name stands for never changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from forge.config import Failure, RequestError, parse_json

NAME = re.compile(r"step_(\d+)")
FILES = ("weights.safetensors", "optimizer.safetensors", "state.json")


class Checkpoint(NamedTuple):
    path: Path
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def steps(run: Path) -> list[int]:
    """The steps of the complete checkpoints, ascending."""
    return sorted(int(match[1]) for path in (run / "checkpoints").glob("step_*") if (match := NAME.fullmatch(path.name)))


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:06d}"


class Writer:
    """Saves the checkpoints of a run on a thread of its own, one at a time, while training goes on."""

    def __init__(self, run: Path, keep: int, keep_every: int) -> None:
        self.run, self.keep, self.keep_every = run, keep, keep_every
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.job: Future | None = None

    def start(self, step: int, weights: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any],
              best: bool) -> None:
        """Copies all into host memory and returns; the save before must have been waited for."""
        assert self.job is None
        weights, optimizer = ({key: t.detach().to("cpu", copy=True) for key, t in tensors.items()}
                              for tensors in (weights, optimizer))
        self.job = self.pool.submit(save, self.run, step, weights, optimizer, state, self.keep, best, self.keep_every)

    def done(self) -> bool:
        """Whether a save has ended that nobody has waited for."""
        return self.job is not None and self.job.done()

    def wait(self) -> Exception | None:
        """Ends when what was started is on the disk; or says why it is not; no half of it is left then."""
        job, self.job = self.job, None
        try:
            if job:
                job.result()
        except (OSError, SafetensorError) as error:
            return error
        return None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()


def save(run: Path, step: int, weights: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any],
         keep: int, best: bool, keep_every: int = 0) -> None:
    """Publishes a checkpoint, points `latest` (and `best`) to it and removes older ones, but the newest, the best and those
    of every keep_every-th step. What was begun is removed when it cannot be ended."""
    path = folder(run, step)
    if not path.exists():
        make_room(run, sum(t.nbytes for tensors in (weights, optimizer) for t in tensors.values()))
        partial = path.with_name(f".{path.name}.partial")
        for old in path.parent.glob(".step_*.partial"):         # of a process that was killed
            shutil.rmtree(old, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            for name, tensors in (("weights", weights), ("optimizer", optimizer)):
                tensors = {key: t.detach().cpu().contiguous() for key, t in tensors.items()}
                save_file(tensors, partial / f"{name}.safetensors")
            (partial / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
            manifest = {name: {"bytes": (partial / name).stat().st_size, "sha256": sha256(partial / name)} for name in FILES}
            (partial / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            for file in (*partial.iterdir(), partial):
                flush(file)
            partial.rename(path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        flush(path.parent)
    point(run / "latest", path.name)
    if best:
        point(run / "best", path.name)
    kept = {named(run, "best"), *(folder(run, s).name for s in steps(run)[-keep:])}
    for old_step in steps(run):
        if folder(run, old_step).name not in kept and (not keep_every or old_step % keep_every):
            remove(folder(run, old_step))


def make_room(run: Path, needed: int) -> None:
    """Removes old checkpoints, the oldest first, until so many bytes are free; never the newest, nor the best."""
    for step in steps(run)[:-1]:
        if shutil.disk_usage(run).free >= 1.1 * needed:
            return
        if folder(run, step).name != named(run, "best"):
            remove(folder(run, step))


def remove(path: Path) -> None:
    """First out of sight, so that no reader meets a half of it."""
    hidden = path.with_name(f".{path.name}.partial")
    path.rename(hidden)
    shutil.rmtree(hidden)


def path_of(run: Path, which: str = "latest") -> Path:
    """The checkpoint named latest, best, or a step. Raises RequestError when there is no such one."""
    name = named(run, which) if which in ("latest", "best") else f"step_{which:0>6}"
    there = steps(run)
    if not there:
        lost = any((run / "checkpoints").glob("damaged_*"))
        raise RequestError(f"{run} holds no {'whole checkpoint' if lost else 'checkpoint yet'}; train it with: forge train "
                           f"--resume {run}")
    if name is None or not (run / "checkpoints" / name).is_dir():
        if which == "best" and name is None:
            return path_of(run, "latest")       # no evaluation has been saved yet
        raise RequestError(f"{run} has no checkpoint {which!r}; it has: latest, best, {', '.join(map(str, there))}")
    return run / "checkpoints" / name


class Damaged(Failure):
    """A checkpoint is not what was saved."""


def load(run: Path, which: str = "latest") -> Checkpoint:
    """The checkpoint that path_of finds. Raises Damaged when a part of it is missing or altered."""
    path, there = path_of(run, which), steps(run)
    try:
        try:
            manifest = parse_json((path / "MANIFEST.json").read_bytes())
        except ValueError as error:
            raise ValueError(f"MANIFEST.json: {error}") from error
        for file in FILES:
            if (path / file).stat().st_size != manifest[file]["bytes"] or sha256(path / file) != manifest[file]["sha256"]:
                raise Damaged(damaged(run, path, f"{file} is not what was saved", there))
        return Checkpoint(path, load_file(path / FILES[0]), load_file(path / FILES[1]),
                          parse_json((path / FILES[2]).read_bytes()))
    except FileNotFoundError as error:
        if not path.exists() and path_of(run, which) != path:       # a newer one took its place while it was read
            return load(run, which)
        raise Damaged(damaged(run, path, f"{Path(error.filename).name} is missing", there)) from error
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise Damaged(damaged(run, path, str(error), there)) from error


def damaged(run: Path, path: Path, what: str, there: list[int]) -> str:
    others = [step for step in there if folder(run, step) != path]
    advice = (f"its other checkpoints: {', '.join(map(str, others))} (--checkpoint {others[-1]} takes one)" if others else
              "it has no other checkpoint")
    return f"{path} is damaged: {what}; {advice}"


def newest(run: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint, None while there is none. One that is damaged is set aside, aloud: it keeps its name
    behind `damaged_`. Raises Failure when all are damaged. Only for who holds the run's lock."""
    lost = ""
    for step in reversed(steps(run)):
        try:
            return load(run, str(step))
        except Damaged as error:
            path = folder(run, step)
            aside = path.with_name(f"damaged_{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            (aside / "REASON.txt").write_text(f"{error}\n", encoding="utf-8")
            lost = str(error)
            say(f"{error}. It is set aside as {aside}")
    if lost or any((run / "checkpoints").glob("damaged_*")):
        raise Failure(f"{lost or 'all are damaged'}, and so {run} has no whole checkpoint left. To begin it again from its "
                      f"first step, with the same data and settings, remove {run / 'checkpoints'} and type: forge train "
                      f"--resume {run}")
    return None


@contextmanager
def lock(run: Path) -> Iterator[None]:
    """Held by the one process that trains a run; the system gives it back however that process ends. Raises RequestError
    naming the process that holds it."""
    held = FileLock(run / ".lock", timeout=0)
    writer = run / ".writer"
    try:
        held.acquire()
    except Timeout:
        who = writer.read_text(encoding="utf-8").strip() if writer.exists() else "another process"
        raise RequestError(f"{run} is being trained by {who}; wait for it, or end it, or name another run") from None
    try:
        writer.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")
        yield
    finally:
        writer.unlink(missing_ok=True)
        held.release()


def named(run: Path, pointer: str) -> str | None:
    """The checkpoint's name in the file `latest` or `best`; a latest that is gone means the newest that is there."""
    try:
        name = (run / pointer).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        name = ""
    if NAME.fullmatch(name) and (run / "checkpoints" / name).is_dir():
        return name
    there = steps(run)
    return folder(run, there[-1]).name if there and pointer == "latest" else None


def point(path: Path, name: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(name + "\n", encoding="utf-8")
    flush(partial)
    partial.rename(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
