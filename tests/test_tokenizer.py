from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers

from forge import tokenizer as tokenizers
from forge.config import Failure, RequestError
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


MESSY = ("It's DON'T we'll  two  blanks\t\ttabs\r\nlines\n\n\n  12345678 3.14159 x²  ÅÅ naïve 東京都 Привет мир 🙂‍↔️"
         " \u00a0\u2003 wide <|endoftext|> ʼn don’t\u0301 ﬁ a\u200bb !!!??? --- \n \n  end   ")


def tiktokens_gpt2(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tiktoken.Encoding:
    """tiktoken's own, which finds the files that it would fetch in its cache, and checks them."""
    for name in ("vocab.bpe", "encoder.json"):
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        shutil.copy(tokenizers.GPT2_FILES / name, folder / hashlib.sha1(url.encode()).hexdigest())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    return tiktoken.get_encoding("gpt2")


def test_gpt2_gives_the_ids_of_tiktoken_and_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = tiktokens_gpt2(tmp_path, monkeypatch), Tokenizer.load("gpt2")
    assert (ours.vocab_size, ours.eot, ours.encode("Hello world").tolist()) == (50_257, 50_256, [15496, 995])
    for text in (CORPUS_TEXT, MESSY, MESSY * 50, "", " ", "\n", "a", "\u0301"):
        assert ours.encode(text).tolist() == theirs.encode_ordinary(text) == ours.library.encode(text).ids
        assert ours.decode(ours.encode(text).tolist()) == text
    assert len(ours.encode(CORPUS_TEXT)) == 338_025


@functools.cache
def gpt2() -> Tokenizer:
    return Tokenizer.load("gpt2")


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("aA1 .'\n\r\t_é東\u0301\u00a0🙂sdtl")), st.text())
def test_the_fast_way_gives_the_ids_of_the_library(one: str, two: str) -> None:
    for made in (BPE, gpt2()):
        assert made.fast is not None
        for text in (one, two):
            assert made.encode(text).tolist() == made.library.encode(text, add_special_tokens=False).ids


def test_gpt2s_files_load_by_any_of_their_names(tmp_path: Path) -> None:
    gpt2 = Tokenizer.load("gpt2")
    for ids, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        folder = tmp_path / ids
        folder.mkdir()
        shutil.copy(tokenizers.GPT2_FILES / "encoder.json", folder / ids)
        with pytest.raises(RequestError, match=r"vocab.bpe"):
            Tokenizer.load(folder)
        shutil.copy(tokenizers.GPT2_FILES / "vocab.bpe", folder / merges)
        assert {Tokenizer.load(place).hash for place in (folder, folder / ids, folder / merges)} == {gpt2.hash}


def test_a_tiktoken_file_gives_the_ids_of_the_tokenizer_it_was_made_from(tmp_path: Path) -> None:
    path = tmp_path / "some.tiktoken"
    for made in (Tokenizer.load("gpt2"), BPE):
        assert made.fast is not None
        ranks = made.fast._mergeable_ranks
        path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
        loaded = Tokenizer.load(path)
        assert (loaded.vocab_size, loaded.eot) == (made.vocab_size, made.eot)
        for text in (CORPUS_TEXT[:50_000], MESSY):
            assert loaded.encode(text).tolist() == made.encode(text).tolist()
    path.write_bytes(b"YWI= 0\nYQ== 1\n")
    with pytest.raises(Failure, match="damaged"):
        Tokenizer.load(path)


def test_other_tokenizer_files_are_read_and_written_whole(tmp_path: Path) -> None:
    """One in SentencePiece's manner, with no end-of-text token: a blank before the text, bytes for what it lacks."""
    library = Library(models.BPE(vocab={f"<0x{b:02X}>": b for b in range(256)} | {"▁": 256, "a": 257, "b": 258, "▁a": 259},
                                 merges=[("▁", "a")], byte_fallback=True, unk_token=None))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    library.save(str(tmp_path / "t.json"))
    made = Tokenizer.load(tmp_path / "t.json")
    assert (made.eot, made.vocab_size, made.cuttable, made.fast) == (260, 261, False, None)
    text = "a b é 東 ab"
    ids = made.encode(text).tolist()
    assert ids[:3] == [259, 256, 258]
    assert made.decode(ids) == "".join(made.stream(ids)) == text
    assert made.encode(f"a{EOT}", specials=True).tolist()[-1] == 260
    assert made.eot not in made.encode(f"a{EOT}").tolist()
    long = [Piece("a b " * 20, False), Piece("a b", True), Piece("b", True)]     # documents stay whole
    assert [p.text for p in stretch(iter(long), made.cuttable)] == ["a b " * 20 + "a b", "b"]


def test_merges_that_tiktoken_would_order_differently_are_left_to_the_library() -> None:
    library = tokenizers.byte_level_bpe(models.BPE(vocab=dict(tokenizers.ALPHABET) | {"bc": 257, "ab": 256},
                                                   merges=[("b", "c"), ("a", "b")]), tokenizers.GPT2_SPLIT)
    made = Tokenizer(library.to_str())
    assert made.fast is None
    assert made.encode("abc").tolist() == [97, 257]     # the first merge of the list, not the lowest id


def test_training_splits_as_gpt4_does() -> None:
    text = "in 12345678 the'LL do\n\n\n it " * 200
    made = tokenizers.train_bpe([text], len(text), 400)
    tokens = [b.decode() for b in made.bytes_of[:-1] if b.isascii()]
    assert all(len(t) <= 3 for t in tokens if t.isdigit())
    assert not any(c.isalpha() and c2.isdigit() for t in tokens for c, c2 in itertools.pairwise(t))
    assert "'LL" in tokens


def test_training_reads_a_bounded_part_spread_over_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "TRAINING_BYTES", 1 << 18)
    text = "early words here " * 40_000 + "later things there " * 40_000
    seen: list[int] = []
    real = tokenizers.Library.train_from_iterator
    monkeypatch.setattr(tokenizers.Library, "train_from_iterator", lambda self, it, trainer: real(
        self, (seen.append(len(t)) or t for t in it), trainer))      # type: ignore[func-returns-value]
    made = tokenizers.train_bpe([text], len(text), 350)
    assert sum(seen) < 3 << 17
    assert made.encode(" early").size == made.encode(" things").size == 1


def test_special_tokens_are_text_unless_asked_for() -> None:
    for made in (*ALL.values(), Tokenizer.load("gpt2")):
        ids = made.encode(f"a{EOT}b{EOT}", specials=True).tolist()
        assert ids.count(made.eot) == 2
        assert made.encode("ab", specials=True).tolist() == made.encode("ab").tolist()
        assert made.decode(ids) == f"a{EOT}b{EOT}"


def test_comparing(forge: Callable, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(MESSY * 20)
    rows = {row.name: row for row in tokenizers.compare(["bytes", "gpt2"], [MESSY * 20])}
    assert rows["bytes"].bytes_per_token == 1
    assert rows["gpt2"].bytes_per_token > 1.3
    assert all(row.round_trip for row in rows.values())
    assert forge("tokenizer", "train", "t.txt", "--out", "own.json", "--vocab-size", 300).code == 0
    got = forge("tokenizer", "compare", "t.txt", "--tokenizers", "bytes", "own.json")
    assert got.code == 0
    assert got.out.count("whole") == 2
    assert forge("tokenizer", "train", "t.txt", "--out", "own.json").code == 2
    assert "--out own.json" in forge("tokenizer", "train", "t.txt", "--out", "own.json").err
    assert forge("tokenizer", "train", "--out", "other.json").code == 2
    assert forge("tokenizer", "train", "t.txt", "--out", "x.json", "--vocab-size", 12).code == 2
    assert not Path("x.json").exists()
    assert "own.jsn" in forge("tokenizer", "compare", "t.txt", "--tokenizers", "own.jsn").err
