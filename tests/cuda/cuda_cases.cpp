// Cases that need the speed of a real GPU: random problems over longer contexts, a million positions, stores of more
// than 4 GiB.
#include "../metal/shader_cases.h"
#include <math.h>

namespace
{

struct long_row {
    length_row context;
    int n_stretches;
};

void run_random(const void *parameters)
{
    const shape_row *row = (const shape_row *)parameters;
    check_attend(row->problem, {row->split});
}

// The number decides all function constants. So the random problems need few pipelines: one for each pair of formats
// and head_dim.
shape_row pipeline_row(int number)
{
    const tqkv_format pairs[8][2] = {{TQKV_TQ4, TQKV_TQ4}, {TQKV_I8, TQKV_TQ4}, {TQKV_F16, TQKV_F16},
                                     {TQKV_TQ5, TQKV_TQ6}, {TQKV_TQ8, TQKV_I8}, {TQKV_TQ6, TQKV_TQ5},
                                     {TQKV_F16, TQKV_TQ8}, {TQKV_TQ3, TQKV_TQ2}};
    shape_row row = {attend_default_row(pairs[number % 8][0], pairs[number % 8][1], gpu_head_dims[number / 8 % 10]),
                     {}};
    row.split.columns = number % 3 ? GPU_MOST : 1 + number % 2;
    row.problem.n_queries = number % 2 ? 1 : 2;
    row.problem.tree = number % 6 == 4;
    row.problem.softcap = number % 5 ? 0.0f : 3.0f;
    row.problem.query_basis = number % 7 ? TQKV_ORIGINAL : TQKV_ROTATED;
    row.problem.key_center = number % 6 == 1 ? 2.0f : 0.0f;
    row.problem.key_spread = number % 3 == 1 ? 10.0f : 0.0f;
    row.problem.value_spread = number % 5 == 2 ? 10.0f : 0.0f;
    row.problem.exact_first = row.problem.exact_last = number % 4 == 3;
    return row;
}

void add_random(int seed, int n_pipelines, bool listing)
{
    data_random random = {(uint64_t)seed + 1000000};
    shape_row row = pipeline_row(seed % n_pipelines);
    attend_row &p = row.problem;
    p.bits_alone = listing;
    p.n_kv_heads = 1 + data_below(&random, 4);
    p.group = 1 + data_below(&random, 9);
    if (p.n_queries > 1) p.n_queries = 2 + data_below(&random, data_below(&random, 4) ? 8 : p.tree ? 63 : 70);
    p.key_ring = p.value_ring = data_below(&random, 2) != 0;
    int work = p.head_dim * p.n_kv_heads * p.group * p.n_queries;
    int most = work > 100000 ? 200 : work > 10000 ? 1000 : 4000;
    p.key_capacity = p.value_capacity = 32 + data_below(&random, most);
    p.end = p.key_ring ? 1 + data_below(&random, 3 * p.key_capacity) : 1 + data_below(&random, p.key_capacity);
    int resident = p.end < p.key_capacity ? (int)p.end : p.key_capacity;
    p.kv_len = data_below(&random, 2) ? 0 : 1 + data_below(&random, resident);
    p.window = data_below(&random, 2) ? 0 : 1 + data_below(&random, p.key_capacity);
    p.scale = data_below(&random, 3) ? 0.0f : 0.05f;
    p.block_scale = p.head_dim >= 512 && data_below(&random, 2) ? 1.25f : 0.0f;
    p.query_size = data_below(&random, 4) ? 1.5f : 10.0f; // the bound holds to that size of scores
    p.sinks = (attend_sinks)data_below(&random, 4);
    if (p.exact_last) {
        p.exact_first = 1 + data_below(&random, p.key_capacity);
        p.exact_last = 1 + data_below(&random, 300);
    }
    row.split.n_simdgroups = 1 + data_below(&random, 8);
    row.split.n_stretches = 1 + data_below(&random, 40);
    row.split.share = GPU_EACH + data_below(&random, 3);
    test_add(run_random, &row, sizeof row, "random_gpu/%d", seed);
}

// All bytes are legal codes. Halves are finite, and norms have the size of real ones.
void fill_at_random(const tqkv_store &s, uint64_t seed)
{
    data_random random = {seed};
    uint64_t *words = (uint64_t *)s.codes;
    const uint64_t below_two = UINT64_C(0xbfffbfffbfffbfff);
    for (size_t i = 0; i < s.codes_size / sizeof *words; i++)
        words[i] = data_bits(&random) & (s.format == TQKV_F16 ? below_two : UINT64_MAX);
    const float typical = s.format == TQKV_I8 ? 0.02f : sqrtf((float)s.head_dim);
    for (size_t i = 0; i < s.norms_size / sizeof(float); i++)
        s.norms[i] = typical * (0.5f + (float)data_below(&random, 1024) / 1024.0f);
}

// Against C: double precision would take longer than all other cases.
void run_long(const void *parameters)
{
    const long_row *row = (const long_row *)parameters;
    const full_context context(row->context);
    const tqkv_attention &a = context.call;
    fill_at_random(context.keys, 31);
    fill_at_random(context.values, 32);
    size_t d = (size_t)row->context.head_dim, n_rows = (size_t)(a.n_heads * a.n_queries);
    std::vector<float> q(n_rows * d), expected(n_rows * d);
    data_rows(33, DATA_GAUSSIAN, q.data(), (int)n_rows, row->context.head_dim);
    CHECK_RESULT(tqkv_attend(&a, q.data(), expected.data()), TQKV_OK);
    const std::vector<double> reference(expected.begin(), expected.end());
    const double most = reference_gpu_difference(row->context.keys, TQKV_FORMAT_DEFAULT, row->context.values, 1.0);
    for (gpu_split split : {as_planned, gpu_split{GPU_MOST, 4, row->n_stretches}}) {
        std::vector<float> got(n_rows * d, NAN);
        CHECK_RUN(gpu_attend(&a, q.data(), got.data(), split));
        for (size_t i = 0; i < n_rows; i++) {
            double error = reference_relative_error(&got[i * d], &reference[i * d], d);
            CHECK(error <= most, "row %zu: relative error %.3g", i, error);
        }
    }
}

// A million positions in double precision, in a linear store or in a ring that has wrapped.
void add_million(tqkv_format keys, tqkv_format values, int n_queries, bool ring, int shrink)
{
    const int positions = (1 << 20) / shrink;
    shape_row row = {attend_default_row(keys, values, 128), {GPU_MOST, 4, 66}};
    row.problem.n_kv_heads = 1;
    row.problem.n_queries = n_queries;
    row.problem.key_capacity = row.problem.value_capacity = positions;
    row.problem.key_ring = row.problem.value_ring = ring;
    row.problem.end = positions + (ring ? 12345 : 0);
    test_add(run_shape, &row, sizeof row, "million/%s_%s/queries%d%s", tqkv_format_name(keys), tqkv_format_name(values),
             n_queries, ring ? "/ring" : "");
}

} // namespace

void cuda_shader_cases(bool listing)
{
    const int n_pipelines = 80, shrink = listing ? 64 : 1; // listing runs nothing, so sizes do not matter
    for (int seed = 0; seed < 1500; seed++)
        add_random(seed, n_pipelines, listing); // which positions are halves matters
    add_million(TQKV_TQ4, TQKV_TQ4, 1, false, shrink);
    add_million(TQKV_I8, TQKV_TQ4, 1, true, shrink);
    add_million(TQKV_TQ4, TQKV_TQ4, 3, true, shrink);
    add_length({TQKV_I8, TQKV_F16, 32, 1, 8, 512, (1 << 20) / shrink, 0});
    add_length({TQKV_TQ4, TQKV_TQ4, 128, 1, 2, 16, (1 << 20) / shrink, 0});
    add_length({TQKV_I8, TQKV_TQ5, 64, 8, 1, 1, (1 << 20) / shrink, 0});
    add_length({TQKV_F16, TQKV_I8, 32, 64, 1, 3, (1 << 17) / shrink, 0});
    // 6, 8 and 4.5 GiB of codes a stream
    const long_row rows[] = {{{TQKV_F16, TQKV_F16, 128, 24, 2, 1, (1 << 20) / shrink, 0}, 8},
                             {{TQKV_I8, TQKV_TQ8, 1024, 1, 2, 1, (8 << 20) / shrink, 0}, 64},
                             {{TQKV_TQ4, TQKV_TQ4, 128, 8, 2, 1, (9 << 20) / shrink, 0}, 16}};
    for (const long_row &row : rows)
        test_add(run_long, &row, sizeof row, "long/%s_%s/d%d", tqkv_format_name(row.context.keys),
                 tqkv_format_name(row.context.values), row.context.head_dim);
}
