"""Shaders for the builder alone: what it must refuse, and what it must put into older forms."""

# {name: (body of a kernel, what is said)}. The line of interest ends with `// here`.
BODIES = {
    "instruction": ("out[0] = uint(ulong(out)); // here", "instruction ptrtoint"),
    "function_of_llvm": ("out[0] = uint(__builtin_ctz(out[1])); // here", r"call of llvm\.cttz\.i32"),
    "function_of_metal": ("out[0] = uint(cospi(1.0f)); // here", "undeclared identifier 'cospi'"),
    "function_not_inlined": ("out[0] = apart(out[1]); // here", "a call that is not inlined|call of _Z5apartj"),
    "integer": ("_BitInt(40) x = out[0]; out[0] = uint(x * x >> 3); // here", "integer type i40|integer type i80"),
    "global_of_threads": ("const uint n[4] = {3, 1, 4, 1};\n    out[0] = n[out[1]]; // here", "a global: @__const"),
    "alignment": ("*(device low_float4 *)out = float4(1.0f); // here", "alignment of a vector"),
    "double": ("out[0] = uint(double(out[1]) * 2.5); // here", r"call of air\.convert|double"),
}
BY_CLANG = {"function_of_metal"}
# {name: (declaration of the argument, what is said)}: the kernel's own line is named.
ARGUMENTS = {
    "position": ("uint at [[thread_position_in_grid]]", r"argument at: uint \[\[thread_position_in_grid\]\]"),
    "pointee": ("device ulong *at [[buffer(1)]]", "argument at: a pointer to ulong"),
    "field": ("device inner *at [[buffer(1)]]", "inner.y: a field of type half"),
}
SHADER = """// {name}
#include <metal_stdlib>
using namespace metal;
typedef float low_float4 __attribute__((ext_vector_type(4), aligned(4)));
typedef struct inner {{ float x; half y; }} inner;
__attribute__((noinline)) uint apart(uint x) {{ return x * x + 1u; }}
kernel void tqkv_{name}(device uint *out [[buffer(0)]]{argument})
{{
    {body}
}}
"""


def refused():
    """{name: (text, line, what is said)}"""
    rows = [(name, "", body, said) for name, (body, said) in BODIES.items()]
    used = "out[0] = uint(sizeof at);"
    rows += [("argument_" + name, ", " + argument, used, said) for name, (argument, said) in ARGUMENTS.items()]
    found = {}
    for name, argument, body, said in rows:
        text = SHADER.format(name=name, argument=argument, body=body)
        before = text[:text.index("// here" if "// here" in body else "kernel")]
        found[name] = (text, before.count("\n") + 1, said)
    return found


# A kernel of what the shaders have at some optimisation level and Metal's older runtimes have not; x: 4 words.
LOWERED = """#include <metal_stdlib>
using namespace metal;
kernel void tqkv_lowered(device uint *out [[buffer(0)]], device const uint *x [[buffer(1)]],
                         device const uchar *bytes [[buffer(2)]])
{
    int a = int(x[0]), b = int(x[1]);
    out[0] = __builtin_elementwise_min(x[0], x[1]);
    out[1] = __builtin_elementwise_max(x[0], x[1]);
    out[2] = uint(__builtin_elementwise_min(a, b));
    out[3] = uint(__builtin_elementwise_max(a, b));
    out[4] = as_type<uint>(-as_type<float>(x[2]));
    out[5] = as_type<uint>(float(x[0]));
    out[6] = as_type<uint>(float(a));
    out[7] = uint(as_type<float>(x[3]));
    out[8] = uint(int(as_type<float>(x[2])));
    device const uchar *at = bytes + x[1];
    out[9] = at[x[1] + 1u];
    out[10] = max(x[0], x[1]) - x[1];
    out[11] = max(x[1], x[0]) - x[0];
    device uchar *to = (device uchar *)(out + 12) + x[1];
    to[1] = uchar(at[0]);
    to[x[1]] = 7;
}
"""


def lowered(x, bits):
    """What that kernel writes, of x and of the bits of floats; bytes count up from 0 and words from 12 on are zero."""
    words = [min(x[0], x[1]), max(x[0], x[1]), x[0], x[1], bits(-2.5), bits(float(x[0])), bits(float(x[0] - 2**32)), 9,
             2**32 - 0 + 2, 2 * x[1] + 1, max(x[0] - x[1], 0), max(x[1] - x[0], 0)]
    memory = bytearray(16)
    memory[x[1] + 1], memory[2 * x[1]] = x[1], 7
    return [w % 2**32 for w in words], bytes(memory)


# Its calls of AIR, for this machine.
CONVERSIONS = """
float from_u(unsigned x) __asm__("air.convert.f.f32.u.i32");
float from_u(unsigned x) { return (float)x; }
float from_s(int x) __asm__("air.convert.f.f32.s.i32");
float from_s(int x) { return (float)x; }
unsigned to_u(float x) __asm__("air.convert.u.i32.f.f32");
unsigned to_u(float x) { return (unsigned)x; }
int to_s(float x) __asm__("air.convert.s.i32.f.f32");
int to_s(float x) { return (int)x; }
"""
