// AIR's functions for modules that run on the machine of simt.h. A meeting point is known by the address that it is
// called from: copies of one barrier on divergent paths are found.
#include <metal_stdlib> // the shim's: one text of what lanes do together
#include <math.h>
#include <stdint.h>
#include <string.h>

#define HERE "air", (int)(intptr_t)__builtin_return_address(0)
#define AIR(result, name, label, parameters) \
    extern "C" result name parameters __asm__("air." label); \
    result name parameters

AIR(float, air_fma, "fma.f32", (float a, float b, float c)) { return fmaf(a, b, c); }
AIR(float, air_rint, "rint.f32", (float x)) { return rintf(x); }
AIR(float, air_fmax, "fmax.f32", (float a, float b)) { return fmaxf(a, b); }
AIR(float, air_fmin, "fmin.f32", (float a, float b)) { return fminf(a, b); }
AIR(float, air_sqrt, "sqrt.f32", (float x)) { return sqrtf(x); }
AIR(float, air_tanh, "tanh.f32", (float x)) { return tanhf(x); }
AIR(float, air_exp2, "fast_exp2.f32", (float x)) { return exp2f(x); }
AIR(float, air_from_u32, "convert.f.f32.u.i32", (uint32_t x)) { return (float)x; }
AIR(float, air_from_s32, "convert.f.f32.s.i32", (int32_t x)) { return (float)x; }
// Modules pass narrow integers as they are: the bits above them may be anything.
AIR(float, air_from_u16, "convert.f.f32.u.i16", (uint32_t x)) { return (float)(uint16_t)x; }
AIR(float, air_from_u8, "convert.f.f32.u.i8", (uint32_t x)) { return (float)(uint8_t)x; }
AIR(float, air_from_s8, "convert.f.f32.s.i8", (uint32_t x)) { return (float)(int8_t)x; }
AIR(uint32_t, air_to_u32, "convert.u.i32.f.f32", (float x)) { return (uint32_t)x; }
AIR(int32_t, air_to_s32, "convert.s.i32.f.f32", (float x)) { return (int32_t)x; }

AIR(void, air_wg_barrier, "wg.barrier", (int32_t flags, int32_t))
{
    metal::threadgroup_barrier((metal::mem_flags)flags, HERE);
}
AIR(void, air_simdgroup_barrier, "simdgroup.barrier", (int32_t flags, int32_t))
{
    metal::simdgroup_barrier((metal::mem_flags)flags, HERE);
}
AIR(float, air_shuffle_f, "simd_shuffle.f32", (float v, uint16_t lane)) { return metal::simd_shuffle(v, lane, HERE); }
AIR(uint32_t, air_shuffle_u, "simd_shuffle.u.i32", (uint32_t v, uint16_t lane))
{
    return metal::simd_shuffle(v, lane, HERE);
}
AIR(float, air_shuffle_xor_f, "simd_shuffle_xor.f32", (float v, uint16_t mask))
{
    return metal::simd_shuffle_xor(v, mask, HERE);
}
AIR(uint32_t, air_shuffle_xor_u, "simd_shuffle_xor.u.i32", (uint32_t v, uint16_t mask))
{
    return metal::simd_shuffle_xor(v, mask, HERE);
}
AIR(float, air_simd_sum, "simd_sum.f32", (float v)) { return metal::simd_sum(v, HERE); }
AIR(float, air_simd_max, "simd_max.f32", (float v)) { return metal::simd_max(v, HERE); }
// LLVM passes an i1 with its other bits unset.
AIR(uint8_t, air_simd_any, "simd_any", (uint8_t v)) { return metal::simd_any(v & 1, HERE); }
// launch.py calls it with the two elements of each matrix that a lane uses.
typedef float two_floats __attribute__((vector_size(8)));
extern "C" two_floats air_multiply_accumulate(float a, float b, float c, float d, float x, float y);
two_floats air_multiply_accumulate(float a, float b, float c, float d, float x, float y)
{
    metal::simdgroup_matrix<float, 8, 8> left, right, sum;
    left.elements.x = a, left.elements.y = b, right.elements.x = c, right.elements.y = d;
    sum.elements.x = x, sum.elements.y = y;
    metal::simdgroup_multiply_accumulate(sum, left, right, sum, HERE);
    return two_floats{sum.elements.x, sum.elements.y};
}
AIR(void, air_store, "atomic.global.store.i32", (uint32_t * at, uint32_t v, int32_t, int32_t, bool))
{
    __atomic_store_n(at, v, __ATOMIC_RELAXED);
}
AIR(uint32_t, air_add, "atomic.local.add.u.i32", (uint32_t * at, uint32_t v, int32_t, int32_t, bool))
{
    return __atomic_fetch_add(at, v, __ATOMIC_RELAXED);
}

// LLVM calls this for fpext of a half where the processor has no instruction.
extern "C" float air_half(uint16_t bits) __asm__("__gnu_h2f_ieee");
float air_half(uint16_t bits)
{
    const half own = {bits};
    return own;
}
