"""The emulator of Metal's language against text that it did not write, plain numbers, and mistakes that it must find."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulator
import pytest
import torch
from emulator import compile_shader, schedule
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.backends.mps.is_available(), reason="here is Metal itself")
sanitized = pytest.mark.skipif(bool(emulator.no_sanitizers()), reason=str(emulator.no_sanitizers()))
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
THREAD = ("uint i [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], "
          "uint at [[thread_position_in_grid]]")
TURN = HEAD + """
kernel void turn(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_index_in_threadgroup]],
                 uint group [[threadgroup_position_in_grid]]) {
    threadgroup float shared[64];
    for (uint round = 0; round < 2; round++) {
        shared[i] = x[group * 64 + i] + float(round);
        threadgroup_barrier(mem_flags::mem_threadgroup);        // written
        y[round * 128 + group * 64 + i] = shared[63 - i];
        threadgroup_barrier(mem_flags::mem_threadgroup);        // read
    }
}
"""


def one(body: str, parameters: str = "device float* y [[buffer(0)]]", before: str = "") -> str:
    """A kernel `f`; its body begins in line 4."""
    return f"{HEAD}{before}kernel void f({parameters}, {THREAD}) {{\n{body}\n}}\n"


def lanes(body: str, x: Tensor | None = None, **keywords: Any) -> Tensor:
    """What 32 lanes write into y, given x."""
    x = torch.arange(32.0) if x is None else x
    y = torch.zeros(32)
    compile_shader(one(body, "device const float* x [[buffer(0)]], device float* y [[buffer(1)]]")).f(
        x, y, threads=32, group_size=32, **keywords)
    return y


# --- text of others

@pytest.mark.parametrize(("name", "type_", "dtype", "causal", "most"), [
    ("float32", "float", torch.float32, 1, 1e-6), ("bfloat16", "bfloat", torch.bfloat16, 0, 4e-3)])
def test_attention_of_pytorch(name: str, type_: str, dtype: torch.dtype, causal: int, most: float) -> None:
    """Text that runs on Apple's GPUs: address spaces in templates, fragments of matrices, its own instances."""
    path = Path(torch.__file__).parent / "include/ATen/native/mps/kernels/PrefillAttention.h"
    if not path.exists() and torch.__version__ < "2.13":
        pytest.skip("PyTorch ships it from 2.13 on")
    text = "".join(filter(str.isascii, path.read_text(encoding="utf-8"))).split("instantiate_attn_mask_helper(float16")[0]
    library = compile_shader("#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\n#include <c10/metal/utils.h>\n"
                             "using namespace metal;\n" + text +
                             f"instantiate_attn({name}, {type_}, 32, 32, 64, 4, 1, 0, {causal}, {name}, {type_})\n#endif\n")
    [kernel] = dir(library)
    assert kernel == f"prefill_attention_{name}_bq32_bk32_bd64_wm4_wn1_hm0_dc{causal}_mask{name}"
    B, H, K, T, D = 1, 2, 1, 100, 64
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, heads, T, D).to(dtype) for heads in (H, K, K))
    out = torch.full_like(q, torch.nan)
    strides = [n for x in (q, k, v, out) for n in x.stride()[:3]]
    problem = list(struct.pack("<6i2f12i", B, H, D, T, T, H // K, D ** -0.5, 1.0, *strides))
    getattr(library, kernel)(q, k, v, out, problem, [0] * 16, q, threads=(-(-T // 32) * 32, 4 * H, B), group_size=(32, 4, 1),
                             arg_casts={4: "uint8", 5: "uint8"})
    right = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=bool(causal),
                                                             enable_gqa=True)
    assert (out - right).norm() / right.norm() < most


# --- mistakes that a GPU lets pass

def launch(source: str, *args: Any, threads: Any = 64, group_size: Any = 64, **keywords: Any) -> None:
    compile_shader(source, **keywords).f(*args, threads=threads, group_size=group_size)


def test_threads_that_part_are_named_with_their_lines() -> None:
    apart = one("if (i < 40) threadgroup_barrier(mem_flags::mem_none);\nelse threadgroup_barrier(mem_flags::mem_none);")
    with pytest.raises(RuntimeError, match="thread 0 is at the barrier of line 4, thread 40 is at the barrier of line 5"):
        launch(apart, torch.zeros(64))
    with pytest.raises(RuntimeError, match="thread 0 has ended, thread 1 is at the barrier of line 5"):
        launch(one("if (i == 0) return;\nthreadgroup_barrier(mem_flags::mem_none);"), torch.zeros(64))
    with pytest.raises(RuntimeError, match="thread 0 is at its simdgroup's operation of line 4, thread 7 has ended"):
        launch(one("if (i != 7) y[i] = simd_sum(1.0f);"), torch.zeros(64))
    launch(one("if (i < 32) y[i] = simd_sum(1.0f);"), torch.zeros(64))      # whole simdgroups may


@pytest.mark.parametrize(("index", "where"), [("i + 1", "behind"), ("int(i) - 1", "before")])
def test_a_write_outside_of_a_buffer(index: str, where: str) -> None:
    with pytest.raises(RuntimeError, match=f"buffer 0 of 256 bytes: up to 4 bytes {where} it were written"):
        launch(one(f"y[{index}] = 0.0f;"), torch.zeros(64))


def test_a_read_outside_of_a_buffer_is_no_number() -> None:
    y = torch.zeros(64)
    launch(one("y[i] = x[i + 1] + x[int(i) - 1];", "device float* y [[buffer(0)]], device float* x [[buffer(1)]]"), y,
           torch.zeros(64))
    assert y.isnan().nonzero().flatten().tolist() == [0, 63]


def test_a_constant_is_not_written() -> None:
    with pytest.raises(RuntimeError, match="wrote into a constant"):
        launch(one("y[i] = 1.0f;"), [0.0] * 64)


@pytest.mark.parametrize("type_", ["float", "half", "bfloat"])
def test_threadgroup_memory_begins_as_no_number(type_: str) -> None:
    y = torch.zeros(128)
    launch(one(f"threadgroup {type_} s[64]; y[at] = float(s[i]); s[i] = {type_}(1.0f);"), y, threads=128)
    assert y.isnan().all()


def test_matrices_begin_as_no_numbers() -> None:
    assert lanes("simdgroup_float8x8 m; y[i] = m.thread_elements()[0];").isnan().all()


def test_threadgroup_memory_ends_at_32_KiB() -> None:
    body = "threadgroup float a[4096];\nthreadgroup float b[N];\na[i] = b[i] = 1.0f;\ny[i] = a[i];"
    library = compile_shader(one(body.replace("N", "4096")))
    library.f(torch.zeros(64), threads=64, group_size=64)
    assert library.f.static_thread_group_memory_length == 32768
    with pytest.raises(RuntimeError, match="threadgroup memory: 32784 bytes in 2 arrays, a group has 32768"):
        launch(one(body.replace("N", "4100")), torch.zeros(64))


def without(barrier: str) -> str:
    return "\n".join(line if barrier not in line else "" for line in TURN.split("\n"))


@pytest.mark.parametrize("barrier", ["// written", "// read"])
def test_a_barrier_that_is_missing(barrier: str) -> None:
    x, y = torch.randn(128), torch.zeros(256)
    right = torch.cat([x.view(2, 64).flip(1).flatten() + n for n in (0.0, 1.0)])
    for text, same in ((TURN, True), (without(barrier), False)):
        compile_shader(text).turn(x, y, threads=128, group_size=64)
        assert torch.equal(y, right) == same
        if not emulator.no_sanitizers():
            found = emulator.sanitize(text, "turn", x, y, threads=128, group_size=64, sanitizer="thread")
            assert [word in found for word in ("data race", "kernels.metal:")] == [not same] * 2, found


@sanitized
def test_the_thread_sanitizer_on_simdgroups_and_between_groups() -> None:
    text = """threadgroup float s[64];
s[i] = 1.0f;
simdgroup_barrier(mem_flags::FLAGS);
y[at] = s[i ^ 1] + simd_sum(1.0f);"""
    y = torch.zeros(128)
    launch(one(text.replace("FLAGS", "mem_threadgroup")), y, threads=128, sanitizer="thread")
    assert y.eq(33).all()
    with pytest.raises(RuntimeError, match=r"data race[^$]*kernels.metal:[47]"):
        launch(one(text.replace("FLAGS", "mem_none")), y, threads=128, sanitizer="thread")
    with pytest.raises(RuntimeError, match=r"data race[^$]*kernels.metal:4"):
        launch(one("if (i == 0) y[0] = float(at);"), y, threads=128, sanitizer="thread")
    atomic = one("atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);", "device atomic_uint* n [[buffer(0)]]")
    launch(atomic, count := torch.zeros(1, dtype=torch.int32), threads=128, sanitizer="thread")
    assert count.item() == 128


@sanitized
def test_the_address_sanitizer() -> None:
    y = torch.zeros(64)
    launch(one("threadgroup float a[64];\na[i] = 2.0f;\ny[i] = a[i];"), y, sanitizer="address")
    assert y.eq(2).all()
    with pytest.raises(RuntimeError, match=r"heap-buffer-overflow[^$]*kernels.metal:5"):
        launch(one("\ny[i + 1] = 1.0f;"), y, sanitizer="address")
    with pytest.raises(RuntimeError, match=r"use-after-poison[^$]*kernels.metal:6"):      # of one array into the next
        launch(one("threadgroup float a[64];\nthreadgroup float b[64];\na[i + 1] = 2.0f;\nb[i] = 1.0f;\ny[i] = b[i];"), y,
               sanitizer="address")
    quads = one("y[i] = 1.0f;", "device float4* y [[buffer(0)]]")
    launch(quads, torch.zeros(260)[4:], sanitizer="address")
    with pytest.raises(RuntimeError, match=r"kernels.metal:4:\d+: runtime error: .*misaligned"):
        launch(quads, torch.zeros(260)[1:257], sanitizer="address")


# --- text that is no Metal

@pytest.mark.parametrize(("body", "said"), [
    ("y[i] = z;", "kernels.metal:4:8: error: use of undeclared identifier 'z'"),
    ("double z = 1; y[i] = z;", "MSL_has_no_double"),
    ("if constexpr (true) y[i] = 1.0f;", "constexpr if is incompatible with C"),
    ("auto [a, b] = int2(1, 2); y[i] = a;", "declarations are incompatible with C"),
    ("thread float* p = y; p[i] = 1.0f;", "device float"),
    ("threadgroup float s[4]; device float* p = s; y[i] = p[0];", "'device float *' with an lvalue of type"),
    ("y[i] = max(y[i], 0);", "no matching function for call to 'max'"),
    ("simdgroup_half8x8 m; simdgroup_load(m, y); y[i] = 0;", "a matrix and its memory are of one type"),
    ("threadgroup float a[4], b[4]; y[i] = a[0];", "error")])
def test_text_that_does_not_compile(body: str, said: str) -> None:
    with pytest.raises(SyntaxError) as caught:
        compile_shader(one(body))
    assert [word in str(caught.value) for word in (said, "kernels.metal:4:")] == [True, True], caught.value


@pytest.mark.parametrize(("parameter", "said"), [
    ("threadgroup float* s [[threadgroup(0)]]", "threadgroup"), ("device float* z [[buffer(31)]]", "buffer"),
    ("texture2d<float> t [[texture(0)]]", "texture"), ("device float* z", "no attribute")])
def test_parameters_that_torch_cannot_pass(parameter: str, said: str) -> None:
    with pytest.raises(SyntaxError, match=said):
        compile_shader(one("", parameter))


def test_function_constants_are_refused() -> None:
    with pytest.raises(SyntaxError, match="function_constant"):
        compile_shader(one("y[i] = k;", before="constant int k [[function_constant(0)]];\n"))


def test_text_is_ascii() -> None:
    with pytest.raises(RuntimeError, match="ASCII"):
        compile_shader(one("// \u2265"))


# --- calls as torch takes them

def test_names_and_limits() -> None:
    library = compile_shader(one("y[i] = 1.0f;") + """
kernel [[max_total_threads_per_threadgroup(64)]] void g(device int* x [[buffer(0)]]) {}
template <class T> [[kernel]] void h(device T* x [[buffer(0)]]) { x[0] = T(3); }
template [[host_name("h_int")]] [[kernel]] decltype(h<int>) h<int>;
""")
    assert sorted(dir(library)) == ["f", "g", "h_int"]
    assert library.f is library.f
    assert [library.f.max_threads_per_threadgroup, library.g.max_threads_per_threadgroup] == [1024, 64]
    assert library.f.thread_execution_width == 32
    library.h_int(x := torch.zeros(1, dtype=torch.int32), threads=1)
    assert x.item() == 3
    with pytest.raises(RuntimeError, match="no kernel 'h'"):
        _ = library.h
    for kernel, group in ((library.f, (32, 33)), (library.g, (65, 1))):
        with pytest.raises(ValueError, match="is the most here"):
            kernel(torch.zeros(2048), threads=(2048, 1), group_size=group)
    with pytest.raises(RuntimeError, match="1 buffers"):
        library.f(threads=1, group_size=1)


def test_arguments() -> None:
    library = compile_shader(HEAD + """
struct Mixed { uint a; float b; short c; uchar d[2]; };
kernel void numbers(device float* y [[buffer(0)]], constant Mixed& m [[buffer(1)]], constant long& n [[buffer(2)]],
                    constant float& x [[buffer(3)]], constant int* list [[buffer(4)]], constant half& h [[buffer(5)]],
                    constant bfloat& b [[buffer(6)]], constant long* wide [[buffer(7)]]) {
    y[0] = m.a; y[1] = m.b; y[2] = m.c; y[3] = m.d[1]; y[4] = n; y[5] = x; y[6] = list[1]; y[7] = h; y[8] = float(b);
    y[9] = wide[1];
}
""")
    y = torch.full((12,), -1.0)
    library.numbers(y[1:], list(struct.pack("<Ifh2B", 7, 0.5, -3, 8, 9)), -(1 << 40), 1.25, (5, -6), 0.1, 3.0, [1, -2],
                    threads=1, group_size=1, arg_casts={1: "uint8", 4: "int32", 5: "fp16", 6: "bf16"})
    half = float(torch.tensor(0.1, dtype=torch.float16))
    assert y.tolist() == [-1.0, 7.0, 0.5, -3.0, 9.0, -float(1 << 40), 1.25, -6.0, half, 3.0, -2.0, -1.0]
    for wrong, failure in (([], RuntimeError), (None, TypeError), (torch.zeros(2, dtype=torch.float64), TypeError)):
        with pytest.raises(failure):
            library.numbers(wrong, *[y] * 7, threads=1, group_size=1)


def test_views_within_one_storage() -> None:
    both = torch.arange(8.0).view(4, 2)
    swap = one("float x = a[2 * at]; a[2 * at] = b[2 * at] + 1.0f; b[2 * at] = -x;",
               "device float* a [[buffer(0)]], device float* b [[buffer(1)]]")
    launch(swap, both[:, 0], both[:, 1], threads=4, group_size=2)
    assert both.tolist() == [[2.0, -0.0], [4.0, -2.0], [6.0, -4.0], [8.0, -6.0]]


def test_the_grid_and_groups_that_are_not_whole() -> None:
    """dispatchThreads: the last groups are smaller, and say so."""
    y = torch.zeros(3, 5, 7, 8, dtype=torch.int32)
    compile_shader(HEAD + """kernel void f(device int* y [[buffer(0)]], uint3 at [[thread_position_in_grid]],
            ushort3 in [[thread_position_in_threadgroup]], uint3 group [[threadgroup_position_in_grid]],
            uint3 size [[threads_per_threadgroup]], uint3 whole [[dispatch_threads_per_threadgroup]],
            uint3 groups [[threadgroups_per_grid]], uint3 grid [[threads_per_grid]],
            ushort lane [[thread_index_in_simdgroup]], ushort simdgroup [[simdgroup_index_in_threadgroup]],
            uint simdgroups [[simdgroups_per_threadgroup]]) {
        device int* to = y + ((at.z * grid.y + at.y) * grid.x + at.x) * 8;
        to[0] = in.x + 10 * in.y; to[1] = group.x + 10 * group.y + 100 * group.z; to[2] = size.x * size.y; to[3] = whole.x;
        to[4] = groups.x + 10 * groups.y; to[5] = lane; to[6] = simdgroup; to[7] = simdgroups; }""").f(
        y, threads=(7, 5, 3), group_size=(4, 2, 1))
    assert y[2, 4, 6].tolist() == [2, 221, 3, 4, 32, 2, 0, 1]
    assert y[1, 3, 5].tolist() == [11, 111, 6, 4, 32, 4, 0, 1]
    wide = torch.zeros(70)
    launch(one("y[at] = simd_sum(1.0f);"), wide, threads=70, group_size=70)
    assert wide.tolist() == [32.0] * 64 + [6.0] * 6


def test_seeds_change_the_order_and_no_bit() -> None:
    order = one("y[at] = atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);",
                "device float* y [[buffer(0)]], device atomic_uint* n [[buffer(1)]]")
    seen = []
    for seed in (0, 1, 2, 2):
        x, y = torch.arange(128.0), torch.zeros(256)
        with schedule(seed):
            compile_shader(TURN).turn(x, y, threads=128, group_size=64)
        assert torch.equal(y[128:], x.view(2, 64).flip(1).flatten() + 1.0)
        y = torch.zeros(128)
        compile_shader(order, seed=seed).f(y, torch.zeros(1, dtype=torch.int32), threads=128, group_size=64)
        assert sorted(y.tolist()) == list(range(128))
        seen.append(y.tolist())
    assert seen[0] == list(range(128)) != seen[1] != seen[2] == seen[3]


# --- the standard library against plain numbers

X = torch.arange(32.0)
SIMD: dict[str, Callable[[], Tensor]] = {
    "simd_sum(x[i])": lambda: X.sum().expand(32), "simd_max(x[i])": lambda: X.max().expand(32),
    "simd_min(x[i])": lambda: X.min().expand(32),
    "simd_product(1.0f + x[i] / 64.0f)": lambda: (1 + X / 64).prod().expand(32),
    "simd_prefix_exclusive_sum(x[i])": lambda: X.cumsum(0) - X, "simd_prefix_inclusive_sum(x[i])": lambda: X.cumsum(0),
    "simd_shuffle(x[i], (lane * 5) % 32)": lambda: X * 5 % 32, "simd_shuffle_xor(x[i], 9)": lambda: (X.int() ^ 9).float(),
    "simd_shuffle_down(x[i], 3)": lambda: torch.where(X < 29, X + 3, X),
    "simd_shuffle_up(x[i], 3)": lambda: torch.where(X >= 3, X - 3, X),
    "simd_broadcast(x[i], 11)": lambda: torch.full((32,), 11.0),
    "simd_broadcast_first(x[i] + 2.0f)": lambda: torch.full((32,), 2.0),
    "simd_any(i == 4)": lambda: torch.ones(32), "simd_all(i < 31)": lambda: torch.zeros(32),
    "simd_or(1u << (i % 5))": lambda: torch.full((32,), 31.0), "simd_and(i | 8)": lambda: torch.full((32,), 8.0),
    "simd_xor(i == 3 ? 5u : 0u)": lambda: torch.full((32,), 5.0),
    "simd_sum(half(0.5h)) + float(simd_max(bfloat(x[i])))": lambda: torch.full((32,), 47.0),
    "simd_sum(float2(x[i], 1.0f)).y": lambda: torch.full((32,), 32.0)}
MATH = {
    "exp(v)": torch.exp, "fast::exp2(v)": torch.exp2, "precise::log(v)": torch.log, "metal::log2(v)": torch.log2,
    "sqrt(v)": torch.sqrt, "rsqrt(v)": torch.rsqrt, "tanh(v)": torch.tanh, "sin(v)": torch.sin, "atan2(v, 2.0f)": lambda v:
    torch.atan2(v, torch.tensor(2.0)), "pow(v, 1.5f)": lambda v: v ** 1.5, "floor(v)": torch.floor, "rint(v)": torch.round,
    "fma(v, 2.0f, 1.0f)": lambda v: 2 * v + 1, "clamp(v, 1.0f, 2.0f)": lambda v: v.clamp(1, 2), "fract(v)": torch.frac,
    "mix(v, 3.0f, 0.25f)": lambda v: 0.75 * v + 0.75, "max(v, NAN) + min(INFINITY, v)": lambda v: 2 * v,
    "abs(-v) + fabs(-v) - sign(-v)": lambda v: 2 * v + 1, "select(v, 1.0f, i < 4)": lambda v: torch.where(v < 0.9, 1.0, v),
    "saturate(v)": lambda v: v.clamp(0, 1), "as_type<float>(as_type<uint>(v) ^ 0x80000000u)": torch.neg,
    "float(half(v))": lambda v: v.half().float(),
    "float(bfloat(v) * bfloat(v))": lambda v: (v.bfloat16() * v.bfloat16()).float(),
    "dot(float4(v), float4(1, 2, float2(3.0)))": lambda v: 9 * v, "float3(v, float2(1.0, 2.0)).zyx.z": lambda v: v,
    "isnan(v) + isinf(v) + popcount(7u) + clz(1u)": lambda v: torch.full_like(v, 34.0),
    "numeric_limits<half>::max() + 0 * v": lambda v: torch.full_like(v, 65504.0),
    "numeric_limits<float>::lowest() + 0 * v": lambda v: torch.full_like(v, torch.finfo().min)}


def test_operations_of_a_simdgroup() -> None:
    body = "\n".join(f"y[{32 * n} + i] = {expression};" for n, expression in enumerate(SIMD))
    y = torch.zeros(len(SIMD), 32)
    compile_shader(one(body, "device const float* x [[buffer(0)]], device float* y [[buffer(1)]]")).f(
        X, y, threads=32, group_size=32)
    for row, (expression, right) in zip(y, SIMD.items()):
        torch.testing.assert_close(row, right(), msg=expression)


def test_mathematics() -> None:
    x = (X + 1) / 5
    y = torch.zeros(len(MATH), 32)
    body = "float v = x[i];\n" + "\n".join(f"y[{32 * n} + i] = {expression};" for n, expression in enumerate(MATH))
    compile_shader(one(body, "device const float* x [[buffer(0)]], device float* y [[buffer(1)]]")).f(
        x, y, threads=32, group_size=32)
    for row, (expression, right) in zip(y, MATH.items()):
        torch.testing.assert_close(row, right(x), rtol=1e-5, atol=1e-6, msg=expression)


def test_vectors() -> None:
    assert lanes("""float4 a = float4(x[i]); a.xy = a.zw * 2.0; a.w = 1; float4 b = 3.0f;
uint2 u = uint2(i, 1u); half4 h = half4(a); y[i] = a.x + a.y + a.w + b.z + float(u.y) + float(h.w) + length(float2(3, 4));"""
                 ).equal(4 * X + 11)
    sizes = "".join(f'static_assert(sizeof({name}) == {n}, "");'
                    for name, n in dict(float3=16, half3=8, uint2=8, char4=4, simdgroup_half8x8=4).items())
    compile_shader(one(sizes))


def test_constructors_say_every_component() -> None:
    with pytest.raises(SyntaxError, match="as many components as the vector has"):
        compile_shader(one("float4 v = float4(1.0f, 2.0f); y[i] = v.x;"))


@pytest.mark.parametrize(("name", "dtype"), [("float", torch.float32), ("half", torch.float16), ("bfloat", torch.bfloat16)])
def test_matrices_of_a_simdgroup(name: str, dtype: torch.dtype) -> None:
    library = compile_shader(HEAD + f"""
kernel void f(device const {name}* a [[buffer(0)]], device const {name}* b [[buffer(1)]], device float* c [[buffer(2)]],
              device {name}* d [[buffer(3)]], uint lane [[thread_index_in_simdgroup]]) {{
    threadgroup {name} tile[8 * 12];
    for (uint i = lane; i < 96; i += 32) tile[i] = b[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<{name}, 8, 8> A, B, D;
    simdgroup_float8x8 C = make_filled_simdgroup_matrix<float, 8, 8>(1.0f), E;
    simdgroup_load(A, a + 2, 10);
    simdgroup_load(B, tile, 12, ulong2(0), true);
    simdgroup_multiply_accumulate(C, A, B, C);
    simdgroup_store(C, c, 8);
    simdgroup_multiply(E, A, B);
    E.thread_elements()[0] = C.thread_elements()[0];        // even columns
    simdgroup_store(E, c + 64, 8, 0, true);
    simdgroup_multiply(D, A, simdgroup_matrix<{name}, 8, 8>({name}(2.0f)));
    simdgroup_store(D, d, 8);
}}""")
    torch.manual_seed(0)
    a, b = torch.randn(8, 10).to(dtype), torch.randn(8, 12).to(dtype)
    c, d = torch.zeros(2, 8, 8), torch.zeros(8, 8).to(dtype)
    library.f(a, b, c, d, threads=32, group_size=32)
    product = a[:, 2:].float() @ b[:, :8].float().T
    torch.testing.assert_close(c[0], product + 1)
    torch.testing.assert_close(c[1].T, product + torch.tensor([1.0, 0.0] * 4))
    assert torch.equal(d, 2 * a[:, 2:])


def test_atomics() -> None:
    names = ("fetch_add", "fetch_sub", "fetch_max", "fetch_min", "fetch_or", "fetch_xor", "exchange")
    n = torch.tensor([5, 500, 5, 5, 0, 0, 0], dtype=torch.int32)
    f = torch.zeros(1)
    body = "".join(f"atomic_{name}_explicit(n + {k}, int(at), memory_order_relaxed);" for k, name in enumerate(names))
    body += """threadgroup atomic_int t[1]; atomic_store_explicit(t, 3, memory_order_relaxed);
atomic_fetch_add_explicit(x, 0.5f * atomic_load_explicit(t, memory_order_relaxed), memory_order_relaxed);"""
    launch(one(body, "device atomic_int* n [[buffer(0)]], device atomic_float* x [[buffer(1)]]"), n, f, threads=8,
           group_size=8)
    assert n.tolist() == [33, 472, 7, 0, 7, 0, 7]
    assert f.item() == 12.0


# --- the compiler

def test_no_compiler_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator.shutil, "which", lambda name: None)
    monkeypatch.setattr(emulator.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install ziglang, or apt-get install clang"):
        emulator.compiler.__wrapped__()
