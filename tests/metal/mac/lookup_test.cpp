// Runs each way of lookup.metal on the machine of simt.h, and compares its sums with double precision.
#include "gpu.h"
#include <random>
#include <stdio.h>

namespace
{

enum { N_WAYS = 10, FIRST_BYTE_WAY = 7, N_SIMDGROUPS = 4, N_THREADS = N_SIMDGROUPS * simt::simd_width, N_ROUNDS = 2 };

// Value i of a lane's words of a round: a centroid or a signed byte.
double looked_up(const uint32_t *words, int way, int i)
{
    if (way < FIRST_BYTE_WAY) return (double)tqkv__tables.codebook_4[words[i / 8] >> (i % 8 * 4) & 15];
    return (double)(int8_t)(words[i / 4] >> (i % 4 * 8));
}

// How far the sum of thread t is off, of the length of what it adds up.
double error_of(int way, int t, const std::vector<uint32_t> &codes, const std::vector<float> &weights, float sum)
{
    const int values = way < FIRST_BYTE_WAY ? 32 : 16, n_weights = values / 4;
    double expected = 0, size = 0;
    for (int i = 0; i < N_ROUNDS * values; i++) {
        const uint32_t *words = &codes[(size_t)((i / values * N_THREADS + t) * 4)];
        const double product = looked_up(words, way, i % values) * (double)weights[(size_t)(i % n_weights)];
        expected += product;
        size += product * product;
    }
    return fabs((double)sum - expected) / sqrt(size);
}

bool is_right(int way)
{
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::vector<uint32_t> codes((size_t)(N_ROUNDS * N_THREADS * 4));
    std::vector<float> weights(8), sums((size_t)N_THREADS);
    for (uint32_t &word : codes) word = (uint32_t)generator();
    for (float &weight : weights) weight = normal(generator);
    const tqkv__rotate_args args = {N_ROUNDS};
    const std::string wrong = gpu_dispatch("lookup", 0, 0)
                                  .constant(TQKV_FC_FORMAT, way)
                                  .input(0, &args, sizeof args)
                                  .input(1, codes.data(), codes.size() * sizeof(uint32_t))
                                  .input(2, weights.data(), weights.size() * sizeof(float))
                                  .output(3, sums.data(), sums.size() * sizeof(float))
                                  .memory(0, 2 * TQKV__TABLE_BYTES)
                                  .run({1, 1, 1}, N_SIMDGROUPS);
    if (!wrong.empty()) return printf("FAIL lookup/%d: %s\n", way, wrong.c_str()), false;
    for (int t = 0; t < N_THREADS; t++) {
        const double error = error_of(way, t, codes, weights, sums[(size_t)t]);
        if (!(error < 2e-5)) return printf("FAIL lookup/%d: thread %d is off by %g\n", way, t, error), false;
    }
    return true;
}

} // namespace

int main()
{
    int passed = 0;
    gpu_schedules = {{simt::ascending, 1, 0xff, false}, {simt::descending, 1, 0x00, false}};
    for (int way = 0; way < N_WAYS; way++) passed += is_right(way);
    printf("%d passed, %d failed\n", passed, N_WAYS - passed);
    return passed != N_WAYS;
}
