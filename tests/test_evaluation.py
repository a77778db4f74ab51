from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from forge import tokenizer as tokenizers
from forge.config import DataConfig, ModelConfig
from forge.data import prepare
from forge.data.loader import Tokens
from forge.evaluation import score
from forge.model.transformer import Transformer, init_weights

DOCUMENTS = ["One two three, née four.\n", "Five! six\tseven. " * 7, "八 eight 🙂"]


def folder(tmp_path: Path, kind: str) -> tuple[Tokens, int]:
    paths = []
    for i, text in enumerate(DOCUMENTS):
        paths.append(str(tmp_path / f"{i}.txt"))
        Path(paths[-1]).write_text(text, encoding="utf-8")
    made = {"chars": lambda: tokenizers.chars("".join(DOCUMENTS)), "bytes": tokenizers.byte_tokens,
            "bpe": lambda: tokenizers.train_bpe(DOCUMENTS, 100, 300)}[kind]()
    config = DataConfig(text=(paths[0],), valid=str(tmp_path))
    prepare.prepare(config, tmp_path / "out", made, say=lambda _: None)
    return Tokens(tmp_path / "out" / "valid", made.hash), made.vocab_size


def model_of(vocab_size: int, **changes: object) -> Transformer:
    config = ModelConfig(vocab_size=vocab_size, seq_len=16, dim=16, n_layers=2, n_heads=2, **changes)  # type: ignore[arg-type]
    model = Transformer(config.resolve(), torch.float64).double()
    init_weights(model, 0)
    return model


@pytest.mark.parametrize("kind", tokenizers.KINDS)
def test_uniform_logits_cost_log2_of_the_vocabulary_a_token(kind: str, tmp_path: Path) -> None:
    tokens, vocab_size = folder(tmp_path, kind)
    model = model_of(vocab_size)
    torch.nn.init.zeros_(model.head_weight)
    n_bytes = sum(len(text.encode("utf-8")) for text in DOCUMENTS)
    result = score(model, tokens)
    assert result is not None
    assert result.bytes == n_bytes
    assert result.tokens == len(tokens)
    assert result.loss == pytest.approx(math.log(vocab_size), rel=1e-6)
    assert result.bpb == pytest.approx(len(tokens) * math.log2(vocab_size) / n_bytes, rel=1e-6)


@pytest.mark.parametrize("changes", [{}, {"window": 5}, {"softcap": 4.0}, {"z_loss": 0.5}, {"dropout": 0.5}], ids=str)
def test_the_score_equals_a_direct_computation(changes: dict, tmp_path: Path) -> None:
    """Token by token: each from its document's tokens within its window of 16, an end-of-text before the first."""
    tokens, vocab_size = folder(tmp_path, "bytes")
    model = model_of(vocab_size, **changes).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    result = score(model, tokens)
    assert model.training
    stream = [tokens.eot, *tokens.read(0, len(tokens)).tolist()]
    model.eval()
    nats = 0.0
    with torch.no_grad():
        for i in range(len(tokens)):
            context = stream[i // 16 * 16:i + 1]
            begins = [j for j, token in enumerate(context) if token == tokens.eot]
            context = context[begins[-1] if begins else 0:]
            logits = model.logits(model.hidden(torch.tensor([context]))[0, -1])
            nats -= float(torch.log_softmax(logits, 0)[stream[i + 1]])
    assert result is not None
    assert result.loss == pytest.approx(nats / len(tokens), rel=1e-9)


def test_a_stop_ends_an_evaluation(tmp_path: Path) -> None:
    tokens, vocab_size = folder(tmp_path, "bytes")
    assert score(model_of(vocab_size), tokens, stop=lambda: True) is None
