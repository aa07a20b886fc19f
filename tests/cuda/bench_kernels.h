// The benchmark's own kernels: they make data and measure the two limits of the GPU.
#ifndef TQKV_TESTS_CUDA_BENCH_KERNELS_H
#define TQKV_TESTS_CUDA_BENCH_KERNELS_H
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

// n Gaussian floats, different for each seed.
void bench_fill(float *to, size_t n, uint32_t seed, cudaStream_t stream);
void bench_copy(char *to, const char *from, size_t n, cudaStream_t stream); // n: a multiple of 16
// bench_run_multiply_adds does bench_multiply_adds(rounds) multiply-adds in all.
double bench_multiply_adds(int rounds);
void bench_run_multiply_adds(int rounds, float *sink, cudaStream_t stream);

#endif
