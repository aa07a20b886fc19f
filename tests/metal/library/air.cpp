// AIR's functions for modules that run on the machine of simt.h. A meeting point is known by the address that it is
// called from: copies of one barrier on divergent paths are found.
#include "simt.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

#define HERE "air", (int)(intptr_t)__builtin_return_address(0)
#define AIR(result, name, label, parameters) \
    extern "C" result name parameters __asm__("air." label); \
    result name parameters

template <class T>
static T posted(const simt::slot *slots, unsigned lane)
{
    T value;
    memcpy(&value, slots[lane].bytes, sizeof value);
    return value;
}

template <class T>
static T shuffled(T value, unsigned lane, const char *operation, const char *file, int line)
{
    if (lane >= simt::simd_width) simt::bad_lane(operation, lane, file, line);
    return posted<T>(simt::exchange(&value, sizeof value, operation, file, line), lane);
}

static unsigned lane_xor(uint16_t mask) { return simt::current->thread_index_in_simdgroup ^ mask; }

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
    simt::barrier(simt::threadgroup_scope, flags != 0, HERE);
}
AIR(void, air_simdgroup_barrier, "simdgroup.barrier", (int32_t flags, int32_t))
{
    simt::barrier(simt::simdgroup_scope, flags != 0, HERE);
}
AIR(float, air_shuffle_f, "simd_shuffle.f32", (float v, uint16_t lane))
{
    return shuffled(v, lane, "simd_shuffle", HERE);
}
AIR(uint32_t, air_shuffle_u, "simd_shuffle.u.i32", (uint32_t v, uint16_t lane))
{
    return shuffled(v, lane, "simd_shuffle", HERE);
}
AIR(float, air_shuffle_xor_f, "simd_shuffle_xor.f32", (float v, uint16_t mask))
{
    return shuffled(v, lane_xor(mask), "simd_shuffle_xor", HERE);
}
AIR(uint32_t, air_shuffle_xor_u, "simd_shuffle_xor.u.i32", (uint32_t v, uint16_t mask))
{
    return shuffled(v, lane_xor(mask), "simd_shuffle_xor", HERE);
}
AIR(float, air_simd_sum, "simd_sum.f32", (float v))
{
    const simt::slot *slots = simt::exchange(&v, sizeof v, "simd_sum", HERE);
    float sum = posted<float>(slots, 0);
    for (unsigned i = 1; i < simt::simd_width; i++) sum += posted<float>(slots, i);
    return sum;
}
AIR(float, air_simd_max, "simd_max.f32", (float v))
{
    const simt::slot *slots = simt::exchange(&v, sizeof v, "simd_max", HERE);
    float most = posted<float>(slots, 0);
    for (unsigned i = 1; i < simt::simd_width; i++) most = fmaxf(most, posted<float>(slots, i));
    return most;
}
AIR(uint8_t, air_simd_any, "simd_any", (uint8_t v)) // LLVM passes an i1 with its other bits unset
{
    v &= 1;
    const simt::slot *slots = simt::exchange(&v, sizeof v, "simd_any", HERE);
    uint8_t any = 0;
    for (unsigned i = 0; i < simt::simd_width; i++) any |= posted<uint8_t>(slots, i);
    return any;
}
// launch.py calls it with the two elements of each matrix that a lane uses.
typedef float float2 __attribute__((vector_size(8)));
extern "C" float2 air_multiply_accumulate(float a, float b, float c, float d, float x, float y);
float2 air_multiply_accumulate(float a, float b, float c, float d, float x, float y)
{
    const float elements[] = {a, b, c, d};
    const simt::slot *slots = simt::exchange(elements, sizeof elements, "simdgroup_multiply_accumulate", HERE);
    const simt::matrix_place place = simt::matrix_places[simt::current->thread_index_in_simdgroup];
    for (unsigned k = 0; k < 8; k++) {
        float left[4], right[4];
        memcpy(left, slots[simt::lane_of_matrix_place(place.row, k)].bytes, sizeof left);
        memcpy(right, slots[simt::lane_of_matrix_place(k, place.column)].bytes, sizeof right);
        x = fmaf(left[k % 2], right[2], x);
        y = fmaf(left[k % 2], right[3], y);
    }
    return float2{x, y};
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
    simt::count_half();
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                       : exponent == 0 ? ldexpf((float)fraction, -24)
                                       : ldexpf((float)(fraction + 1024), exponent - 25);
    return bits >> 15 ? -size : size;
}
