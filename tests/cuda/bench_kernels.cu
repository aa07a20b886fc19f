#include "bench_kernels.h"

enum { FMA_BLOCKS = 132 * 16, FMA_THREADS = 256, FMA_CHAINS = 8, FMA_UNROLLED = 64 };

// An integer hash that mixes all bits: lowbias32 of Christopher Wellons.
static __device__ uint32_t mix(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

static __global__ void fill(float *to, size_t n, uint32_t seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t a = mix((uint32_t)i ^ mix((uint32_t)(i >> 32) + seed)), b = mix(a + 0x9e3779b9u);
        to[i] = sqrtf(-2.0f * logf(((float)a + 1.0f) * 2.3283062e-10f)) * cospif((float)b * 4.6566129e-10f);
    }
}

void bench_fill(float *to, size_t n, uint32_t seed, cudaStream_t stream)
{
    fill<<<132 * 16, 256, 0, stream>>>(to, n, seed);
}

static __global__ void copy(uint4 *to, const uint4 *from, size_t n)
{
    size_t step = (size_t)gridDim.x * blockDim.x, i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        to[i] = a;
        to[i + step] = b;
        to[i + 2 * step] = c;
        to[i + 3 * step] = d;
    }
    for (; i < n; i += step) to[i] = from[i];
}

void bench_copy(char *to, const char *from, size_t n, cudaStream_t stream)
{
    copy<<<132 * 8, 512, 0, stream>>>((uint4 *)to, (const uint4 *)from, n / 16);
}

static __global__ void multiply_adds(int rounds, float *sink)
{
    float x[FMA_CHAINS], a = (float)threadIdx.x * 1e-3f, b = (float)blockIdx.x * 1e-3f;
    for (int c = 0; c < FMA_CHAINS; c++) x[c] = (float)c;
    for (int r = 0; r < rounds; r++) {
#pragma unroll
        for (int i = 0; i < FMA_UNROLLED; i++) {
#pragma unroll
            for (int c = 0; c < FMA_CHAINS; c++) x[c] = fmaf(x[c], a, b);
        }
    }
    float sum = 0.0f;
    for (int c = 0; c < FMA_CHAINS; c++) sum += x[c];
    if (sum == 1.2345f) *sink = sum; // the compiler must not remove the loop
}

double bench_multiply_adds(int rounds) { return (double)rounds * FMA_BLOCKS * FMA_THREADS * FMA_CHAINS * FMA_UNROLLED; }

void bench_run_multiply_adds(int rounds, float *sink, cudaStream_t stream)
{
    multiply_adds<<<FMA_BLOCKS, FMA_THREADS, 0, stream>>>(rounds, sink);
}
