"""The run folder on disk. A checkpoint is written beside, flushed, and published by one rename; it knows no model.

checkpoints/step_000500/ holds weights.safetensors, optimizer.safetensors, state.json and MANIFEST.json with the size
and sha256 of each. The files `latest` and `best` hold the name of one of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from forge.config import Failure, RequestError

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


def save(run: Path, step: int, weights: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any],
         keep: int, best: bool) -> None:
    """Publishes a checkpoint, points `latest` (and `best`) to it and removes older ones, but the newest and the best."""
    path = folder(run, step)
    if not path.exists():
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, tensors in (("weights", weights), ("optimizer", optimizer)):
            save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, partial / f"{name}.safetensors")
        (partial / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        manifest = {name: {"bytes": (partial / name).stat().st_size, "sha256": sha256(partial / name)} for name in FILES}
        (partial / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for file in (*partial.iterdir(), partial):
            flush(file)
        partial.rename(path)
        flush(path.parent)
    point(run / "latest", path.name)
    if best:
        point(run / "best", path.name)
    kept = {named(run, "best"), *(folder(run, s).name for s in steps(run)[-keep:])}
    for old in steps(run):
        if folder(run, old).name not in kept:
            shutil.rmtree(folder(run, old))


def path_of(run: Path, which: str = "latest") -> Path:
    """The checkpoint named latest, best, or a step. Raises RequestError when there is no such one."""
    name = named(run, which) if which in ("latest", "best") else f"step_{which:0>6}"
    there = steps(run)
    if not there:
        raise RequestError(f"{run} holds no checkpoint yet; train it with: forge train --resume {run}")
    if name is None or not (run / "checkpoints" / name).is_dir():
        if which == "best" and name is None:
            return path_of(run, "latest")       # no evaluation has been saved yet
        raise RequestError(f"{run} has no checkpoint {which!r}; it has: latest, best, {', '.join(map(str, there))}")
    return run / "checkpoints" / name


def load(run: Path, which: str = "latest") -> Checkpoint:
    """The checkpoint that path_of finds. Raises Failure when a part of it is missing or altered."""
    path, there = path_of(run, which), steps(run)
    try:
        manifest = json.loads((path / "MANIFEST.json").read_text(encoding="utf-8"))
        for file in FILES:
            if (path / file).stat().st_size != manifest[file]["bytes"] or sha256(path / file) != manifest[file]["sha256"]:
                raise Failure(damaged(run, path, f"{file} is not what was saved", there))
        return Checkpoint(path, load_file(path / FILES[0]), load_file(path / FILES[1]),
                          json.loads((path / FILES[2]).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise Failure(damaged(run, path, f"{Path(error.filename).name} is missing", there)) from error
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise Failure(damaged(run, path, str(error), there)) from error


def damaged(run: Path, path: Path, what: str, there: list[int]) -> str:
    others = [step for step in there if folder(run, step) != path]
    advice = (f"its other checkpoints: {', '.join(map(str, others))}; remove {path} to go on from the newest of them"
              if others else "it has no other checkpoint")
    return f"{path} is damaged: {what}; {advice}"


def named(run: Path, pointer: str) -> str | None:
    """The checkpoint's name in the file `latest` or `best`; a latest that is gone means the newest that is there."""
    try:
        name = (run / pointer).read_text(encoding="utf-8").strip()
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
