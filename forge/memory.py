"""What was measured once on this machine, kept in a file of the user's cache."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from forge.config import parse_json


def processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def memory_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forge" / "measured.json"


Found = TypeVar("Found", float, str)


class Memory:
    """What was measured once on this machine in one circumstance (a text): memory(name, measure) measures what it does not
    know yet, a number or a text. So two runs of one seed choose alike."""

    def __init__(self, circumstance: str) -> None:
        self.path, self.circumstance = memory_path(), circumstance

    def read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """All that is known, and the part of this circumstance; nothing when the file is missing or damaged."""
        try:
            known = parse_json(self.path.read_bytes())
            return known, dict(known.get(self.circumstance, {}))
        except (OSError, ValueError, TypeError, AttributeError):
            return {}, {}

    def __call__(self, name: str, measure: Callable[[], Found]) -> Found:
        _, here = self.read()
        if isinstance(here.get(name), float | str):
            return here[name]
        value = measure()
        known, here = self.read()       # another run may have written meanwhile
        known[self.circumstance] = here | {name: value}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            partial.write_text(json.dumps(known, indent=1) + "\n")
            partial.replace(self.path)
        except OSError:
            pass        # a home that cannot be written: measured again next time
        return value
