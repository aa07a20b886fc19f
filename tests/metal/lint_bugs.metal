// One offence a line, marked with the rule of lint.py that must find it. Never compiled.
#include <metal_stdlib>
#include <cmath> // lint: include
using namespace metal;

constant float table[2] = {1.0f, 2.0f}; // lint: table-in-shader
constant uint format [[function_constant(3)]]; // lint: raw-constant-index
struct pair { float a, b; };
struct triple : pair { float c; }; // lint: inheritance

inline void good(device const float *source, threadgroup float *shared, uint lane) { shared[lane] = source[lane]; }
inline void unnamed(float *pointer, device float *out) // lint: address-space
{
    out[0] = pointer[0];
}
inline void unnamed_reference(pair &p, float (&x)[4]) // lint: address-space
{
    p.a = x[0];
}
inline void unnamed_matrix(simdgroup_matrix<float, 8, 8> &m) { m = m; } // lint: address-space
float plain(float x) { return x; } // lint: not-inline
inline float wide(float x) { return x * 2.0; } // lint: double
inline float wider(double x) { return x; } // lint: double
inline float narrow(float x) { return x + 1.0h; } // lint: half-literal
inline float named(float thread) { return 0.0f; } // lint: reserved-name
inline void casts(device const uchar *bytes, threadgroup float *shared)
{
    device const uint *words = (device const uint *)bytes;
    threadgroup uint *wrong = (threadgroup uint *)bytes; // lint: cast-between-address-spaces
    device float *also_wrong = (device float *)(shared + 4); // lint: cast-between-address-spaces
    threadgroup float memory[32]; // lint: local-threadgroup-memory
    auto f = [](uint x) { return x; }; // lint: lambda
    float root = sqrt(2.0f) + precise::sqrt(2.0f); // lint: unnamed-precision
    float inverse = precise::rsqrt(2.0f); // lint: rsqrt
    float e = exp(1.0f); // lint: unnamed-precision
    float4 v;
    float2 two = v.xy; // lint: swizzle
    static uint count; // lint: static
    tqkv__rows_args copy = args; // lint: struct-copy
    float other = simd_shuffle_xor(root, 1); // lint: shuffle-index-type
    int distance = 2, half = 4; // lint: half-as-name
    float *p = new float; // lint: forbidden-word // lint: address-space
    goto end; // lint: forbidden-word
}
template <int D>
inline void fine(constant tqkv__rows_args &args, thread float (&x)[D], uint lane)
{
    x[0] = simd_shuffle_xor(x[0], ushort(lane & 1u)) * 1e-10f;
}
kernel float returns(device float *out [[buffer(0)]]) // lint: kernel-returns
{
}
kernel void arguments(
    device float *no_attribute, // lint: one-attribute
    device float *two_attributes [[buffer(0)]] [[buffer(1)]], // lint: one-attribute
    device float *right [[buffer(2)]],
    device float *twice [[buffer(2)]], // lint: attribute-twice
    thread float *private_memory [[buffer(3)]], // lint: argument-type
    float by_value [[buffer(4)]], // lint: argument-type
    device float *too_far [[buffer(31)]], // lint: argument-type
    threadgroup float *shared [[threadgroup(0)]],
    float lane [[thread_index_in_simdgroup]], // lint: argument-type
    uint unknown [[thread_index_in_warp]]) // lint: argument-type
{
}
