"""Metal kernels on a CPU, for the tests: `compile_shader` has the call surface of torch.mps.compile_shader, and its kernels
take CPU tensors.

    library = compile_shader(source)
    library.scale(x, y, 2.0, threads=x.numel(), group_size=64)      # y is written, as on a GPU
    with schedule(seed=3):                                          # groups and threads in an order drawn from the seed
        library.scale(x, y, 2.0, threads=x.numel(), group_size=64)
    checked = compile_shader(source, sanitizer="thread")            # or "address": each launch in a process of its own,
    checked.scale(x, y, 2.0, threads=x.numel(), group_size=64)      # what it finds is raised as RuntimeError

The text is compiled as it stands, by clang, against a header that says in C++ what Metal's standard library says
(include/metal_stdlib); runtime.cpp runs the threads of a grid as fibers. What a GPU would let pass is an error here: a
pointer of another address space, threads that do not meet at one barrier, a write outside of a buffer, more than 32 KiB of
threadgroup memory, C++ after C++14. Threadgroup memory, registers of matrices, and what is read outside of a buffer, are no
numbers.

A clang of 18 or newer on the path is taken, or that of the wheel `ziglang`; the sanitizers need clang and its runtime
(Debian: clang-19 and libclang-rt-19-dev). What was compiled is kept in the temporary folder.

Left out: textures, function constants and [[threadgroup(n)]] (torch cannot pass them), operations of a simdgroup in
divergent control flow, two declarations of threadgroup memory in one statement. The sanitizers cannot follow address spaces
and do without: text that is overloaded on them does not compile there. Speed, the precision of fast::, and what Apple's
compiler accepts are for a Mac to say.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
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

import numpy as np
import torch
from torch.utils._cpp_embed_headers import _embed_headers

HERE = Path(__file__).parent
GUARD = 4096                # bytes on either side of a buffer that must stay as they are
MOST_BUFFERS, MOST_THREADS, SIMD_WIDTH = 31, 1024, 32
FLAGS = ("-std=c++17 -O2 -fPIC -ffp-contract=off -fno-math-errno -Wno-unknown-attributes -Wno-ignored-attributes "
         "-Wno-unknown-pragmas -Wno-user-defined-literals -Wpre-c++17-compat -Werror=pre-c++17-compat "
         "-Xclang -cl-single-precision-constant -Xclang -ffloat16-excess-precision=none "
         "-Xclang -fbfloat16-excess-precision=none").split()
VERSION = ["-D__METAL__", "-D__METAL_VERSION__=310"]
HEADERS = ("stdlib simdgroup simdgroup_matrix math atomic array limits type_traits common integer compute geometric "
           "relational numeric").split()
SANITIZERS = {"thread": "thread", "address": "address,alignment"}
SEED = 0                    # of the schedule; 0: as numbered
BUILTINS = {name: f"msl::Three{{msl_t.{field}}}" for name, field in (
    ("thread_position_in_grid", "in_grid"), ("thread_position_in_threadgroup", "in_group"),
    ("threadgroup_position_in_grid", "group"), ("threads_per_threadgroup", "group_size"),
    ("dispatch_threads_per_threadgroup", "whole_group_size"),
    ("threadgroups_per_grid", "groups"), ("threads_per_grid", "grid"))} | {
    "thread_index_in_threadgroup": "msl_t.index", "thread_index_in_simdgroup": "msl_t.lane",
    "simdgroup_index_in_threadgroup": "msl_t.simdgroup", "simdgroups_per_threadgroup": "msl_t.simdgroups",
    "threads_per_simdgroup": "32u", "thread_execution_width": "32u"}

INSTANCE = re.compile(r'template\s*\[\[\s*host_name\(([\s"\w]+)\)\s*\]\]\s*(?:\[\[\s*kernel\s*\]\]|kernel)\s*([^;]*);')
THREADGROUP = re.compile(r"((?:^|[;{}])\s*)threadgroup\s+([\w:<>, ]+?)\s+(\w+)\s*((?:\[[^\]]*\])*)\s*;", re.M)
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


@functools.cache
def versions() -> str:
    """Everything beside the text that what is compiled depends on."""
    command = compiler()
    said = (importlib.metadata.version("ziglang") if "ziglang" in command else
            subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout)
    files = [HERE / "include/metal_stdlib", HERE / "runtime.cpp", HERE / "__init__.py"]
    return "\0".join([said, *command, *(path.read_text() for path in files)])


# --- from Metal's text to C++

def expand(source: str) -> str:
    """The text with its own macros expanded, line markers in it; Metal's headers are left out."""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "kernels.metal").write_text(source)       # the name in what the compiler says
        for name in HEADERS:
            Path(scratch, f"metal_{name}").touch()
        flags = ["-E", "-x", "c++", "-std=c++17", *VERSION, "-nostdinc", "-isystem", "."]
        return clang([*flags, "kernels.metal"], SyntaxError, cwd=scratch)


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
        return f"msl::{'Reference' if '&' in parameter else 'Pointer'}{{msl_b[{number}]}}"
    if name not in BUILTINS:
        raise SyntaxError(f"[[{name}]]: not to be had through torch.mps.compile_shader, or not emulated")
    return BUILTINS[name]


def translate(source: str) -> str:
    """C++, with a table of the kernels behind the text."""
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
        instances["".join(re.findall(r'"(\w+)"', found[1]))] = rest
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
        launchers.append(f"static void msl_run_{i}(void** msl_b, const msl_thread& msl_t) {{ auto msl_f = &{function}; "
                         f"msl_f({', '.join(map(argument, parameters[base]))}); }}")
        buffers = [int(n) for parameter in parameters[base] for n in re.findall(r"\[\[\s*buffer\s*\(\s*(\d+)", parameter)]
        table.append(f'{{"{name}", msl_run_{i}, {most[base]}, {max(buffers, default=-1) + 1}}}')
    return "\n".join(["#include <metal_stdlib>", text, '#line 1 "launchers"', *launchers,
                      f'extern "C" {{ extern const msl_kernel msl_kernels[] = {{{", ".join(table)}}}; '
                      f"extern const int msl_kernel_count = {len(table)}; }}\n"])


def folder() -> Path:
    """What was compiled is kept here, from one run of the tests to the next."""
    path = Path(tempfile.gettempdir(), f"forge-msl-emulator-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise RuntimeError(f"{path} is not yours; remove it")
    return path


def build(source: str, sanitizer: str | None) -> Path:
    """The library (the program, with a sanitizer) of a text, compiled once. Raises SyntaxError with clang's words."""
    try:
        source.encode("ascii")
    except UnicodeEncodeError as error:
        raise RuntimeError(f"torch hands Metal ASCII alone: {error}") from error
    source = _embed_headers([line + "\n" for line in source.split("\n")], [Path(torch.__file__).parent / "include"], set())
    key = hashlib.sha256("\0".join([source, sanitizer or "", versions()]).encode()).hexdigest()[:24]
    path = folder() / f"{key}{'' if sanitizer else '.so'}"
    if path.exists():
        return path
    text = translate(source)
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        made, code, kernels, runtime = (Path(scratch, name) for name in ("made", "kernels.cpp", "kernels.o", "runtime.o"))
        code.write_text(text)
        checked = ["-g", "-fno-omit-frame-pointer", f"-fsanitize={SANITIZERS[sanitizer]}"] if sanitizer else []
        clang([*FLAGS, *VERSION, *checked, *(["-DMSL_NO_AS"] if sanitizer else []), "-isystem", HERE / "include",
               "-c", code, "-o", kernels], SyntaxError)
        clang(["-std=c++17", "-O2", "-fPIC", "-fno-builtin", *(["-DMSL_MAIN"] if sanitizer else []),
               f"-DTSAN={int(sanitizer == 'thread')}", f"-DASAN={int(sanitizer == 'address')}",
               "-c", HERE / "runtime.cpp", "-o", runtime], RuntimeError)
        clang([*(checked or ["-shared", "-nostdlib++"]), kernels, runtime, "-lm", "-o", made], RuntimeError)
        made.replace(path)
    return path


def clang(arguments: Sequence[Any], failure: type[Exception], cwd: str | None = None) -> str:
    """What the compiler writes; raises what it complains of."""
    done = subprocess.run([*compiler(), *arguments], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(folder() / "zig")})
    if done.returncode:
        raise failure(done.stderr)
    return done.stdout


# --- torch's call surface

CASTS = {"fp16": "e", "int32": "i", "int16": "h", "int8": "b", "uint8": "B"}


def packed(values: Sequence[Any], cast: str | None) -> bytes:
    if not values:
        raise RuntimeError("an empty list is no argument of a kernel")
    if cast == "bf16":
        return torch.tensor(values, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    if cast and cast not in CASTS:
        raise RuntimeError(f"arg_casts knows {', '.join(CASTS)} and bf16, not {cast!r}")
    return struct.pack(f"<{len(values)}{CASTS[cast] if cast else 'f' if isinstance(values[0], float) else 'q'}", *values)


class Buffer(NamedTuple):
    """What a launch passes at one index."""

    data: np.ndarray                # bytes; a tensor's own memory, from its first element to its last
    written: bool                   # whether a kernel may write it


def as_buffer(value: Any, cast: str | None) -> Buffer:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise RuntimeError(f"the emulator takes CPU tensors, not one on {value.device}")
        if value.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"MPS has no {value.dtype}")
        if not value.numel():
            return Buffer(np.empty(0, np.uint8), True)
        elements = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride()))
        memory = (ctypes.c_ubyte * (elements * value.element_size())).from_address(value.data_ptr())
        return Buffer(np.frombuffer(memory, np.uint8), True)
    if isinstance(value, bool | int | float):
        value = [value]
    if isinstance(value, list | tuple) and all(isinstance(x, bool | int | float) for x in value):
        return Buffer(np.frombuffer(packed(value, cast), np.uint8), False)
    raise TypeError(f"a kernel takes tensors, numbers and lists of numbers, not {type(value).__name__}")


def three(value: int | Sequence[int] | None, otherwise: int) -> list[int]:
    given = [otherwise] if value is None else [value] if isinstance(value, int) else list(value)
    if not 1 <= len(given) <= 3 or min(given) < 1:
        raise ValueError(f"threads and group_size are 1 to 3 positive numbers, not {value}")
    return [*given, 1, 1][:3]


class Launch(NamedTuple):
    kernel: int
    threads: list[int]
    group: list[int]
    seed: int


def in_process(library: ctypes.CDLL, launch: Launch, buffers: Sequence[Buffer]) -> list[np.ndarray]:
    """What each buffer holds after the launch. A kernel sees a copy between guards: what it writes outside is found, and
    what it reads there is no number."""
    copies = []
    for buffer in buffers:
        copies.append(np.full(buffer.data.size + 2 * GUARD, 0xff, np.uint8))
        copies[-1][GUARD:GUARD + buffer.data.size] = buffer.data
    pointers = (ctypes.c_void_p * MOST_BUFFERS)(*(copy.ctypes.data + GUARD for copy in copies))
    message = ctypes.create_string_buffer(1024)
    if library.msl_launch(launch.kernel, pointers, (ctypes.c_uint * 3)(*launch.threads), (ctypes.c_uint * 3)(*launch.group),
                          ctypes.c_uint64(launch.seed), message, len(message)):
        raise RuntimeError(message.value.decode())
    for i, copy in enumerate(copies):
        for where, guard in (("before", copy[:GUARD]), ("behind", copy[-GUARD:])):
            if (hit := np.flatnonzero(guard != 0xff)).size:
                far = GUARD - hit[0] if where == "before" else hit[-1] + 1
                raise RuntimeError(f"buffer {i} of {buffers[i].data.size} bytes: up to {far} bytes {where} it were written")
    return [copy[GUARD:-GUARD] for copy in copies]


def in_own_process(program: Path, launch: Launch, buffers: Sequence[Buffer]) -> list[np.ndarray]:
    """As in_process, under the sanitizer that the program was compiled with; raises RuntimeError with its report."""
    with tempfile.TemporaryDirectory() as scratch:
        job = Path(scratch, "job")
        head = struct.pack("<9Q", launch.kernel, *launch.threads, *launch.group, launch.seed, len(buffers))
        off = [buffer.data.ctypes.data % 16 if buffer.written else 0 for buffer in buffers]
        job.write_bytes(head + b"".join(struct.pack("<2Q", buffer.data.size, by) + buffer.data.tobytes()
                                        for buffer, by in zip(buffers, off)))
        fixed = ["setarch", "-R"] if shutil.which("setarch") else []        # both want an address space that is not shuffled
        options = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
                   "ASAN_OPTIONS": "detect_leaks=0 detect_stack_use_after_return=0",
                   "UBSAN_OPTIONS": "halt_on_error=1 print_stacktrace=1"}
        done = subprocess.run([*fixed, program, job], capture_output=True, text=True, env={**os.environ, **options})
        if done.returncode:
            raise RuntimeError(done.stderr or f"the launch ended with {done.returncode}")
        after, at, news = np.fromfile(job, np.uint8), len(head), []
        for data, _ in buffers:
            news.append(after[at + 16:at + 16 + data.size])
            at += 16 + data.size
        return news


class Entry(ctypes.Structure):
    """A row of the table of kernels."""

    _fields_ = (("name", ctypes.c_char_p), ("run", ctypes.c_void_p), ("most_threads", ctypes.c_uint),
                ("buffers", ctypes.c_uint))


class Kernel:
    thread_execution_width = SIMD_WIDTH

    def __init__(self, library: Library, index: int, entry: Entry) -> None:
        self.library, self.index, self.buffers = library, index, entry.buffers
        self.max_threads_per_threadgroup = entry.most_threads
        self.threadgroup_bytes: int | None = None

    @property
    def static_thread_group_memory_length(self) -> int:
        """Bytes; the emulator knows them from a launch."""
        if self.threadgroup_bytes is None:
            raise RuntimeError("the emulator counts threadgroup memory in a launch: there was none yet")
        return self.threadgroup_bytes

    def __call__(self, *args: Any, threads: Any = None, group_size: Any = None, arg_casts: Any = None) -> None:
        if not self.buffers <= len(args) <= MOST_BUFFERS:
            raise RuntimeError(f"{len(args)} arguments: the kernel has {self.buffers} buffers, Metal at most {MOST_BUFFERS}")
        casts = dict.fromkeys(range(len(args)), arg_casts) if isinstance(arg_casts, str) else arg_casts or {}
        buffers = [as_buffer(value, casts.get(i)) for i, value in enumerate(args)]
        first = next((x for x in args if isinstance(x, torch.Tensor)), None)
        all_threads = three(threads, first.numel() if first is not None else 1)
        group = three(group_size, min(self.max_threads_per_threadgroup, all_threads[0]))
        if math.prod(group) > self.max_threads_per_threadgroup:
            raise ValueError(f"a group of {math.prod(group)} threads: {self.max_threads_per_threadgroup} is the most here")
        library = self.library
        launch = Launch(self.index, all_threads, group, SEED if library.seed is None else library.seed)
        if library.program:
            news = in_own_process(library.program, launch, buffers)
        else:
            news = in_process(library.code, launch, buffers)
            self.threadgroup_bytes = library.code.msl_threadgroup_bytes()
        changes = [new != buffer.data for buffer, new in zip(buffers, news)]
        for i, (buffer, new, changed) in enumerate(zip(buffers, news, changes)):
            if buffer.written:
                buffer.data[changed] = new[changed]         # no more: views of one storage may lie within each other
            elif changed.any():
                raise RuntimeError(f"buffer {i}: the kernel wrote into a constant")


class Library:
    """The kernels of a text, each an attribute."""

    def __init__(self, code: Path, program: Path | None, seed: int | None) -> None:
        self.code, self.program, self.seed = ctypes.CDLL(str(code)), program, seed
        self.code.msl_threadgroup_bytes.restype = ctypes.c_size_t
        count = ctypes.c_int.in_dll(self.code, "msl_kernel_count").value
        table = (Entry * count).in_dll(self.code, "msl_kernels")
        self.kernels = {entry.name.decode(): Kernel(self, i, entry) for i, entry in enumerate(table)}

    def __getattr__(self, name: str) -> Kernel:
        if name not in self.__dict__.get("kernels", {}):
            raise RuntimeError(f"the library has no kernel {name!r}; it has {', '.join(self.__dict__.get('kernels', {}))}")
        return self.kernels[name]

    def __dir__(self) -> list[str]:
        return list(self.kernels)


def compile_shader(source: str, *, seed: int | None = None, sanitizer: str | None = None) -> Library:
    """The library of Metal's text.

    seed: of the schedule of its launches (0: as numbered); None takes what `schedule` says.
    sanitizer: `thread` or `address`; a launch then runs in a process of its own and raises RuntimeError with the report.
    Raises SyntaxError for what is no Metal, RuntimeError for text that is not ASCII.
    """
    if sanitizer not in (None, *SANITIZERS):
        raise ValueError(f"sanitizer={sanitizer!r}: there are {', '.join(SANITIZERS)}")
    return Library(build(source, None), build(source, sanitizer) if sanitizer else None, seed)


@functools.cache
def no_sanitizers() -> str | None:
    """Why the sanitizers cannot be had here; None: they can."""
    try:
        for sanitizer in ("address", "thread"):
            build("kernel void f(device float* y [[buffer(0)]]) { y[0] = 1.0f; }", sanitizer)
    except (SyntaxError, RuntimeError) as error:
        return f"the sanitizers need clang and its runtime (clang-19, libclang-rt-19-dev): {str(error).splitlines()[0]}"
    return None


def sanitize(source: str, name: str, *args: Any, sanitizer: str, threads: Any = None, group_size: Any = None,
             arg_casts: Any = None) -> str:
    """One launch under a sanitizer: what it reports, "" for nothing."""
    kernel = getattr(compile_shader(source, sanitizer=sanitizer), name)
    try:
        kernel(*args, threads=threads, group_size=group_size, arg_casts=arg_casts)
    except RuntimeError as report:
        return str(report)
    return ""
