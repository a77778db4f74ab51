"""forge bench attention: how fast each backend of forge.attention is, and each other attention that is installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from forge import machine
from forge.config import Interrupted, RequestError, nearest
from forge.ops.attention import BACKENDS, FLOORS, Case, attention, verdict
from forge.ops.attention.reference import visible

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

SHAPES = {
    "cuda": ("32,12,12,1024,64", "8,12,12,4096,64", "2,12,12,16384,64", "8,16,16,2048,128", "4,16,16,4096,128",
             "1,16,16,16384,128", "4,32,8,4096,128", "1,32,8,16384,128", "4,16,16,4096,128,w1024",
             "1,32,8,16384,128,w1024", "8,12,12,4096,64,w512"),
    "elsewhere": ("4,8,8,1024,64", "1,8,2,2048,64", "1,4,4,4096,64,w512")}
CURVE = {"cuda": tuple(f"1,16,16,{1024 * 2 ** i},128" for i in range(7)),
         "elsewhere": tuple(f"1,2,2,{1024 * 2 ** i},64" for i in range(5))}
CURVED = {"forge triton": "#1f5fb4", "forge blocked": "#74aaf2", "sdpa flash": "#d1560f", "sdpa math": "#66707a"}
MASK = "sdpa with a T x T mask"
MASK_T = 16_384         # a larger mask is not tried
SCORES = 3              # float32 numbers for each query, key and head that an unfused attention holds at once
LEAST, MOST = {"cuda": 10, "elsewhere": 3}, 30      # turns of each candidate ...
QUEUE = 6_000_000       # clock cycles that a GPU waits before each measurement, while the host queues its launches
SECONDS = {"cuda": 3.0, "elsewhere": 6.0}           # ... as many as fit into this time for a shape
TOLERANCE = 4           # times FLOORS: what two that are right may differ by, in the output ...
GRADIENT_TOLERANCE = 12     # ... and in the gradients, for 16 bit also round dS and out, of which delta is made


class Shape(NamedTuple):
    """A causal attention: B sequences, H query heads on K key-value heads, T tokens, head_dim D, window in keys."""

    B: int
    H: int
    K: int
    T: int
    D: int
    window: int | None = None

    def __str__(self) -> str:
        return ",".join(map(str, self[:5])) + (f",w{self.window}" if self.window else "")

    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, in a sequence and head."""
        W = min(self.window or self.T, self.T)
        return W * (W + 1) // 2 + (self.T - W) * W

    def flops(self) -> tuple[float, float]:
        """Of a forward (two products) and a backward (five), by the usual convention."""
        forward = 4 * self.B * self.H * self.D * self.pairs()
        return forward, 2.5 * forward


class Candidate(NamedTuple):
    """An attention to be measured, or the reason why it cannot be."""

    name: str
    reason: str | None
    run: Attend                     # causal, differentiable
    peer: bool = True               # not a backend of Forge
    heads_first: bool = False       # takes and gives (B, H, T, D) instead of (B, T, H, D)
    within: Callable[[], AbstractContextManager[Any]] = nullcontext     # around its forward and backward
    kept_bytes: int = 0             # what it needs beside q, k and v, and makes once


def bench_attention(shapes: Sequence[str] = (), *, dtype: str = "auto", device: str = "auto",
                    plot: str | Path | None = None) -> dict[str, Any]:
    """{measured: a row for each shape and candidate, plot, environment}: causal attention, forward and backward.

    shapes: texts B,H,K,T,D or B,H,K,T,D,wW with a window of W keys; none: those of this module for the device.
    dtype: bfloat16, float16, float32; auto is bfloat16 on CUDA and float32 elsewhere.
    plot: a file (.svg, .png) for time and memory against T, of CURVED alone; the shapes then differ in T only.
    A row has shape, dtype, name, peer (bool), reason (None, or why there are no figures) and the figures: median,
    fastest and slowest ms, TFLOP/s, peak memory in MiB above q, k, v and the output's gradient (null where torch does
    not count it), the relative Frobenius error of the output and the largest of the gradients against the backend
    `blocked` (null for itself), the ratio of the best peer's time to its own, and how often it was timed.
    All candidates of a shape take turns. Prints progress on stderr.
    Raises RequestError for a text that is no shape, a shape that does not fit into memory, an unknown dtype or device,
    or a plot that cannot be drawn.
    """
    place = machine.pick_device(device)
    kind = "cuda" if place.type == "cuda" else "elsewhere"
    if dtype == "auto":
        dtype = "bfloat16" if kind == "cuda" else "float32"
    if dtype not in (dtypes := ("bfloat16", "float16", "float32")):
        raise RequestError(f"--dtype {dtype}: it is not one of {', '.join(dtypes)}; {nearest(dtype, list(dtypes))}")
    machine.settle_cpu()
    if plot is not None:
        require_plot(Path(plot))
    asked = [parse(text) for text in shapes or (CURVE if plot else SHAPES)[kind]]
    if plot is not None and len({shape._replace(T=0) for shape in asked}) > 1:
        raise RequestError(f"--plot {plot} draws time against T, and --shapes {' '.join(map(str, asked))} differ in more; "
                           "name shapes that differ in T alone, or leave --shapes or --plot out")
    for shape in asked:
        require_memory(shape, getattr(torch, dtype), place)
    rows = []
    for shape in asked:
        rows += measure(shape, dtype, place, CURVED if plot else None)
    result: dict[str, Any] = {"measured": rows, "environment": machine.environment(place)}
    if plot is not None:
        draw(rows, Path(plot), result["environment"])
        result["plot"] = str(plot)
    return result


def parse(text: str) -> Shape:
    """B,H,K,T,D or B,H,K,T,D,wW. Raises RequestError."""
    found = re.fullmatch(r"(\d+),(\d+),(\d+),(\d+),(\d+)(?:,w(\d+))?", text.replace(" ", ""), re.ASCII)
    if found is None or "0" in (numbers := [n.lstrip("0") or "0" for n in found.groups() if n is not None]):
        raise RequestError(f"--shapes {text}: it is not B,H,K,T,D (sequences, query heads, key-value heads, tokens, "
                           "head_dim, each at least 1), nor that with ,wW for a window of W keys; type: "
                           "--shapes 8,12,12,4096,64 1,32,8,16384,128,w1024")
    shape = Shape(*map(int, numbers))
    if shape.H % shape.K:
        divisors = [d for d in range(1, shape.H + 1) if shape.H % d == 0]
        K = max(d for d in divisors if d <= shape.K)
        raise RequestError(f"--shapes {text}: {shape.H} query heads are no multiple of {shape.K} key-value heads; type: "
                           f"--shapes {shape._replace(K=K)}")
    return shape


def free_bytes(place: torch.device) -> int:
    if place.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(place)[0]
    return psutil.virtual_memory().available


def require_memory(shape: Shape, dtype: torch.dtype, place: torch.device) -> None:
    """Raises RequestError where not even a fused attention fits."""
    tensors = shape.B * shape.T * shape.D * (2 * shape.H + 2 * shape.K)     # numbers of q, k, v and dout, or of the results
    # held: the inputs in both layouts, the results of `blocked` and of the candidate, and its work in float32
    need, free = tensors * (4 * dtype.itemsize + 2 * 4), free_bytes(place)
    if need > free:
        B = int(shape.B * free / need)
        less = shape._replace(B=B) if B else shape._replace(B=1, T=max(1, int(shape.T * shape.B * free / need)))
        raise RequestError(f"--shapes {shape} needs about {need / 1e9:,.1f} GB for inputs, outputs and gradients, and "
                           f"{place.type} has {free / 1e9:,.1f} GB free; name fewer sequences, heads or tokens, such as "
                           f"--shapes {less}")


def too_square(shape: Shape, free: int) -> str | None:
    """Why an attention that holds all scores does not fit, or None."""
    need = shape.B * shape.H * shape.T ** 2 * 4 * SCORES
    if need <= free / 2:
        return None
    return f"it holds all T² scores, about {need / 1e9:,.1f} GB, more than half of the {free / 1e9:,.1f} GB that are free"


def candidates(shape: Shape, dtype: torch.dtype, place: torch.device) -> Iterator[Candidate]:
    """Forge's backends, then the peers."""
    case = Case(device=place.type, dtype=dtype, head_dim=shape.D, grouped=shape.H != shape.K, square=True,
                single=shape.T == 1, causal=True, window=shape.window is not None, starts=False, softcap=False, lse=False)
    square = too_square(shape, free_bytes(place))
    for name in BACKENDS:
        reason = verdict(name, case) or (square if name == "reference" else None)
        yield Candidate(f"forge {name}", reason, backend(name, shape.window), peer=False)
    yield from sdpa_peers(shape, place, square)
    yield Candidate("FlexAttention, compiled", None if place.type == "cuda" else f"no backward on {place.type}",
                    flex_attention(shape), heads_first=True)
    for name, module in (("flash-attn 2", "flash_attn"), ("flash-attn 3", "flash_attn_interface"),
                         ("flash-attn 4", "flash_attn.cute")):
        found = flash_attn_func(module) if place.type == "cuda" else "needs an NVIDIA GPU"
        yield Candidate(name, found, unable) if isinstance(found, str) else Candidate(
            name, None, flash_attn(found, shape.window))


def backend(name: str, window: int | None) -> Attend:
    """One of Forge's: (B, T, heads, D)."""
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v, window=window, backend=name)
        assert isinstance(out, Tensor)
        return out

    return run


def unable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise AssertionError("a candidate with a reason is not run")


def sdpa_peers(shape: Shape, place: torch.device, square: str | None) -> Iterator[Candidate]:
    """PyTorch's scaled_dot_product_attention: each kernel, the default where it must be deterministic, and with a mask."""
    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
               "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
    there = {"cuda": tuple(kernels), "cpu": ("flash", "math")}.get(place.type, ("math",))
    plain = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=shape.H != shape.K)
    windowless = f"knows no window (see: {MASK})" if shape.window else None
    for name, kernel in kernels.items():
        reason = (None if name in there else f"torch has no such kernel on {place.type}") or windowless or (
            square if name == "math" else None)
        yield Candidate(f"sdpa {name}", reason, plain, heads_first=True, within=functools.partial(sdpa_kernel, kernel))
    fit = [kernel for name, kernel in kernels.items() if name in there and not (name == "math" and square)]

    @contextmanager
    def deterministic() -> Iterator[None]:
        with machine.deterministic(True), sdpa_kernel(fit):
            yield

    yield Candidate("sdpa default, deterministic", windowless, plain, heads_first=True, within=deterministic)
    if shape.window is None:
        return

    @functools.cache
    def mask() -> Tensor:       # (1, 1, T, T)
        return visible(shape.T, shape.T, None, True, shape.window, place)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(), enable_gqa=shape.H != shape.K)

    yield Candidate(MASK, None if shape.T <= MASK_T else f"the mask has T² bytes, and is tried up to T = {MASK_T:,}", masked,
                    heads_first=True, within=functools.partial(sdpa_kernel, fit), kept_bytes=shape.T ** 2)


def flex_attention(shape: Shape) -> Attend:
    """(B, heads, T, D); compiled at the first call, which forgets what was compiled for other shapes."""
    @functools.cache
    def compiled(place: torch.device) -> Attend:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i - j < (shape.window or shape.T))

        torch.compiler.reset()      # past a number of shapes torch would run it uncompiled
        mask = create_block_mask(sees, None, None, shape.T, shape.T, device=place)
        return functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=mask,
                                 enable_gqa=shape.H != shape.K)

    return lambda q, k, v: compiled(q.device)(q, k, v)


def flash_attn_func(module: str) -> Callable[..., Any] | str:
    """The function of a flash-attn package, or why there is none."""
    try:
        return importlib.import_module(module).flash_attn_func
    except ImportError as error:
        return f"not installed ({error})"
    except AttributeError:
        return f"not installed (there is a {module}, but no flash_attn_func in it)"     # 4 makes the folder of 2 as well


def flash_attn(function: Callable[..., Any], window: int | None) -> Attend:
    """(B, T, heads, D)."""
    sees = {} if window is None else {"window_size": (window - 1, 0)}       # theirs counts the keys before the query's own

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, causal=True, **sees)
        return out[0] if isinstance(out, tuple) else out        # some versions give lse as well

    return run


def measure(shape: Shape, dtype: str, place: torch.device, only: Iterable[str] | None) -> list[dict[str, Any]]:
    """The rows of a shape, of the candidates named in `only` or of all."""
    B, H, K, T, D = shape[:5]
    random = torch.Generator(place).manual_seed(0)
    q, k, v, dout = (torch.randn(B, T, heads, D, generator=random, device=place, dtype=getattr(torch, dtype))
                     for heads in (H, K, K, H))
    layouts = {False: (q, k, v, dout), True: tuple(x.transpose(1, 2).contiguous() for x in (q, k, v, dout))}
    for inputs in layouts.values():
        for x in inputs[:3]:
            x.requires_grad_()
    exact = forward_backward(Candidate("", None, backend("blocked", shape.window)), layouts[False])
    rows, able = [], []
    for c in candidates(shape, getattr(torch, dtype), place):
        if only is not None and c.name not in only:
            continue
        print(f"bench: {shape} {dtype}, {c.name} ...", file=sys.stderr)
        row: dict[str, Any] = {"shape": str(shape), "dtype": dtype, "name": c.name, "peer": c.peer, "reason": c.reason}
        rows.append(row)
        if c.reason is None:
            figures = check(c, layouts[c.heads_first], exact, place)
            if isinstance(figures, str):
                row["reason"] = figures
            else:
                row |= figures
                able.append((c, row))
    ms = take_turns([c for c, _ in able], layouts, place)
    flops = shape.flops()
    for (_, row), times in zip(able, ms):
        for i, what in enumerate(("forward", "backward")):
            each = [pair[i] for pair in times]
            row |= {f"{what}_ms": statistics.median(each), f"{what}_fastest_ms": min(each), f"{what}_slowest_ms": max(each),
                    f"{what}_tflops": flops[i] / statistics.median(each) / 1e9}
        row["repeats"] = len(times)
    best = min((total_ms(row) for _, row in able if row["peer"]), default=None)
    for _, row in able:
        row["ratio"] = best and best / total_ms(row)
    return rows


def total_ms(row: dict[str, Any]) -> float:
    return row["forward_ms"] + row["backward_ms"]


def forward_backward(c: Candidate, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The output and the gradients of q, k and v, each (B, T, heads, D)."""
    *qkv, dout = inputs
    with c.within():
        out = c.run(*qkv)
        found = [out.detach(), *torch.autograd.grad(out, qkv, dout)]
    return [x.transpose(1, 2) for x in found] if c.heads_first else found


def check(c: Candidate, inputs: tuple[Tensor, ...], exact: list[Tensor], place: torch.device) -> dict[str, Any] | str:
    """Its errors and its memory; or why it is not timed: it does not run, or its results are wrong."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = forward_backward(c, inputs)
            errors = [distance(x, y) for x, y in zip(found, exact)]
            del found
            memory = peak_bytes(lambda: forward_backward(c, inputs), place)
        except Interrupted:
            raise
        except Exception as error:      # code of others, which may raise anything; the row says what
            # torch tells in warnings why each kernel was not taken; those that were switched off are not asked for
            why = [str(w.message).split(" (Triggered internally")[0] for w in said]
            why = [line for line in why if "not used because" not in line and "runtime disabled" not in line]
            return " ".join([type(error).__name__ + ":", *(str(error).strip().splitlines() or ["no message"])[:1], *why])
    floor = FLOORS[inputs[0].dtype]
    for what, off, allowed in (("output", errors[0], TOLERANCE * floor),
                               ("gradients", max(errors[1:]), GRADIENT_TOLERANCE * floor)):
        if not off <= allowed:
            return f"wrong: its {what} differ by {off:.1e} from those of blocked, {allowed:.1e} is allowed"
    itself = c.name == "forge blocked"
    return {"memory_mib": None if memory is None else (memory + c.kept_bytes) / 2 ** 20,
            "error": None if itself else errors[0], "gradient_error": None if itself else max(errors[1:])}


def distance(x: Tensor, exact: Tensor) -> float:
    """Relative Frobenius error, in float32."""
    x, exact = x.float(), exact.float()
    return float((x - exact).norm() / exact.norm().clamp_min(1e-30))


def peak_bytes(call: Callable[[], object], place: torch.device) -> int | None:
    """The most that torch held at once during a call, above what it held before; None where torch does not count it."""
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
        before = torch.cuda.memory_allocated(place)
        call()
        torch.cuda.synchronize(place)
        return torch.cuda.max_memory_allocated(place) - before
    if place.type != "cpu":
        return None
    # the process's resident set tells nothing: it holds what earlier candidates left to the allocator
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "trace.json"
        seen.export_chrome_trace(str(file))
        events = json.loads(file.read_bytes())["traceEvents"]
    return max((e["args"]["Total Allocated"] for e in events if e.get("name") == "[memory]"), default=0)


def take_turns(able: list[Candidate], layouts: dict[bool, tuple[Tensor, ...]], place: torch.device
               ) -> list[list[tuple[float, float]]]:
    """(ms of a forward, ms of a backward) of each turn, for each candidate: all meet the same noise."""
    kind = "cuda" if place.type == "cuda" else "elsewhere"
    ms: list[list[tuple[float, float]]] = [[] for _ in able]
    began = time.perf_counter()
    for turn in range(MOST):
        if turn >= LEAST[kind] and time.perf_counter() - began > SECONDS[kind]:
            break
        for c, times in zip(able, ms):
            times.append(once(c, layouts[c.heads_first], place))
    return ms


def once(c: Candidate, inputs: tuple[Tensor, ...], place: torch.device) -> tuple[float, float]:
    """Milliseconds of one forward and of its backward."""
    *qkv, dout = inputs
    with c.within():
        if place.type == "cuda":
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
            torch.cuda._sleep(QUEUE)
            marks[0].record()
            out = c.run(*qkv)
            marks[1].record()
            torch.cuda._sleep(QUEUE)
            marks[2].record()
            torch.autograd.grad(out, qkv, dout)
            marks[3].record()
            torch.cuda.synchronize()
            return marks[0].elapsed_time(marks[1]), marks[2].elapsed_time(marks[3])
        machine.wait(place)
        began = time.perf_counter()
        out = c.run(*qkv)
        machine.wait(place)
        between = time.perf_counter()
        torch.autograd.grad(out, qkv, dout)
        machine.wait(place)
        return 1000 * (between - began), 1000 * (time.perf_counter() - between)


def require_plot(file: Path) -> None:
    """Raises RequestError where a plot could not be drawn."""
    if file.suffix not in (".svg", ".png"):
        raise RequestError(f"--plot {file}: the name must end in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError("forge bench attention --plot draws with matplotlib, which is not installed; type: "
                           "pip install matplotlib")


def draw(rows: list[dict[str, Any]], file: Path, environment: dict[str, Any]) -> None:
    """Time and memory against T, each on logarithmic axes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    shapes = [parse(row["shape"]) for row in rows]
    one = shapes[0]
    settings = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "forge"}
    with rc_context(settings):      # type: ignore[arg-type]
        figure = Figure(figsize=(8.4, 3.4), layout="constrained")
        for axes, what, label in zip(figure.subplots(1, 2), (total_ms, lambda row: row["memory_mib"]), (
                "forward and backward, ms", "peak memory above the inputs, MiB")):
            for name, color in CURVED.items():
                points = [(shape.T, what(row)) for shape, row in zip(shapes, rows) if row["name"] == name and
                          row["reason"] is None and what(row)]
                if points:
                    axes.plot(*zip(*points), color=color, linewidth=1.6, marker="o", markersize=3.5, label=name)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(sorted({shape.T for shape in shapes}))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda T, _: f"{T / 1024:g}k" if T >= 1024 else f"{T:g}"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_xlabel("T, tokens")
            axes.set_title(label, loc="left", fontsize=9)
            axes.grid(color="#010101", alpha=0.12, linewidth=0.6)
        axes.legend(frameon=False)
        figure.suptitle(f"Causal attention, {rows[0]['dtype']}, B={one.B} H={one.H} K={one.K} D={one.D}"
                        + f" window={one.window}" * bool(one.window)
                        + f", {environment['gpu'] or environment['processor']}, torch {environment['torch']}", fontsize=9,
                        x=0.01, ha="left")
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
