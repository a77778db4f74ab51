"""The arrows of the architecture go one way, and importing does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import forge

ROOT = Path(forge.__file__).parent
# a module may import those before it; within one entry, files may import each other but not in a circle
LAYERS = (("config",), ("memory",), ("presets", "tokenizer", "machine", "ops", "checkpoint", "metrics",
           "graph"),
          ("data", "model", "optim"), ("plan",), ("choices", "generate", "guard"), ("tasks",), ("evaluation",),
          ("training", "view"), ("bench", "bench_attention", "doctor"), ("cli",))
NEVER = {("data", "model"), ("model", "machine"), ("model", "checkpoint"), ("checkpoint", "ops"), ("ops", "presets")}


def imports() -> dict[str, set[str]]:
    """{module: the modules of forge that it imports, inside functions too, but not for type checking alone}."""
    found = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(("forge", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                node.body = []
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: relative import"
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        found[name] = {n for n in names if n.startswith("forge.")}
    modules = set(found)
    return {name: {m for n in names for m in (n, n.rpartition(".")[0]) if m in modules and m not in ("forge", name)}
            for name, names in found.items()}


def part(module: str) -> str:
    return module.split(".")[1]


def test_arrows_go_one_way() -> None:
    rank = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    edges = imports()
    assert len(edges) > 15
    for module, targets in edges.items():
        if module == "forge":
            continue
        for target in targets:
            if part(target) != part(module):
                assert rank[part(target)] < rank[part(module)], f"{module} imports {target}"
                assert (part(module), part(target)) not in NEVER, f"{module} imports {target}"


def test_no_circles() -> None:
    edges = imports()
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for target in edges[module]:
                visit(target, (*above, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_importing_forge_and_its_help_need_no_torch() -> None:
    code = "import sys, forge, forge.cli; forge.cli.main(['--help']); sys.exit('torch' in sys.modules)"
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert time.monotonic() - began < 5     # RESULTS.md has the figure; this catches a second library of torch's size


def test_public_names() -> None:
    assert sorted(forge.__all__) == ["Config", "Sampling", "attention", "complete", "evaluate", "load_model",
                                       "preset", "sample", "train"]
    assert all(callable(getattr(forge, name)) for name in forge.__all__)
