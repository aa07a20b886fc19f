"""What the builder must refuse, with the line: {name: (body of a kernel, what is said)}. The line of interest ends
with `// here`."""

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
kernel void tqkv_refused(device uint *out [[buffer(0)]]{argument})
{{
    {body}
}}
"""


def shaders():
    """{name: (text, line, what is said)}"""
    found = {}
    for name, (body, said) in BODIES.items():
        text = SHADER.format(name=name, argument="", body=body)
        line = next(i for i, text_line in enumerate(text.splitlines(), 1) if "// here" in text_line)
        found[name] = (text, line, said)
    for name, (argument, said) in ARGUMENTS.items():
        use = "out[0] = at;" if "[[thread" in argument else "out[0] = uint(sizeof(*at));"
        text = SHADER.format(name=name, argument=f", {argument}", body=use)
        line = next(i for i, text_line in enumerate(text.splitlines(), 1) if text_line.startswith("kernel"))
        found["argument_" + name] = (text, line, said)
    return found
