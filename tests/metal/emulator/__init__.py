"""Metal kernels on a CPU, for the tests: `compile_shader` has the call surface of torch.mps.compile_shader, and its kernels
take CPU tensors.

The text is compiled as it stands, by clang, against headers that say in C++ what Metal's standard library says
(include/metal_stdlib); runtime.cpp runs the threads of a grid as fibers. What a GPU would let pass is an error here: threads
that do not meet at one barrier, a write outside of a buffer, more than 32 KiB of threadgroup memory. Threadgroup memory and
registers of matrices begin as no numbers. `schedule(seed)` shuffles the order of groups and threads; `sanitize` runs one
launch under the thread or the address sanitizer.

Left out: textures, function constants and [[threadgroup(n)]] (torch cannot pass them), atomics, simdgroups in divergent
control flow.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).parent
GUARD = 4096                # bytes on either side of a buffer that must stay as they are
MOST_BUFFERS, MOST_THREADS, SIMD_WIDTH = 31, 1024, 32
FLAGS = ("-std=c++17 -O1 -fPIC -ffp-contract=off -Wno-unknown-attributes -Wno-ignored-attributes -Wno-unknown-pragmas "
         "-Wpre-c++17-compat -Werror=pre-c++17-compat -Xclang -cl-single-precision-constant -D__METAL_VERSION__=310 "
         "-Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none").split()
SEED = 0                    # of the schedule; 0: as numbered
BUILTINS = {name: f"msl::Three{{t.{field}}}" for name, field in (
    ("thread_position_in_grid", "in_grid"), ("thread_position_in_threadgroup", "in_group"),
    ("threadgroup_position_in_grid", "group"), ("threads_per_threadgroup", "group_size"),
    ("threadgroups_per_grid", "groups"), ("threads_per_grid", "grid"))} | {
    "thread_index_in_threadgroup": "t.index", "thread_index_in_simdgroup": "t.lane",
    "simdgroup_index_in_threadgroup": "t.simdgroup", "simdgroups_per_threadgroup": "t.simdgroups",
    "threads_per_simdgroup": "32u"}

INSTANCE = re.compile(r'template\s*\[\[\s*host_name\("(\w+)"\)\s*\]\]\s*(?:\[\[\s*kernel\s*\]\]|kernel)\s*([^;]*);')
THREADGROUP = re.compile(r"^(\s*)threadgroup\s+([\w:<>, ]+?)\s+(\w+)\s*((?:\[[^\]]*\])*)\s*;", re.M)
KERNEL = re.compile(r"(?:\[\[\s*kernel\s*((?:,[^\]]*)?)\]\]|\bkernel\b)\s*(?:\[\[([^\]]*)\]\]\s*)?void\s+(\w+)\s*\(")


@contextmanager
def schedule(seed: int) -> Iterator[None]:
    """While it holds, groups and threads run in an order drawn from the seed."""
    global SEED
    SEED, before = seed, SEED
    try:
        yield
    finally:
        SEED = before


@functools.cache
def compiler() -> tuple[str, ...]:
    """The command of a clang that knows bfloat arithmetic: one on the path from 18 on, or that of the wheel ziglang."""
    for name in (*(f"clang-{n}" for n in range(23, 17, -1)), "clang"):
        if path := shutil.which(name):
            said = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, check=True).stdout
            if int(said.split(".")[0]) >= 18:
                return (path, "--driver-mode=g++", *(["-march=x86-64-v3"] if has_avx2() else []))
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++", *(["-march=x86_64_v3"] if has_avx2() else []))
    raise RuntimeError("the Metal emulator needs clang 18 or newer: pip install ziglang, or apt-get install clang-19")


def has_avx2() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and " avx2 " in info.read_text()


class Compiled(NamedTuple):
    path: Path
    names: list[str]


# --- from Metal's text to C++

def expand(source: str) -> str:
    """The text with its own macros expanded, line markers in it; Metal's headers are left out."""
    with tempfile.TemporaryDirectory() as stubs:
        for name in ("metal_stdlib", "metal_simdgroup", "metal_simdgroup_matrix", "metal_math", "metal_atomic"):
            Path(stubs, name).touch()
        flags = ["-E", "-x", "c++", "-std=c++17", "-D__METAL_VERSION__=310", "-nostdinc", "-isystem", stubs,
                 "-I", Path(torch.__file__).parent / "include"]
        done = subprocess.run([*compiler(), *flags, "-"], input=source, capture_output=True, text=True)
    if done.returncode:
        raise SyntaxError(done.stderr)
    return done.stdout.replace("<stdin>", "kernels.metal")


def balanced(text: str, at: int) -> int:
    """Where the bracket that opens at `at` is closed."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if not depth:
            return i
    raise SyntaxError("a bracket is not closed")


def split_commas(text: str) -> list[str]:
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{<") - (c in ")]}>")
        parts[-1] += c if c != "," or depth else ""
        if c == "," and not depth:
            parts.append("")
    return [part for part in parts if part.strip()]


def without_markers(text: str) -> str:
    return re.sub(r"^#.*$", "", text, flags=re.M)


def argument(parameter: str) -> str:
    """What the launcher passes for one parameter of a kernel."""
    found = re.search(r"\[\[\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*\]\]", parameter)
    if found is None:
        raise SyntaxError(f"parameter {parameter.strip()!r} has no attribute that says what it is")
    name, number = found.groups()
    if name == "buffer":
        if int(number) >= MOST_BUFFERS:
            raise SyntaxError(f"buffer({number}): Metal has {MOST_BUFFERS}, from 0")
        return f"msl::{'Reference' if '&' in parameter else 'Pointer'}{{b[{number}]}}"
    if name not in BUILTINS:
        raise SyntaxError(f"[[{name}]]: not to be had through torch.mps.compile_shader, or not emulated")
    return BUILTINS[name]


def translate(source: str) -> tuple[str, list[str]]:
    """C++ and the kernels' names."""
    text = expand(source)
    if "function_constant" in text:
        raise SyntaxError("[[function_constant]]: torch.mps.compile_shader cannot set one")
    instances: dict[str, str] = {}

    def instance(found: re.Match) -> str:
        rest = found[2].strip()
        if rest.startswith("decltype"):
            rest = rest[balanced(rest, rest.index("(")) + 1:].strip()
        else:
            rest = re.sub(r"^void\s+", "", rest[:rest.rindex("(")] if rest.endswith(")") else rest).strip()
        instances[found[1]] = rest
        return "\n" * found[0].count("\n")

    text = INSTANCE.sub(instance, text)
    text = THREADGROUP.sub(r"\1MSL_THREADGROUP(\2, \3, \4);", text)
    parameters, most = {}, {}
    for found in KERNEL.finditer(text):
        name, open_ = found[3], found.end() - 1
        parameters[name] = split_commas(without_markers(text[open_ + 1:balanced(text, open_)]))
        limit = re.search(r"max_total_threads_per_threadgroup\((\d+)\)", (found[1] or "") + (found[2] or ""))
        most[name] = int(limit[1]) if limit else MOST_THREADS
        before = text[:found.start()].rstrip()
        if not before.endswith(">"):
            instances.setdefault(name, name)
    launchers, table = [], []
    for i, (name, function) in enumerate(instances.items()):
        base = function.split("<")[0].strip().split("::")[-1]
        if base not in parameters:
            raise SyntaxError(f"{name} is an instance of {base}, which is no kernel of this text")
        launchers.append(f"static void msl_run_{i}(void** b, const msl_thread& t) {{ auto f = &{function}; "
                         f"f({', '.join(map(argument, parameters[base]))}); }}")
        table.append(f'{{"{name}", msl_run_{i}, {most[base]}}}')
    return "\n".join(["#include <metal_stdlib>", text, '#line 1 "launchers"', *launchers,
                      f'extern "C" {{ extern const msl_kernel msl_kernels[] = {{{", ".join(table)}}}; '
                      f"extern const int msl_kernel_count = {len(table)}; }}\n"]), list(instances)


def folder() -> Path:
    path = Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()) / f"forge-metal-emulator-{os.getuid()}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def build(source: str, sanitizer: str = "") -> Compiled:
    """The library (the program, with a sanitizer) of a text, compiled once. Raises SyntaxError with clang's words."""
    try:
        source.encode("ascii")
    except UnicodeEncodeError as error:
        raise RuntimeError(f"Metal's text must be ASCII: {error}") from error
    text, names = translate(source)
    key = hashlib.sha256("\0".join([text, sanitizer, *map(str, compiler()), *FLAGS, *(
        path.read_text() for path in (HERE / "include/metal_stdlib", HERE / "runtime.cpp"))]).encode()).hexdigest()[:24]
    path = folder() / f"{key}{'' if sanitizer else '.so'}"
    if path.exists():
        return Compiled(path, names)
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        made, objects = Path(scratch, "made"), [Path(scratch, "kernels.o"), Path(scratch, "runtime.o")]
        Path(scratch, "kernels.cpp").write_text(text)
        checked = ["-g", f"-fsanitize={sanitizer}"] if sanitizer else []
        runtime = ["-std=c++17", "-O2", "-fPIC", "-fno-builtin", *(["-DMSL_MAIN"] if sanitizer else []),
                   f"-DTSAN={int(sanitizer == 'thread')}", f"-DASAN={int(sanitizer == 'address')}"]
        run([*FLAGS, *checked, *(["-DMSL_NO_AS"] if sanitizer else []), "-isystem", HERE / "include", "-c",
             Path(scratch, "kernels.cpp"), "-o", objects[0]], SyntaxError)
        run([*runtime, "-c", HERE / "runtime.cpp", "-o", objects[1]], RuntimeError)
        run([*(checked or ["-shared", "-nostdlib++"]), *objects, "-lm", "-o", made], RuntimeError)
        made.replace(path)
    return Compiled(path, names)


def run(arguments: Sequence[Any], failure: type[Exception]) -> None:
    done = subprocess.run([*compiler(), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise failure(done.stderr)


# --- torch's call surface

CASTS = {"fp16": "e", "int32": "i", "int16": "h", "int8": "b", "uint8": "B"}


def packed(values: Sequence[Any], cast: str | None) -> bytes:
    if not values:
        raise RuntimeError("an empty list is no argument of a kernel")
    if cast == "bf16":
        return torch.tensor(values, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    form = CASTS[cast] if cast else "f" if isinstance(values[0], float) else "q"
    return struct.pack(f"<{len(values)}{form}", *values)


class Buffer(NamedTuple):
    """What a launch passes at one index: bytes, and the tensor that they go back to."""

    data: bytes
    tensor: torch.Tensor | None = None


def as_buffer(value: Any, cast: str | None) -> Buffer:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise RuntimeError(f"the emulator takes CPU tensors, not one on {value.device}")
        return Buffer(bytes(memory(value)), value)
    if isinstance(value, bool | int | float):
        value = [value]
    if isinstance(value, list | tuple) and all(isinstance(x, bool | int | float) for x in value):
        return Buffer(packed(value, cast))
    raise TypeError(f"a kernel takes tensors, numbers and lists of numbers, not {type(value).__name__}")


def memory(x: torch.Tensor) -> Any:
    """The bytes from a tensor's first element to its last; strides are for the kernel to know."""
    elements = 0 if 0 in x.shape else 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return (ctypes.c_char * (elements * x.element_size())).from_address(x.data_ptr() or ctypes.addressof(NOTHING))


NOTHING = ctypes.create_string_buffer(16)


def three(value: int | Sequence[int] | None, otherwise: int) -> list[int]:
    given = [otherwise] if value is None else [value] if isinstance(value, int) else list(value)
    if not 1 <= len(given) <= 3 or min(given) < 1:
        raise ValueError(f"threads and group_size are 1 to 3 positive numbers, not {value}")
    return [*given, 1, 1][:3]


class Kernel:
    thread_execution_width = SIMD_WIDTH

    def __init__(self, library: Library, index: int, most: int) -> None:
        self.library, self.index, self.max_threads_per_threadgroup = library, index, most

    def __call__(self, *args: Any, threads: Any = None, group_size: Any = None, arg_casts: Any = None) -> None:
        buffers, all_threads, group = self.arguments(args, threads, group_size, arg_casts)
        padded = [ctypes.create_string_buffer(b"\xff" * GUARD + buffer.data + b"\xff" * GUARD, len(buffer.data) + 2 * GUARD)
                  for buffer in buffers]
        pointers = (ctypes.c_void_p * max(1, len(padded)))(*(ctypes.addressof(one) + GUARD for one in padded))
        message = ctypes.create_string_buffer(1024)
        failed = self.library.launch(self.index, pointers, (ctypes.c_uint * 3)(*all_threads), (ctypes.c_uint * 3)(*group),
                                     ctypes.c_uint64(SEED), message, 1024)
        if failed:
            raise RuntimeError(message.value.decode())
        for i, (buffer, one) in enumerate(zip(buffers, padded)):
            new, size = one.raw, len(buffer.data)
            for what, guard in (("before", new[:GUARD]), ("after", new[GUARD + size:GUARD + size + GUARD])):
                if guard != b"\xff" * GUARD:
                    raise RuntimeError(f"buffer {i}: the kernel wrote {what} it")
            if new[GUARD:GUARD + size] == buffer.data:
                continue
            if buffer.tensor is None:
                raise RuntimeError(f"buffer {i}: the kernel wrote into a constant")
            memory(buffer.tensor)[:] = new[GUARD:GUARD + size]

    def arguments(self, args: Sequence[Any], threads: Any, group_size: Any, arg_casts: Any
                  ) -> tuple[list[Buffer], list[int], list[int]]:
        if len(args) > MOST_BUFFERS:
            raise RuntimeError(f"{len(args)} arguments: Metal has {MOST_BUFFERS} buffers")
        casts = dict.fromkeys(range(len(args)), arg_casts) if isinstance(arg_casts, str) else arg_casts or {}
        buffers = [as_buffer(value, casts.get(i)) for i, value in enumerate(args)]
        first = next((x for x in args if isinstance(x, torch.Tensor)), None)
        all_threads = three(threads, first.numel() if first is not None else 1)
        group = three(group_size, min(self.max_threads_per_threadgroup, all_threads[0]))
        if math.prod(group) > self.max_threads_per_threadgroup:
            raise ValueError(f"a group of {math.prod(group)} threads: {self.max_threads_per_threadgroup} is the most here")
        return buffers, all_threads, group


class Library:
    def __init__(self, made: Compiled) -> None:
        self.launch = ctypes.CDLL(str(made.path)).msl_launch
        self.names = made.names
        table = ctypes.c_char.in_dll(ctypes.CDLL(str(made.path)), "msl_kernels")
        entries = (ctypes.c_uint64 * (3 * len(made.names))).from_address(ctypes.addressof(table))
        self.most = [entries[3 * i + 2] & 0xffffffff for i in range(len(made.names))]

    def __getattr__(self, name: str) -> Kernel:
        if name not in self.names:
            raise RuntimeError(f"the library has no kernel {name!r}; it has {', '.join(self.names)}")
        index = self.names.index(name)
        return Kernel(self, index, self.most[index])

    def __dir__(self) -> list[str]:
        return self.names


def compile_shader(source: str) -> Library:
    """Raises SyntaxError for what is no Metal, RuntimeError for text that is not ASCII."""
    return Library(build(source))


def sanitize(source: str, name: str, *args: Any, sanitizer: str, threads: Any = None, group_size: Any = None,
             arg_casts: Any = None) -> str:
    """One launch in a process of its own under the sanitizer `thread` or `address`: what it reports, "" for nothing. The
    tensors are left as they are."""
    made = build(source, sanitizer)
    index = made.names.index(name)
    buffers, all_threads, group = Kernel(None, index, MOST_THREADS).arguments(      # type: ignore[arg-type]
        args, threads, group_size, arg_casts)
    with tempfile.TemporaryDirectory() as scratch:
        job = Path(scratch, "job")
        job.write_bytes(struct.pack("<9Q", index, *all_threads, *group, SEED, len(buffers)) + b"".join(
            struct.pack("<Q", len(buffer.data)) + buffer.data for buffer in buffers))
        fixed = ["setarch", "-R"] if shutil.which("setarch") else []        # both want an address space that is not shuffled
        done = subprocess.run([*fixed, made.path, job], capture_output=True, text=True, env={
            **os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66", "ASAN_OPTIONS": "detect_leaks=0"})
    return done.stderr if done.returncode else ""
