from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge import tokenizer as tokenizers
from forge.config import RequestError
from forge.data.prepare import CORPUS, stretch
from forge.data.sources import Piece
from forge.tokenizer import EOT, Tokenizer

CORPUS_TEXT = CORPUS.read_text(encoding="utf-8")
SAMPLE = CORPUS_TEXT[:200_000] + " naïve café — “quoted” 東京 🙂‍↔️ é "
BPE = tokenizers.train_bpe([SAMPLE], len(SAMPLE), 600)
ALL = {"chars": tokenizers.chars(SAMPLE + EOT), "bytes": tokenizers.byte_tokens(), "bpe": BPE}


@pytest.mark.parametrize("kind", ALL)
def test_encode_decode_and_stream_give_the_text_back(kind: str) -> None:
    made = ALL[kind]
    text = SAMPLE[-500:]
    ids = made.encode(text).tolist()
    assert made.kind == kind
    assert made.decode(ids) == text
    assert max(ids) < made.vocab_size
    assert "".join(made.stream(ids)) == text
    assert all("\ufffd" not in piece for piece in made.stream(ids))     # never half a character


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_bytes_and_bpe_hold_any_text(text: str) -> None:
    for made in (ALL["bytes"], BPE):
        assert made.decode(made.encode(text).tolist()) == text


@pytest.mark.parametrize("kind", ALL)
def test_the_table_gives_the_ids_of_the_library(kind: str) -> None:
    made, text = ALL[kind], SAMPLE[-3000:]
    assert made.encode(text).tolist() == made.library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ALL)
def test_end_of_text_spelled_out_is_text(kind: str) -> None:
    made = ALL[kind]
    ids = made.encode(f"a{EOT}b").tolist()
    assert made.eot not in ids
    assert made.decode(ids) == f"a{EOT}b"


@pytest.mark.parametrize("kind", ALL)
def test_the_file_brings_back_the_same_tokenizer(kind: str, tmp_path: Path) -> None:
    made = ALL[kind]
    made.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.hash, loaded.kind, loaded.vocab_size, loaded.eot) == (made.hash, kind, made.vocab_size, made.eot)
    assert loaded.encode(SAMPLE[:1000]).tolist() == made.encode(SAMPLE[:1000]).tolist()


def test_bytes_are_their_own_ids() -> None:
    assert ALL["bytes"].encode("Aé").tolist() == [65, 0xC3, 0xA9]
    assert ALL["bytes"].eot == 256


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    assert ALL["bytes"].decode([65, 0xC3, 66]) == "A\ufffdB"
    assert "".join(ALL["bytes"].stream([65, 0xC3, 66])) == "A\ufffdB"
    assert "".join(ALL["bytes"].stream([65, 0xC3])) == "A\ufffd"


def test_a_character_unknown_to_chars_is_named() -> None:
    with pytest.raises(RequestError, match=r"U\+00DF.*--data.tokenizer bytes"):
        tokenizers.chars("abc").encode("abßc")


def test_encoding_in_stretches_equals_encoding_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "PIECE", 1000)
    text = SAMPLE[:50_000]
    pieces = list(stretch(iter([Piece(text[:777], False), Piece(text[777:30_001], False), Piece(text[30_001:], True),
                                Piece("  another one", True)])))
    assert len(pieces) > 40
    assert [p.ends for p in pieces].count(True) == 2
    assert "".join(p.text for p in pieces) == text + "  another one"
    together = [i for p in pieces[:-1] for i in BPE.encode(p.text).tolist()]
    assert together == BPE.encode(text).tolist()


def test_a_bpe_is_as_large_as_asked_and_compresses() -> None:
    assert BPE.vocab_size == 600
    assert len(BPE.encode(SAMPLE)) < len(SAMPLE) / 1.8


@pytest.mark.parametrize(("n_bytes", "vocab"), [(1_000, 512), (1_000_000, 1024), (42_000_000, 8192), (10**9, 32_768),
                                                (10**12, 32_768)])
def test_the_vocabulary_follows_the_amount_of_text(n_bytes: int, vocab: int) -> None:
    assert tokenizers.bpe_vocab(n_bytes) == vocab


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"model": 3}')
    with pytest.raises(RequestError, match=r"no tokenizer.json"):
        Tokenizer.load(tmp_path / "t.json")
    with pytest.raises(RequestError, match="No such file"):
        Tokenizer.load(tmp_path / "missing.json")
    with pytest.raises(RequestError, match="257"):
        tokenizers.train_bpe(["abc"], 3, 100)
