"""Loss and bits per byte of a model on a text: every token counted once, windows of seq_len side by side. And `evaluate`,
which takes the tasks with it and keeps what it found.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from forge import checkpoint as checkpoints
from forge import machine
from forge.config import DataConfig, Failure, parse_json, write_json
from forge.data import prepare, sources
from forge.data.loader import Tokens, valid_batches
from forge.generate import load_model
from forge.model.transformer import Transformer
from forge.tasks import Result, run_tasks

EVAL_TOKENS = 8192      # in one forward


class Score(NamedTuple):
    loss: float         # nats per token, end-of-text tokens included
    bpb: float          # all nats over ln 2 times the UTF-8 bytes of the text
    tokens: int
    bytes: int


@torch.no_grad()
def score(model: Transformer, tokens: Tokens, stop: Callable[[], bool] = lambda: False) -> Score | None:
    """The model's score on one part of a data folder; None when stop() says so before the end. When the device's memory runs
    out it begins again with half as many windows at a time."""
    count = max(1, EVAL_TOKENS // model.config.seq_len)
    was_training = model.training
    model.eval()
    try:
        while True:
            try:
                return score_by(count, model, tokens, stop)
            except RuntimeError as error:
                if count == 1 or not machine.out_of_memory(error):
                    raise
            count //= 2
            machine.empty_cache(model.embedding.weight.device)
    finally:
        model.train(was_training)


def score_by(count: int, model: Transformer, tokens: Tokens, stop: Callable[[], bool]) -> Score | None:
    """The same, so many windows at a time."""
    device = model.embedding.weight.device
    nats, counted = 0.0, 0
    for batch in valid_batches(tokens, model.config.seq_len, count):
        if stop():
            return None
        n = int((batch.targets >= 0).sum())
        starts = None if batch.starts is None else batch.starts.to(device)
        with torch.compiler.set_stance("force_eager"):      # a few times a run: compiling would cost more
            nats += float(model(batch.inputs.to(device), batch.targets.to(device), starts)) * n
        counted += n
    return Score(nats / counted, nats / math.log(2) / tokens.bytes, counted, tokens.bytes)


@dataclass(frozen=True)
class Evaluation:
    """What was measured of a checkpoint; the text's figures are None when only tasks were asked for."""

    checkpoint: str
    loss: float | None = None
    """nats per token, end-of-text tokens included"""
    bpb: float | None = None
    """bits per byte"""
    tokens: int | None = None
    bytes: int | None = None
    tasks: dict[str, Result] = field(default_factory=dict)


def evaluate(run: str | Path, text: Sequence[str] = (), *, tasks: Sequence[str] = (), tasks_dir: str | Path = ".",
             limit: int | None = None, checkpoint: str = "best", device: str = "auto", dtype: str = "auto",
             text_field: str = "text", skip_bad_lines: bool = False, say: Callable[[str], None] = print) -> Evaluation:
    """Loss and bits per byte of a run's checkpoint on the files and folders of `text`, and its scores on tasks.

    Without text and tasks: on the run's own validation text. tasks: names in forge.tasks.TASKS, whose files lie in
    tasks_dir; limit: score so many items of each. dtype: of the computation, auto as it was trained.
    The result is also kept in the run folder, as eval-CHECKPOINT.json, beside what was measured of that checkpoint before.
    Raises RequestError for a run, checkpoint, text or task that is not there; Failure for a damaged checkpoint.
    """
    run = Path(run)
    model, tokenizer = load_model(run, checkpoint=checkpoint, device=device,
                                  dtype=None if dtype == "auto" else getattr(torch, dtype))
    score_, found = None, {}
    config, skipped = DataConfig(text=tuple(text), text_field=text_field, skip_bad_lines=skip_bad_lines), Counter[str]()
    files = sources.find(config.text, skipped)
    if text:        # what is wrong with it is said before anything is scored
        prepare.measure(files, config, skipped)
    for what, count in skipped.items():
        if count:
            say(f"data: {count} {what} left out")
    if tasks:
        found = run_tasks(model, tokenizer, tasks, tasks_dir, limit=limit, say=say)
    if text:
        with tempfile.TemporaryDirectory() as scratch:
            prepare.write_shards(sources.read(files, config, skipped), tokenizer, Path(scratch) / "valid")
            score_ = score(model, Tokens(Path(scratch) / "valid", tokenizer.hash))
    elif not tasks:
        score_ = score(model, Tokens(prepare.folder_of(run) / "valid", tokenizer.hash))
    result = Evaluation(checkpoints.path_of(run, checkpoint).name, **(score_._asdict() if score_ else {}), tasks=found)
    try:
        keep(run, result, " ".join(text) or "validation", model)
    except OSError as error:        # of a run that may only be read
        say(f"the result could not be kept in {run}: {error}")
    return result


def keep(run: Path, result: Evaluation, text: str, model: Transformer) -> None:
    """Writes the result into RUN/eval-CHECKPOINT.json, over what the file says of the same text and tasks."""
    path = run / f"eval-{result.checkpoint}.json"
    try:
        known = parse_json(path.read_bytes())
    except FileNotFoundError:
        known = {}
    except ValueError as error:
        raise Failure(f"{path} is damaged: {error}; remove it") from error
    if result.loss is not None:
        known["texts"] = known.get("texts", {}) | {text: {name: getattr(result, name)
                                                          for name in ("loss", "bpb", "tokens", "bytes")}}
    if result.tasks:
        known["tasks"] = known.get("tasks", {}) | {name: r.numbers() for name, r in result.tasks.items()}
    known |= {"checkpoint": result.checkpoint, "dtype": str(model.dtype)[6:],
              "environment": machine.environment(model.embedding.weight.device)}
    write_json(known, path)
