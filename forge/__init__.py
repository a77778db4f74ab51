"""Forge trains language models from scratch: raw text in, a model that writes out.

The public names are imported when they are first used; importing forge itself does no work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.config import Config as Config
    from forge.evaluation import evaluate as evaluate
    from forge.generate import Sampling as Sampling
    from forge.generate import complete as complete
    from forge.generate import load_model as load_model
    from forge.generate import sample as sample
    from forge.ops.attention import attention as attention
    from forge.presets import preset as preset
    from forge.training import train as train

__version__ = "0.1.0"

HOMES = {"Config": "forge.config", "Sampling": "forge.generate", "attention": "forge.ops.attention",
         "complete": "forge.generate", "evaluate": "forge.evaluation", "load_model": "forge.generate",
         "preset": "forge.presets", "sample": "forge.generate", "train": "forge.training"}
__all__ = [*HOMES]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'forge' has no attribute {name!r}; it has: {', '.join(HOMES)}")
    globals()[name] = value = getattr(import_module(HOMES[name]), name)
    return value
