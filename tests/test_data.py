from __future__ import annotations

import bz2
import gzip
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from forge import tokenizer as tokenizers
from forge.config import DataConfig, Failure, RequestError
from forge.data import prepare, sources
from forge.data.loader import Tokens, needs_mask, train_batch, valid_batches, windows_per_epoch


def documents(path: Path, **settings: object) -> list[str]:
    config, skipped = DataConfig(**settings), Counter()  # type: ignore[arg-type]
    texts, text = [], ""
    for piece, ends in sources.read(sources.find([str(path)], skipped), config, skipped):
        text += piece
        if ends:
            texts.append(text)
            text = ""
    assert text == ""
    return texts


PACKERS = {"": lambda b: b, ".gz": gzip.compress, ".bz2": bz2.compress}
LINES = b'{"text": "one"}\n\n{"text": "zw\xc3\xb6lf", "id": 3}\r\n{"text": "  "}\n\xef\xbb\xbf{"text": "last"}'


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("suffix", sources.READERS)
def test_every_reader_gives_known_documents(suffix: str, packed: str, tmp_path: Path) -> None:
    raw, known = (LINES, ["one", "zwölf", "last"]) if suffix == ".jsonl" else ("a\r\n é\n".encode(), ["a\r\n é\n"])
    path = tmp_path / f"x{suffix}{packed}"
    path.write_bytes(PACKERS[packed](raw))
    assert documents(path) == known


@pytest.mark.parametrize(("encoding", "text"), [("utf-8-sig", "é\ufeffb"), ("utf-16", "é🙂"), ("utf-32", "é🙂"),
                                                ("utf-8", "two\0nuls\0" + "x" * 500)])
def test_what_is_certain_is_decoded(encoding: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(text.encode(encoding))
    assert documents(tmp_path / "x.txt") == [text]


@pytest.mark.parametrize(("raw", "words"), [
    ("naïve".encode("latin-1"), ["0xEF", "offset 2", "ISO-8859-1", "iconv"]),
    ("a “quote”".encode("cp1252"), ["0x93", "offset 2", "WINDOWS-1252"]),
    (b"a" * (sources.CHUNK - 1) + "é".encode() + b"\xff", ["0xFF", f"offset {sources.CHUNK + 1}"]),
    ("hello there".encode("utf-16-be"), ["NUL", "UTF-16BE"]),
    ("hello there".encode("utf-16-le"), ["NUL", "UTF-16LE"]),
    (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1", ["0x89", "offset 0", "binary"]),
    (bytes(range(1, 9)) * 50, ["control characters", "binary"]),
    (b"\xff\xfea\0b", ["utf-16", "offset"]),
    (b"cut \xe2\x82", ["0xE2", "offset 4"]),
])
def test_what_is_not_certain_is_refused_with_its_place(raw: bytes, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(raw)
    with pytest.raises(RequestError) as error:
        documents(tmp_path / "x.txt")
    assert all(word in str(error.value) for word in ["x.txt", *words]), str(error.value)


@pytest.mark.parametrize(("line", "words"), [
    (b'{"text": "cut', ["not JSON"]), (b"[1]", ["list"]), (b'{"texts": "x"}', ["no field 'text'", "'texts'"]),
    (b'{"text": null}', ["null"]), (b'{"text": 3}', ["3"]), (b'{"text": "\xe9"}', ["0xE9", "offset 27"]),
    (b'{"text": "\\ud800"}', ["surrogate"]), (b'{"text": "a\x01"}', ["not JSON"]), (b"[" * 100_000, ["not JSON"]),
])
def test_a_bad_line_is_named_or_skipped(line: bytes, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "after"}\n')
    with pytest.raises(RequestError) as error:
        documents(tmp_path / "x.jsonl")
    assert all(word in str(error.value) for word in ["x.jsonl, line 2", "offset 17", "--data.skip-bad-lines", *words]
               ), str(error.value)
    assert documents(tmp_path / "x.jsonl", skip_bad_lines=True) == ["good", "after"]


def test_a_cut_off_archive_is_refused(tmp_path: Path) -> None:
    for name, packed in (("x.txt.gz", gzip.compress(b"text" * 999)), ("x.txt.bz2", bz2.compress(b"text" * 999))):
        (tmp_path / name).write_bytes(packed[:-9])
        with pytest.raises(RequestError, match=f"{name}.*cut off"):
            documents(tmp_path / name)
    (tmp_path / "y.txt.gz").write_bytes(b"this is no gzip")
    with pytest.raises(RequestError, match=r"y.txt.gz"):
        documents(tmp_path / "y.txt.gz")


def test_a_folder_is_walked_in_order_and_a_named_file_needs_no_suffix(tmp_path: Path) -> None:
    for name in ("b/2.md", "a.txt", ".hidden/x.txt", "b/1.jsonl", "b/photo.png", "README"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "json"}' if name.endswith("jsonl") else name)
    skipped: Counter[str] = Counter()
    assert [str(s.path.relative_to(tmp_path)) for s in sources.find([str(tmp_path)], skipped)] == [
        "a.txt", "b/1.jsonl", "b/2.md"]
    assert skipped["files of other kinds"] == 2
    assert documents(tmp_path / "README") == ["README"]


@pytest.mark.parametrize(("sizes", "cut"), [([100], (0, 90)), ([50, 50], (1, 40)), ([10] * 30, (27, 0)),
                                            ([1] * 18 + [1000], (18, 898)),
                                            ([1] * 19 + [1000], (19, 898)), ([1] * 19 + [1000, 1], (20, 0)),
                                            ([1000] + [1] * 19, (1, 0)), ([8] * 20, (18, 0)), ([9] * 25, (22, 0))])
def test_the_last_tenth_is_validation(sizes: list[int], cut: tuple[int, int]) -> None:
    assert prepare.split(sizes) == cut


def test_a_document_is_not_cut_through_a_character(tmp_path: Path) -> None:
    for text in ("é" * 100, "ab" + "東京" * 30, "x" * 9 + "🙂"):
        for size in (1, 3, 1000):
            pieces = [sources.Piece(text[i:i + size], i + size >= len(text)) for i in range(0, len(text), size)]
            parts: dict[str, str] = {"train": "", "valid": ""}
            ends = Counter()
            for where, piece in prepare.divide(iter(pieces), prepare.split([len(text.encode())])):
                parts[where] += piece.text
                ends[where] += piece.ends
            assert parts["train"] + parts["valid"] == text
            assert ends == {"train": 1, "valid": 1}
            assert abs(len(parts["train"].encode()) - len(text.encode()) * 9 // 10) < 4


def made(tmp_path: Path, texts: list[str], **settings: object) -> tuple[Path, tokenizers.Tokenizer]:
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    config = DataConfig(text=(str(tmp_path / "t.jsonl"),), **settings)  # type: ignore[arg-type]
    return tmp_path / "out", prepare.prepare(config, tmp_path / "out", say=lambda _: None)


def test_bundled_corpus_splits_as_its_figures_say(tmp_path: Path) -> None:
    tokenizer = prepare.prepare(DataConfig(), tmp_path / "out", say=lambda _: None)
    train, valid = (Tokens(tmp_path / "out" / part, tokenizer.hash) for part in ("train", "valid"))
    assert (train.bytes, valid.bytes, tokenizer.vocab_size) == (1_003_854, 111_540, 65 + 1)
    assert (len(train), len(valid)) == (1_003_855, 111_541)     # an end-of-text each


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe"])
def test_shards_hold_every_document(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 100)
    texts = [f"document {i} says {'ö' * i}" for i in range(40)]
    out, tokenizer = made(tmp_path, texts, tokenizer=kind)
    tokens = [Tokens(out / part, tokenizer.hash) for part in ("train", "valid")]
    assert len(tokens[0].shards) >= 3
    ids = [i for part in tokens for i in part.read(0, len(part)).tolist()]
    assert "".join("|" if i == tokenizer.eot else tokenizer.decode([i]) if kind != "bytes" else chr(i) for i in ids
                   ).count("|") == 40
    assert tokenizer.decode(i for i in ids if i != tokenizer.eot) == "".join(texts)
    assert sum(part.bytes for part in tokens) == sum(len(t.encode()) for t in texts)
    assert tokens[1].documents == sum(1 for _ in texts) - tokens[0].documents


def test_the_order_is_a_pure_function_and_an_epoch_takes_each_window_once(tmp_path: Path) -> None:
    out, tokenizer = made(tmp_path, ["".join(map(chr, range(33, 127))) * 3])
    tokens = Tokens(out / "train", tokenizer.hash)
    T, n = 8, windows_per_epoch(tokens, 8)
    whole = train_batch(tokens, T, 5, 0, 2 * n, False).inputs
    parts = [train_batch(tokens, T, 5, i, 1, False).inputs for i in (2 * n - 1, 3, n)]
    assert all((part == whole[i]).all() for part, i in zip(parts, (2 * n - 1, 3, n)))
    ring = Counter(tokens.read(0, len(tokens)).tolist())
    for epoch in (whole[:n], whole[n:]):
        seen = Counter(epoch.flatten().tolist())
        assert sum((ring - seen).values()) == len(tokens) - n * T       # the few that do not fill a window
        assert not seen - ring
    assert not (whole[:n] == whole[n:]).all()
    assert not (whole[:n] == train_batch(tokens, T, 6, 0, n, False).inputs).all()


def test_targets_follow_inputs_and_starts_part_documents(tmp_path: Path) -> None:
    out, tokenizer = made(tmp_path, [chr(97 + i) * 5 for i in range(26)], tokenizer="bytes")
    tokens = Tokens(out / "train", tokenizer.hash)
    batch = train_batch(tokens, 16, 1, 0, 4, needs_mask(tokens, 16))
    assert (batch.inputs[:, 1:] == batch.targets[:, :-1]).all()
    assert batch.starts is not None
    for inputs, starts in zip(batch.inputs.tolist(), batch.starts.tolist()):
        for i, start in enumerate(starts):
            assert tokenizer.eot not in inputs[start + 1:i + 1]
            assert start == 0 or inputs[start] == tokenizer.eot


@pytest.mark.parametrize("seq_len", [1, 7, 64, 1000])
def test_validation_counts_every_token_once(seq_len: int, tmp_path: Path) -> None:
    out, tokenizer = made(tmp_path, ["some words to validate on"] * 30, tokenizer="bytes")
    tokens = Tokens(out / "valid", tokenizer.hash)
    batches = list(valid_batches(tokens, seq_len, 4))
    targets = np.concatenate([b.targets.numpy() for b in batches])
    assert targets[targets >= 0].tolist() == tokens.read(0, len(tokens)).tolist()
    assert batches[0].inputs[0, 0] == tokenizer.eot


def test_a_text_shorter_than_a_window_is_copied_into_it(tmp_path: Path) -> None:
    out, tokenizer = made(tmp_path, ["short text"], tokenizer="bytes")
    tokens = Tokens(out / "train", tokenizer.hash)
    batch = train_batch(tokens, 64, 1, 0, 2, needs_mask(tokens, 64))
    assert batch.inputs.shape == (2, 64)
    assert batch.starts is not None
    assert (batch.starts > 0).any()


def test_data_of_another_tokenizer_or_damaged_is_refused(tmp_path: Path) -> None:
    out, tokenizer = made(tmp_path, ["text"] * 30, tokenizer="bytes")
    with pytest.raises(RequestError, match="another tokenizer"):
        Tokens(out / "train", tokenizers.chars("abc").hash)
    shard = out / "train" / "shard_00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(Failure, match="damaged"):
        Tokens(out / "train", tokenizer.hash)
    (out / "train" / "index.json").write_text("{")
    with pytest.raises(Failure, match="damaged"):
        Tokens(out / "train", tokenizer.hash)


def test_no_text_leaves_nothing_behind(tmp_path: Path) -> None:
    for name, raw in (("empty.txt", b""), ("blank.txt", b" \n\t\n"), ("one.txt", b"x")):
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(RequestError, match=r"no text|too few"):
            prepare.prepare(DataConfig(text=(str(tmp_path / name),)), tmp_path / "out", say=lambda _: None)
        assert not [p for p in tmp_path.iterdir() if "out" in p.name]


def test_a_bpe_is_trained_on_the_training_part_alone(tmp_path: Path) -> None:
    random_ = random.Random(1)
    texts = ["".join(random_.choices("abcd ", k=400)) for _ in range(27)] + ["zyzyzyzyzyzy " * 30] * 3
    _, tokenizer = made(tmp_path, texts, tokenizer="bpe")
    assert not any(b"zy" in token for token in tokenizer.bytes_of)
    assert any(b"ab" in token for token in tokenizer.bytes_of)
