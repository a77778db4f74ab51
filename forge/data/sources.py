"""Paths -> documents. A document arrives in pieces of text, so that one of a gigabyte needs no gigabyte of memory.

Text is taken as it is: no line end, blank or character is changed; only a byte-order mark at the start is dropped.
What is certain is decoded (UTF-8; UTF-16 and UTF-32 with a byte-order mark), what is not is refused with its place.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from forge.config import DataConfig, RequestError

CHUNK = 1 << 20     # bytes read at once


class Piece(NamedTuple):
    text: str
    ends: bool      # the document ends with this piece


class Source(NamedTuple):
    path: Path
    reader: str     # a key of READERS
    opener: str     # a key of OPENERS


BOMS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF8, "utf-8-sig"),
        (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def read_text(stream: IO[bytes], path: Path, config: DataConfig, skipped: Counter[str]) -> Iterator[Piece]:
    """A plain text file is one document. Nothing comes from one that holds only white space."""
    chunk = stream.read(CHUNK)
    encoding = next((name for bom, name in BOMS if chunk.startswith(bom)), "utf-8")
    decoder = codecs.getincrementaldecoder(encoding)(errors="strict")
    position, held, blank = 0, "", True
    while chunk:
        position += len(chunk)
        following = stream.read(CHUNK)
        try:
            text = decoder.decode(chunk, final=not following)
        except UnicodeDecodeError as error:
            refuse_bytes(path, encoding, error, position - len(error.object) + error.start)
        refuse_binary(path, text)
        if blank and (not text or text.isspace()):
            held += text
        elif text:
            if not blank:
                yield Piece(held, False)
                held = ""
            held, blank = held + text, False
        chunk = following
    if blank:
        skipped["blank documents"] += 1
    else:
        yield Piece(held, True)


def read_jsonl(stream: IO[bytes], path: Path, config: DataConfig, skipped: Counter[str]) -> Iterator[Piece]:
    """One JSON object a line; a document is the text in its field. Blank lines and blank texts hold no document."""
    offset = 0
    for number, line in enumerate(stream, 1):
        fault = ""
        text: Any = ""
        try:
            record = json.loads(line.decode("utf-8").lstrip("\ufeff")) if line.strip() else None
            if isinstance(record, dict):
                text = record.get(config.text_field)
                if config.text_field not in record:
                    fault = f"no field {config.text_field!r} (it has: {', '.join(map(repr, list(record)[:8]))})"
                elif not isinstance(text, str):
                    fault = f"field {config.text_field!r} is {json.dumps(text)[:20]}, not a text"
                else:
                    text.encode("utf-8")
            elif line.strip():
                fault = f"a JSON {type(record).__name__}, not an object"
        except UnicodeDecodeError as error:
            fault = f"byte 0x{line[error.start]:02X} at offset {offset + error.start} is not UTF-8"
        except UnicodeEncodeError:
            fault = "half a surrogate pair, which is no character"
        except (json.JSONDecodeError, RecursionError) as error:
            fault = f"not JSON ({getattr(error, 'msg', 'nested too deeply')}, at character {getattr(error, 'colno', 1)})"
        if fault:
            if not config.skip_bad_lines:
                raise RequestError(f"{path}, line {number} (byte offset {offset}): {fault}. Mend the line, name the "
                                   "field with --data.text-field, or leave such lines out with --data.skip-bad-lines")
            skipped["bad lines"] += 1
        elif text and not text.isspace():
            yield Piece(text, True)
        elif line.strip():
            skipped["blank documents"] += 1
        offset += len(line)


def refuse_bytes(path: Path, encoding: str, error: UnicodeDecodeError, offset: int) -> None:
    byte = error.object[error.start]
    if encoding.startswith("utf-8"):
        guess = "WINDOWS-1252" if any(0x80 <= b < 0xA0 for b in error.object) else "ISO-8859-1"
        if b"\0" in error.object[:4096]:
            advice = "it looks like a binary file; forge reads text"
        else:
            advice = f"if it is text in {guess}, type: iconv -f {guess} -t UTF-8 {path.name} > utf8-{path.name}"
        raise RequestError(f"{path}: byte 0x{byte:02X} at offset {offset} is not UTF-8; {advice}") from error
    raise RequestError(f"{path}: its byte-order mark says {encoding}, but the bytes at offset {offset} are none; "
                       "save it as UTF-8") from error


def refuse_binary(path: Path, text: str) -> None:
    """A few control characters occur in real text; one in a hundred does not."""
    nuls = text.count("\0")
    controls = nuls + sum(text.count(chr(c)) for c in (*range(1, 9), *range(14, 27), *range(28, 32)))
    if controls * 100 > len(text):
        if nuls * 4 > len(text):
            order = "UTF-16BE" if text[:1] == "\0" else "UTF-16LE"
            raise RequestError(f"{path}: every second byte is NUL, as in UTF-16 without a byte-order mark; if it is, "
                               f"type: iconv -f {order} -t UTF-8 {path.name} > utf8-{path.name}")
        raise RequestError(f"{path}: {controls} of {len(text)} characters are control characters: a binary file; "
                           "forge reads text (.txt, .md, .jsonl, each also in .gz and .bz2)")


Reader = Callable[[IO[bytes], Path, DataConfig, "Counter[str]"], Iterator[Piece]]
READERS: dict[str, Reader] = {".txt": read_text, ".md": read_text, ".jsonl": read_jsonl}
OPENERS: dict[str, Callable[[Path], Any]] = {"": lambda path: path.open("rb"), ".gz": gzip.open, ".bz2": bz2.open}


def find(paths: tuple[str, ...] | list[str], skipped: Counter[str]) -> list[Source]:
    """The files under the given paths, folders walked in name order, hidden ones left out.

    A file that is named is read as text when its suffix says nothing; in a folder only known suffixes are read.
    Raises RequestError for a path that is missing, no file, or a folder with nothing to read.
    """
    sources = []
    for name in paths:
        path = Path(name)
        if (path / "train" / "index.json").is_file():
            raise RequestError(f"{path} holds tokens that `forge data prepare` made; train on it alone, without other text")
        if path.is_dir():
            below = [p for p in sorted(path.rglob("*"))
                     if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)]
            found = [s for p in below if (s := known(p))]
            skipped["files of other kinds"] += len(below) - len(found)
            if not found:
                kinds = ", ".join(sorted({p.suffix or p.name for p in below})[:8]) or "nothing"
                raise RequestError(f"{path}: this folder holds no text to read (it has: {kinds}); forge reads "
                                   f"{', '.join(READERS)}, each also in .gz and .bz2")
            sources += found
        elif path.is_file():
            opener = path.suffix if path.suffix in OPENERS else ""
            sources.append(known(path) or Source(path, ".txt", opener))
        elif path.exists():
            raise RequestError(f"{path} is neither a file nor a folder; name a file of text")
        else:
            raise RequestError(f"{path}: no such file or folder; name a file or folder of text")
    return sources


def known(path: Path) -> Source | None:
    opener = path.suffix.lower() if path.suffix.lower() in OPENERS else ""
    reader = Path(path.stem).suffix.lower() if opener else path.suffix.lower()
    return Source(path, reader, opener) if reader in READERS else None


def read(sources: list[Source], config: DataConfig, skipped: Counter[str]) -> Iterator[Piece]:
    """The documents of the sources in order. Raises RequestError for what cannot be read, naming file and place."""
    for path, reader, opener in sources:
        try:
            with OPENERS[opener](path) as stream:
                yield from READERS[reader](cast("IO[bytes]", stream), path, config, skipped)
        except (EOFError, zlib.error) as error:
            raise RequestError(f"{path}: the compressed stream is cut off or damaged ({error}); fetch it again, or "
                               "unpack what can be had and name that") from error
        except OSError as error:
            raise RequestError(f"{path}: {error.strerror or error}; it cannot be read") from error
