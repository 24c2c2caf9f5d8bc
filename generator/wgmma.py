"""The text of one warpgroup matrix instruction, for exactly the shape and types in use.

CuTe wraps only some n and falls back silently to small ones for others; its extended table costs
seconds of front end. The interface is that of CUTLASS's atoms (`cute/arch/mma_sm90_gmma.hpp`):
two descriptors and the accumulators. Source: PTX ISA, wgmma.mma_async.
"""

from __future__ import annotations

from warploom.generator.elements import Element

WARPGROUP = 128  # threads
WGMMA_M = 64  # rows of one wgmma


class TemplateText(str):
    """Text of more than one token that the generator wrote itself; templates take it as it is."""

    __slots__ = ()


_WIDTH = 32  # operands per line of emitted text


def _lines(items: list[str], indent: str, join: str) -> str:
    rows = [items[i : i + _WIDTH] for i in range(0, len(items), _WIDTH)]
    return (join.rstrip() + "\n" + indent).join(join.join(row) for row in rows)


def wgmma(
    a: Element,
    b: Element,
    n: int,
    *,
    name: str = "Wgmma",
    a_in_registers: bool = False,
    a_k_major: bool = True,
    b_k_major: bool = True,
    has_k: bool = True,
    sparse: bool = False,
) -> TemplateText:
    """Return the C++ struct `name` with `fma(a, b, d, add)` for one 64 x n instruction.

    `a` and `b` are shared-memory descriptors, `d` the thread's n/2 accumulators: float, or int32_t
    for int8 operands. With `a_in_registers` (K-major) `a` is instead the thread's four registers of
    A: of 16 bits two elements each, laid out as two 8-column fragments of an accumulator.
    `has_k`: whether the struct has kK, the k of an instruction.
    With `sparse` A is 2:4 sparse and in shared memory: it has half of the columns, and the struct
    has `fma<kSelector>(a, b, metadata, d, add)`, whose `metadata` is a word of each thread.
    Where `add` is false by a constant the product overwrites them, and the compiler may use their
    registers for something else until then (a run-time flag pins them through the epilogue: 4 to
    130 bytes of spills).
    """
    integer = a.is_integer
    count = n // 2
    accumulator, letter, kind = ("int32_t", "r", "s32") if integer else ("float", "f", "f32")
    scales = "" if integer else ", 1, 1"
    a_major = "" if a_in_registers else f", {int(not a_k_major)}"
    majors = f"{a_major}, {int(not b_k_major)}" if a.bits == 16 else ""
    registers = [f"%{i}" for i in range(count)]
    quoted = ',"\n        "'.join(
        ",".join(registers[i : i + _WIDTH]) for i in range(0, count, _WIDTH)
    )
    outputs = _lines([f'"+{letter}"(d[{i}])' for i in range(count)], " " * 10, ", ")
    k = a.wgmma_k * (1 + sparse)
    shape = f"m64n{n}k{k}"
    if a_in_registers:
        layouts, a_type, a_count = "A in registers, B by descriptor,", "const uint32_t (&a)[4]", 4
        a_text = f"{{{','.join(f'%{count + i}' for i in range(4))}}}"
        a_input = ", ".join(f'"r"(a[{i}])' for i in range(4))
    else:
        layouts, a_type, a_count = "A and B by descriptor,", "uint64_t a", 1
        a_text, a_input = f"%{count}", '"l"(a)'
    b_index = count + a_count
    operands, inputs = f"{a_text}, %{b_index}", f'{a_input}, "l"(b)'
    metadata, selected = "", ""
    if sparse:
        layouts = "sparse A and B by descriptor, metadata and"
        metadata = f"uint32_t metadata,\n{' ' * 45}"
        selected = "\n  template <int kSelector>"
        operands += f", %{b_index + 1}, %{b_index + 2}"
        inputs += ', "r"(metadata), "n"(kSelector)'
    predicate = b_index + 1 + 2 * sparse
    constant = f"\n  static constexpr int kK = {k};\n" if has_k else ""
    signature = f"{a_type}, uint64_t b, {metadata}{accumulator} (&d)[{count}], bool add"
    return TemplateText(f"""\
// D[64 x {n}] += A[64 x {k}] * B[{k} x {n}]; {layouts} D in registers.
struct {name} {{{constant}{selected}
  __device__ __forceinline__ static void fma({signature}) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{predicate}, 0;\\n"
        "wgmma.mma_async{".sp" * sparse}.sync.aligned.{shape}.{kind}.{a.wgmma}.{b.wgmma} {{"
        "{quoted}}}, {operands}, add{scales}{majors};\\n}}\\n"
        : {outputs}
        : {inputs}, "r"(int(add)));
  }}
}};""")
