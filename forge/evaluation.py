"""Loss and bits per byte of a model on a text: every token counted once, windows of seq_len side by side."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from forge.config import DataConfig
from forge.data import prepare, sources
from forge.data.loader import Tokens, valid_batches
from forge.generate import load_model
from forge.model.transformer import Transformer

EVAL_TOKENS = 8192      # in one forward


class Score(NamedTuple):
    loss: float         # nats per token, end-of-text tokens included
    bpb: float          # all nats over ln 2 times the UTF-8 bytes of the text
    tokens: int
    bytes: int


@torch.no_grad()
def score(model: Transformer, tokens: Tokens, stop: Callable[[], bool] = lambda: False) -> Score | None:
    """The model's score on one part of a data folder; None when stop() says so before the end."""
    device, seq_len = model.embedding.weight.device, model.config.seq_len
    nats, counted = 0.0, 0
    was_training = model.training
    model.eval()
    for batch in valid_batches(tokens, seq_len, max(1, EVAL_TOKENS // seq_len)):
        if stop():
            model.train(was_training)
            return None
        n = int((batch.targets >= 0).sum())
        starts = None if batch.starts is None else batch.starts.to(device)
        with torch.compiler.set_stance("force_eager"):      # a few times a run: compiling would cost more
            nats += float(model(batch.inputs.to(device), batch.targets.to(device), starts)) * n
        counted += n
    model.train(was_training)
    return Score(nats / counted, nats / math.log(2) / tokens.bytes, counted, tokens.bytes)


def evaluate(run: str | Path, text: tuple[str, ...] = (), *, checkpoint: str = "best", device: str = "auto",
             text_field: str = "text") -> Score:
    """Loss and bits per byte of a run's checkpoint on its own validation text, or on the files and folders of `text`.

    Raises RequestError for a run, checkpoint or text that is not there; Failure for a damaged checkpoint.
    """
    model, tokenizer = load_model(run, checkpoint=checkpoint, device=device)
    if not text:
        score_ = score(model, Tokens(prepare.folder_of(Path(run)) / "valid", tokenizer.hash))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            config, skipped = DataConfig(text=tuple(text), text_field=text_field), Counter[str]()
            found = sources.find(config.text, skipped)
            prepare.measure(found, config, skipped)
            prepare.write_shards(sources.read(found, config, skipped), tokenizer, Path(scratch) / "valid")
            score_ = score(model, Tokens(Path(scratch) / "valid", tokenizer.hash))
    assert score_ is not None
    return score_
