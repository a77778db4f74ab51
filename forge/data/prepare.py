"""Documents -> token shards. A data folder: tokenizer.json, and train/ and valid/ with shards and an index.json each.

The text is read twice or three times (to count, to train a tokenizer, to encode) and never held as a whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from forge import tokenizer as tokenizers
from forge.config import DataConfig, Failure, RequestError, load_json
from forge.data import sources
from forge.data.sources import Piece
from forge.tokenizer import Tokenizer

CORPUS = Path(__file__).parent.parent / "corpus" / "tinyshakespeare.txt"
VALID_PART = 10                 # the last tenth
WHOLE_DOCUMENTS = 20            # from so many on the split falls between documents
SHARD_TOKENS = 1 << 27


def is_prepared(paths: tuple[str, ...]) -> bool:
    """Whether the text is one folder that `forge data prepare` made."""
    return len(paths) == 1 and (Path(paths[0]) / "train" / "index.json").is_file()


def prepare(config: DataConfig, out: Path, tokenizer: Tokenizer | None = None,
            say: Callable[[str], None] = print) -> Tokenizer:
    """Reads the text, splits it, makes the tokenizer unless one is given, and writes a data folder at `out`.

    `out` must not exist; nothing is left there when this fails. Raises RequestError for text that cannot be used.
    """
    if out.exists():
        raise RequestError(f"{out} exists; name another folder with --out, or remove it")
    skipped: Counter[str] = Counter()
    paths = config.text or (str(CORPUS),)
    found = sources.find(paths, skipped)
    try:
        valid_found = sources.find([config.valid], skipped) if config.valid else []
    except RequestError as error:
        raise RequestError(f"--data.valid: {error}") from error
    document_bytes = measure(found, config, skipped)
    valid_bytes = measure(valid_found, config, skipped) if config.valid else []
    total = sum(document_bytes)
    cut = (len(document_bytes), 0) if config.valid else split(document_bytes)
    for what, count in skipped.items():
        if count:
            say(f"data: {count} {what} left out")

    def part(name: str) -> Iterator[Piece]:
        if config.valid:
            return sources.read(valid_found if name == "valid" else found, config, Counter())
        return (piece for where, piece in divide(sources.read(found, config, Counter()), cut) if where == name)

    train_bytes = total if config.valid else sum(document_bytes[:cut[0]]) + cut[1]
    how = f"from {config.valid}" if config.valid else (
        "the last tenth" if cut[1] else f"the last {count_of(len(document_bytes) - cut[0], 'document')}")
    say(f"data: {count_of(len(document_bytes), 'document')}, {train_bytes:,} bytes to train on; validation: "
        f"{sum(valid_bytes) if config.valid else total - train_bytes:,} bytes, {how}")
    if tokenizer is None:
        tokenizer = make_tokenizer(config, part, train_bytes, say)

    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        tokenizer.save(partial / "tokenizer.json")
        for name in ("train", "valid"):
            index = write_shards(part(name), tokenizer, partial / name)
            if index["tokens"] < 2:     # the end-of-text token alone teaches and measures nothing
                raise RequestError(f"the text holds {total} bytes, too few to part {name}ing text from it; give more "
                                   "text, or name the validation text with --data.valid")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return tokenizer


def measure(found: list[sources.Source], config: DataConfig, skipped: Counter[str]) -> list[int]:
    """UTF-8 bytes of each document. Raises RequestError when there is none."""
    sizes, size = [], 0
    for text, ends in sources.read(found, config, skipped):
        size += len(text.encode("utf-8"))
        if ends:
            sizes.append(size)
            size = 0
    if not sizes:
        names = ", ".join(str(s.path) for s in found[:3])
        raise RequestError(f"{names}: no text there (empty, or white space only); name a file that holds text")
    return sizes


def split(document_bytes: list[int]) -> tuple[int, int]:
    """Where validation begins: (document, byte within it). The last tenth by bytes; with many documents, the boundary
    between two that is nearest to it, unless one document is so large that half the text would go.
    """
    total = sum(document_bytes)
    start = total * (VALID_PART - 1) // VALID_PART
    ends = list(itertools.accumulate(document_bytes))
    document = next(i for i, end in enumerate(ends) if end > start)
    begin = ends[document] - document_bytes[document]
    if len(document_bytes) >= WHOLE_DOCUMENTS:
        if ends[document] - start < start - begin and document + 1 < len(document_bytes):
            return document + 1, 0
        if begin * 2 > total:
            return document, 0
    return document, start - begin


def divide(pieces: Iterator[Piece], cut: tuple[int, int]) -> Iterator[tuple[str, Piece]]:
    """Each piece with the part it belongs to; a document that is cut ends in one part and begins in the other."""
    document, position = 0, 0
    for text, ends in pieces:
        size = len(text.encode("utf-8"))
        at = cut[1] - position
        if document == cut[0] and 0 < at < size:
            # not through a character: the first one whole at or after the byte
            head = text.encode("utf-8")[:at].decode("utf-8", errors="ignore")
            if head or position:
                yield "train", Piece(head, True)
            yield "valid", Piece(text[len(head):], ends)
        else:
            train = document < cut[0] or (document == cut[0] and at >= size)
            yield "train" if train else "valid", Piece(text, ends or (train and document == cut[0] and at == size))
        position += size
        if ends:
            document, position = document + 1, 0


def make_tokenizer(config: DataConfig, part: Callable[[str], Iterator[Piece]], train_bytes: int,
                   say: Callable[[str], None]) -> Tokenizer:
    """The tokenizer that the config names, or the one that fits the amount of text."""
    kind = config.tokenizer or ("chars" if not config.text else "bytes" if train_bytes < 1_000_000 else "bpe")
    texts = (piece.text for piece in part("train"))
    if kind == "chars":
        made = tokenizers.chars(set().union(*map(set, texts), *(set(piece.text) for piece in part("valid"))))
    elif kind == "bytes":
        made = tokenizers.byte_tokens()
    elif kind == "bpe":
        made = tokenizers.train_bpe(texts, train_bytes, config.bpe_vocab or tokenizers.bpe_vocab(train_bytes))
    else:
        made = Tokenizer.load(kind)
    say(f"tokenizer: {kind}, {made.vocab_size:,} tokens" + ("" if config.tokenizer else
        " (chosen by the amount of text; --data.tokenizer names another)"))
    return made


def write_shards(pieces: Iterator[Piece], tokenizer: Tokenizer, folder: Path) -> dict:
    """Encodes pieces into shard files, an end-of-text token after each document, and writes index.json last."""
    folder.mkdir()
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    shards: list[dict] = []
    counts = {"tokens": 0, "bytes": 0, "documents": 0}
    digest, file = hashlib.sha256(), None
    for ids, n_bytes, ends in encode(pieces, tokenizer):
        counts["bytes"] += n_bytes
        counts["documents"] += ends
        ids = np.append(ids, tokenizer.eot) if ends else ids
        while len(ids):
            if not shards or shards[-1]["tokens"] == SHARD_TOKENS:
                if file:
                    file.close()
                    shards[-1]["sha256"] = digest.hexdigest()
                shards.append({"file": f"shard_{len(shards):05d}.bin", "tokens": 0})
                digest, file = hashlib.sha256(), (folder / shards[-1]["file"]).open("wb")
            assert file
            here = ids[:SHARD_TOKENS - shards[-1]["tokens"]].astype(dtype).tobytes()
            file.write(here)
            digest.update(here)
            taken = len(here) // dtype.itemsize
            shards[-1]["tokens"] += taken
            counts["tokens"] += taken
            ids = ids[taken:]
    if file:
        file.close()
        shards[-1]["sha256"] = digest.hexdigest()
    index = {"format": 1, **counts, "dtype": dtype.str, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot,
             "tokenizer": tokenizer.hash, "shards": shards}
    (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return index


def encode(pieces: Iterator[Piece], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int, bool]]:
    """(ids, bytes, whether a document ends) in order, many pieces at a time; equal to encoding each document whole."""
    batch: list[Piece] = []
    size = 0
    for piece in stretch(pieces, tokenizer.cuttable):
        batch.append(piece)
        size += len(piece.text)
        if size >= 16 * tokenizers.PIECE:
            yield from encode_batch(batch, tokenizer)
            batch, size = [], 0
    yield from encode_batch(batch, tokenizer)


def encode_batch(batch: list[Piece], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int, bool]]:
    for ids, (text, ends) in zip(tokenizer.encode_all([piece.text for piece in batch]), batch):
        yield ids, len(text.encode("utf-8")), ends


def stretch(pieces: Iterator[Piece], cuttable: bool = True) -> Iterator[Piece]:
    """The documents cut anew, only where no token spans the cut: what follows the last such place is held back. Not
    cuttable: each document is held until it is whole."""
    held = ""
    for text, ends in pieces:
        held += text
        if not cuttable:
            if ends:
                yield Piece(held, True)
                held = ""
            continue
        parts = list(tokenizers.stretches([held], tokenizers.PIECE))
        held = "" if ends else parts.pop() if parts else ""
        for i, part in enumerate(parts):
            yield Piece(part, ends and i == len(parts) - 1)


def count_of(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def folder_of(run: Path) -> Path:
    """The data folder of a run: its own, or the prepared one that its config names. Raises Failure when it is gone."""
    own, text = run / "data", load_json(run / "config.json").data.text
    if own.is_dir() or not is_prepared(text):
        if not own.is_dir():
            raise Failure(f"{own} is gone, which held the run's tokens; put it back, or make it again of the same text: "
                          f"forge data prepare {' '.join(text) or 'TEXT'} --tokenizer {run / 'tokenizer.json'} --out {own}")
        return own
    return Path(text[0])


def tokenizer_of(run: Path) -> Tokenizer:
    """The tokenizer of a run. Raises Failure when its file is gone or damaged."""
    path, copy = run / "tokenizer.json", run / "data" / "tokenizer.json"
    try:
        return Tokenizer.load(path)
    except (RequestError, Failure) as error:
        raise Failure(f"{path} is gone or damaged; " + (f"put back its copy, {copy}" if copy.is_file() else
                                                        "put a whole one back")) from error
