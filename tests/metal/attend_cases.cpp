// attend and attend_merge against the double-precision reference, on the same codes. Every case runs twice: as tqkv.h
// plans it, and divided as the case says.
#include "../attend_option_list.h"
#include "shader_cases.h"
#ifdef GPU_CUDA
#include "../cuda/products.h"
#endif
#include <algorithm>
#include <math.h>

enum { PLANNED_MATRIX_GROUP = 8 }; // groups of as many heads and more are planned by matrices

// Each way to divide attention, and where head_dim has two kernels, the last way with both.
static std::vector<gpu_split> with_both_kernels(std::vector<gpu_split> splits, const attend_row &row)
{
    if (!gpu_has_matrices(row.head_dim)) return splits;
    splits.push_back(splits.back());
    splits.back().kernel = GPU_MATRICES;
    splits[splits.size() - 2].kernel = GPU_LANES;
    return splits;
}

size_t check_attend(const attend_row &row, const std::vector<gpu_split> &splits)
{
    const std::vector<gpu_split> ways = with_both_kernels(splits, row);
    attend_problem problem;
    attend_set_up_floats(&problem, &row);
    for (const gpu_split &split : ways) {
        std::string what = std::string(split.kernel == GPU_MATRICES ? "by matrices, " : "") + "columns " +
                           std::to_string(split.columns) + ", simdgroups " + std::to_string(split.n_simdgroups) +
                           ", stretches " + std::to_string(split.n_stretches) + ", share " +
                           std::to_string(split.share);
        std::fill_n(problem.out, problem.n_rows * problem.value_dim, NAN);
        CHECK_RUN(gpu_attend(&problem.attention, problem.q, problem.out, split));
#ifdef GPU_CUDA
        // gpu_force leaves calls of several parts as they are planned.
        const bool planned = !split.kernel || row.exact_first || row.exact_last,
                   matrices = planned ? row.group >= PLANNED_MATRIX_GROUP : split.kernel == GPU_MATRICES;
        problem.allowed = matrices && gpu_has_matrices(row.head_dim) ? error_of_products : nullptr;
#endif
        attend_check(&problem, problem.out, what.c_str());
    }
    attend_tear_down(&problem);
    return ways.size();
}

// The call's query number `query` alone, over the positions that it sees in the call.
static tqkv_attention call_of_one_query(const tqkv_attention &call, int query)
{
    tqkv_attention a = call;
    a.end = call.end - call.n_queries + query + 1;
    a.kv_len = (int)(a.end - reference_attention_shape(&call).oldest);
    a.n_queries = 1;
    return a;
}

// Query number `query` of a call whose result is `out` must have the same bits in a call of its own, divided in another
// way.
static void check_alone(const tqkv_attention &call, const float *q, const float *out, int query, gpu_split split)
{
    const tqkv_attention a = call_of_one_query(call, query);
    const size_t heads = (size_t)a.n_heads, q_values = heads * (size_t)reference_attention_shape(&a).key_dim,
                 values = heads * (size_t)a.values->head_dim;
    std::vector<float> alone(values, NAN);
    if (a.kv_len <= 0) return;
    CHECK_RUN(gpu_attend(&a, q + (size_t)query * q_values, alone.data(), split));
    CHECK(!memcmp(alone.data(), out + (size_t)query * values, values * sizeof(float)),
          "query %d of %d has other bits alone", query, call.n_queries);
}

// Encodes Gaussian rows and their sums with `mean`, 4096 rows again and again.
static void fill_with_mean(const tqkv_store &s, uint64_t seed, float mean)
{
    const int n = 4096;
    std::vector<float> rows((size_t)(n * s.n_kv_heads * s.head_dim));
    data_rows(seed, DATA_GAUSSIAN, rows.data(), n * s.n_kv_heads, s.head_dim);
    for (float &x : rows) x += mean;
    for (int first = 0; first < s.capacity; first += n)
        CHECK_RESULT(tqkv_encode(&s, rows.data(), std::min(n, s.capacity - first), first), TQKV_OK);
}

full_context::full_context(const length_row &row)
    : keys(test_store(row.keys, row.head_dim, row.n_kv_heads, row.positions, false)),
      values(test_store(row.values, row.head_dim, row.n_kv_heads, row.positions, false)), call()
{
    call.keys = &keys;
    call.values = &values;
    call.n_heads = row.n_kv_heads * row.group;
    call.n_queries = row.n_queries;
    call.end = row.positions;
}

full_context::~full_context()
{
    test_store_free(&keys);
    test_store_free(&values);
}

// Values with a mean, where one float sum over the context loses digits.
static void run_length(const void *parameters)
{
    const length_row *row = (const length_row *)parameters;
    const full_context context(*row);
    const tqkv_attention &a = context.call;
    fill_with_mean(context.keys, 31, 0.0f);
    fill_with_mean(context.values, 32, 1.0f);
    const size_t d = (size_t)row->head_dim, heads = (size_t)a.n_heads, n_rows = heads * (size_t)a.n_queries;
    std::vector<float> q(n_rows * d), out(n_rows * d, NAN);
    std::vector<double> expected(heads * d);
    data_rows(33, DATA_GAUSSIAN, q.data(), (int)n_rows, row->head_dim);
    for (float &x : q) x *= 3.0f; // scores of standard deviation 3
    CHECK_RUN(gpu_attend(&a, q.data(), out.data(), {0, 0, 0, row->share}));
    for (int query = 0; query < a.n_queries; query += std::max(1, a.n_queries - 1)) {
        const tqkv_attention alone = call_of_one_query(a, query);
        reference_attend_as(REFERENCE_FLOATS, &alone, &q[(size_t)query * heads * d], expected.data());
        for (size_t head = 0; head < heads; head++) {
            const size_t at = (size_t)query * heads + head;
            const double error = reference_relative_error(&out[at * d], &expected[head * d], d);
            CHECK(error <= 2e-6, "query %d, head %d: relative error %.3g", query, (int)head, error); // one sum: 1e-5
        }
        if (a.n_queries > 1) check_alone(a, q.data(), out.data(), query, as_planned);
    }
}

void add_length(const length_row &row)
{
    test_add(run_length, &row, sizeof row, "attend/length/%s_%s/d%d/heads%d_group%d_queries%d/%d/share%d",
             tqkv_format_name(row.keys), tqkv_format_name(row.values), row.head_dim, row.n_kv_heads, row.group,
             row.n_queries, row.positions, row.share);
}

namespace
{

struct shader_attend_row {
    attend_row problem;
    gpu_split split;
};

void run_attend(const void *parameters)
{
    const shader_attend_row *row = (const shader_attend_row *)parameters;
    check_attend(row->problem, {as_planned, row->split});
}

// A context long enough for tqkv.h to split it.
void run_planned(const void *parameters)
{
    const attend_row *row = (const attend_row *)parameters;
    attend_problem problem;
    attend_set_up_floats(&problem, row);
    const gpu_attention attention(problem.attention);
    const tqkv_metal_buffer none = gpu_buffer(nullptr);
    tqkv_metal_plan plan;
    CHECK_RESULT(tqkv_metal_plan_attend(&attention.metal, none, none, none, &plan), TQKV_OK);
    CHECK(gpu_args<tqkv__merge_args>(plan.d[1]).n_partials > 1, "the plan does not split this context");
    attend_tear_down(&problem);
    check_attend(*row, {as_planned});
}

shader_attend_row default_row(tqkv_format keys, tqkv_format values, int head_dim)
{
    shader_attend_row row = {attend_default_row(keys, values, head_dim), {GPU_MOST, 2, 1}};
    return row;
}

void add(const shader_attend_row &row, const char *what) { test_add(run_attend, &row, sizeof row, "attend/%s", what); }

void add_pairs()
{
    for (tqkv_format keys : test_formats)
        for (tqkv_format values : test_formats) {
            std::string pair = std::string("pair/") + tqkv_format_name(keys) + "_" + tqkv_format_name(values);
            shader_attend_row row = default_row(keys, values, 64);
            row.split = {2, 2, 1};
            add(row, (pair + "/d64").c_str());
            row = default_row(keys, values, 512);
            row.problem.end = 34;
            row.split = {2, 1, 2};
            add(row, (pair + "/d512").c_str());
        }
}

// Every head_dim with every width of keys and of values.
void add_head_dims()
{
    const tqkv_format formats[] = {TQKV_F16, TQKV_TQ5, TQKV_I8, TQKV_TQ8, TQKV_TQ4, TQKV_TQ6, TQKV_TQ3, TQKV_TQ2};
    for (int head_dim : gpu_head_dims)
        for (int i = 0; i < 8; i++) {
            shader_attend_row row = default_row(formats[i], formats[(i + 2) % 8], head_dim);
            row.problem.n_queries = 2;
            row.problem.window = i % 2 ? 11 : 0;
            row.problem.block_scale = head_dim >= 512 ? 1.25f : 0.0f;
            add(row, ("head_dim/d" + std::to_string(head_dim) + "/" + tqkv_format_name(formats[i])).c_str());
        }
}

// Keys of 192 with values of 128: every width of either.
void add_unequal_dims()
{
    for (int i = 0; i < TEST_FORMATS; i++) {
        shader_attend_row row = default_row(test_formats[i], test_formats[(i * 3 + 1) % TEST_FORMATS], 192);
        row.problem.value_dim = 128;
        row.problem.n_queries = 1 + i % 3;
        row.problem.key_center = i % 2 ? 0.5f : 0.0f;
        row.problem.value_center = i % 4 == 1 ? 4.0f : 0.0f;
        row.problem.sinks = i % 3 == 1 ? SINKS_SOME : SINKS_NONE;
        row.split = {GPU_MOST, 2, 3, GPU_EACH + i % 3};
        add(row, (std::string("dims/d192_128/") + tqkv_format_name(row.problem.key_format)).c_str());
    }
}

// Typed queries and outputs against the floats of the same values, divided in the same way: the outputs are the rounded
// floats, bit for bit.
struct typed_attend_row {
    shader_attend_row row;
    tqkv_type query_type, output_type;
};

void run_types(const void *parameters)
{
    const typed_attend_row *row = (const typed_attend_row *)parameters;
    attend_problem problem;
    attend_set_up_floats(&problem, &row->row.problem);
    const size_t n_q = problem.n_rows * problem.head_dim, n_out = problem.n_rows * problem.value_dim;
    tqkv_attention typed = problem.attention;
    std::vector<uint16_t> q(n_q + 1), out(n_out + 1, 0xffff); // at odd multiples of 2 bytes
    typed.query_type = row->query_type;
    for (size_t i = 0; i < n_q; i++) {
        q[i + 1] = reference_narrow(row->query_type, problem.q[i]);
        problem.q[i] = (float)reference_wide(row->query_type, q[i + 1]);
    }
    CHECK_RUN(gpu_attend(&problem.attention, problem.q, problem.out, row->row.split));
    typed.output_type = row->output_type;
    CHECK_RUN(gpu_attend(&typed, q.data() + 1, out.data() + 1, row->row.split));
    for (size_t i = 0; i < n_out; i++) {
        const uint16_t expected = reference_narrow(row->output_type, problem.out[i]);
        CHECK(out[i + 1] == expected, "value %zu: %.9g became %04x, not %04x", i, (double)problem.out[i], out[i + 1],
              expected);
    }
    attend_tear_down(&problem);
}

// Values far from 0 become infinite halves, and values near it subnormal ones.
void add_types()
{
    const int head_dims[] = {128, 80, 192, 1024, 48, 192, 64, 256};
    for (int i = 0; i < 8; i++) {
        typed_attend_row row = {default_row(i % 2 ? TQKV_I8 : TQKV_F16, TQKV_TQ8, head_dims[i]),
                                i % 2 ? TQKV_TYPE_F16 : TQKV_TYPE_BF16, i < 3 ? TQKV_TYPE_F16 : TQKV_TYPE_BF16};
        row.row.problem.value_dim = i == 5 ? 128 : 0;
        row.row.problem.n_queries = 1 + i % 3;
        row.row.problem.value_center = i == 0 ? 70000.0f : i == 1 ? 1e-5f : 0.0f;
        row.row.problem.output_basis = i % 3 == 1 ? TQKV_ROTATED : TQKV_ORIGINAL;
        row.row.problem.bits_alone = true;
        row.row.split.kernel = i >= 6 ? GPU_MATRICES : GPU_LANES;
        test_add(run_types, &row, sizeof row, "attend/types/%d", i);
    }
}

// Query heads of a KV head, queries, columns, simdgroups, stretches, what a threadgroup adds up.
void add_shapes()
{
    const int shapes[][6] = {
        {1, 1, 1, 1, 1, GPU_EACH},      {1, 1, 8, 4, 1, GPU_EVERYTHING},    {2, 1, 2, 4, 3, GPU_EACH},
        {3, 1, 2, 2, 2, GPU_EACH},      {8, 1, 8, 4, 2, GPU_SECTIONS},      {16, 1, 8, 1, 4, GPU_EVERYTHING},
        {5, 3, 8, 2, 40, GPU_SECTIONS}, {1, 17, 8, 2, 2, GPU_EACH},         {4, 9, 3, 4, 40, GPU_EVERYTHING},
        {2, 40, 32, 1, 5, GPU_EACH},    {2, 45, 32, 2, 40, GPU_EVERYTHING}, {1, 1, 1, 8, 40, GPU_EACH},
        {2, 2, 1, 3, 7, GPU_EACH},      {2, 200, 8, 2, 40, GPU_EVERYTHING}, {1, 600, 32, 4, 3, GPU_EVERYTHING}};
    for (const int *shape : shapes) {
        shader_attend_row row = default_row(TQKV_I8, TQKV_TQ4, 128);
        row.problem.end = 100;
        row.problem.key_capacity = row.problem.value_capacity = 110;
        if (shape[1] > 17) row.problem.end = 44; // more queries than positions: the first ones see nothing
        const int prefill = shape[1] > 100 ? shape[1] + 30 : 0;
        if (prefill) row.problem.end = row.problem.key_capacity = row.problem.value_capacity = prefill;
        if (prefill > 600) row.problem.n_kv_heads = 1; // half of the time
        row.problem.group = shape[0];
        row.problem.n_queries = shape[1];
        row.split = {shape[2], shape[3], shape[4], shape[5]};
        add(row, ("shape/group" + std::to_string(shape[0]) + "_queries" + std::to_string(shape[1]) + "_columns" +
                  std::to_string(shape[2]) + "_simdgroups" + std::to_string(shape[3]) + "_stretches" +
                  std::to_string(shape[4]) + "_share" + std::to_string(shape[5]))
                     .c_str());
    }
}

// 50 stretches in 4 sections. attend_merge has as many simdgroups as attend here, and takes the sections in two rounds.
void add_sections()
{
    shader_attend_row row = default_row(TQKV_I8, TQKV_TQ4, 32);
    row.problem.n_kv_heads = 1;
    row.problem.n_queries = 2;
    row.problem.end = 4800;
    row.problem.key_capacity = row.problem.value_capacity = 4800;
    for (int share : {GPU_EACH, GPU_SECTIONS, GPU_EVERYTHING}) {
        row.split = {0, 2, 150, share};
        add(row, ("sections/simdgroups2_share" + std::to_string(share)).c_str());
    }
}

// capacity of keys and values, end, kv_len, window
void add_residency(const char *name, int key_capacity, int value_capacity, bool ring, int64_t end, int kv_len,
                   int window)
{
    shader_attend_row row = default_row(TQKV_TQ4, TQKV_F16, 64);
    row.problem.key_capacity = key_capacity;
    row.problem.value_capacity = value_capacity;
    row.problem.key_ring = row.problem.value_ring = ring;
    row.problem.end = end;
    row.problem.kv_len = kv_len;
    row.problem.window = window;
    row.problem.n_queries = 3;
    row.split = {GPU_MOST, 2, 2};
    add(row, (std::string("resident/") + name).c_str());
    row.problem.key_format = TQKV_F16;
    row.problem.value_format = TQKV_I8;
    row.problem.n_queries = 1;
    row.split = {GPU_MOST, 1, 3};
    add(row, (std::string("resident/") + name + "/one_query").c_str());
}

void add_all_residencies()
{
    add_residency("exactly_full", 64, 64, false, 64, 0, 0);
    add_residency("one_position", 64, 64, false, 1, 0, 0);
    add_residency("short_store", 7, 7, false, 5, 0, 0);
    add_residency("short_ring_wrapped", 7, 7, true, 23, 0, 0);
    add_residency("ring_full", 50, 50, true, 1050, 0, 0);
    add_residency("ring_partly_filled", 50, 50, true, 1000000000037, 21, 0);
    add_residency("ring_wraps_inside_tile", 96, 96, true, 1010, 96, 0);
    add_residency("ring_wraps_short_last_tile", 70, 70, true, 155, 66, 0);
    add_residency("newest_of_linear", 100, 100, false, 90, 33, 0);
    add_residency("window", 100, 100, false, 90, 0, 13);
    add_residency("window_ring", 70, 70, true, 1000, 0, 40);
    add_residency("window_beyond_resident", 70, 70, true, 1000, 30, 64);
    add_residency("window_of_one", 70, 70, true, 1000, 0, 1);
    add_residency("different_capacities", 70, 45, true, 1000, 0, 0);
    add_residency("different_capacities_window", 45, 70, true, 1000, 40, 17);
    add_residency("short_keys_long_values", 20, 70, true, 1000, 0, 0);
    shader_attend_row row = default_row(TQKV_I8, TQKV_TQ4, 64);
    row.problem.key_ring = true;
    row.problem.key_capacity = 40;
    row.problem.value_capacity = 200;
    row.problem.end = 150;
    add(row, "resident/ring_keys_linear_values");
}

void add_options()
{
    shader_attend_row row = default_row(TQKV_I8, TQKV_TQ4, 64);
    row.problem.softcap = 5.0f;
    row.problem.query_size = 20.0f;
    add(row, "option/softcap");
    row = default_row(TQKV_TQ8, TQKV_TQ8, 64);
    row.problem.scale = 0.3f;
    add(row, "option/scale");
    row.problem.query_size = 60.0f; // scores in the hundreds, which grow from tile to tile
    row.problem.end = 200;
    row.problem.key_capacity = row.problem.value_capacity = 200;
    row.split = {GPU_MOST, 2, 2};
    add(row, "option/large_scores");
    for (tqkv_format format : {TQKV_TQ4, TQKV_TQ6}) { // beside large sinks the error of a row is that of its one score
        row = default_row(format, format, 512);
        row.problem.n_kv_heads = 1;
        row.problem.group = row.problem.n_queries = 8;
        row.problem.window = 1;
        row.problem.sinks = SINKS_DOMINATING;
        row.problem.query_size = 10.0f;
        add(row, (std::string("option/one_score/d512/") + tqkv_format_name(format)).c_str());
    }
    for (int sinks = SINKS_SOME; sinks <= SINKS_MINUS_INFINITY; sinks++) {
        row = default_row(TQKV_I8, TQKV_TQ4, 64);
        row.problem.sinks = (attend_sinks)sinks;
        row.problem.n_queries = 45; // some see nothing
        row.split = {GPU_MOST, 2, 2};
        add(row, ("option/sinks" + std::to_string(sinks)).c_str());
    }
    for (int bases = 1; bases < 4; bases++) {
        row = default_row(TQKV_TQ4, TQKV_TQ5, 128);
        row.problem.query_basis = bases & 1 ? TQKV_ROTATED : TQKV_ORIGINAL;
        row.problem.output_basis = bases & 2 ? TQKV_ROTATED : TQKV_ORIGINAL;
        add(row, ("option/bases" + std::to_string(bases)).c_str());
    }
    row = default_row(TQKV_F16, TQKV_TQ8, 128);
    row.problem.values_unrotated = true;
    add(row, "option/hybrid");
    row = default_row(TQKV_TQ6, TQKV_TQ8, 128);
    row.problem.keys_unrotated = true;
    add(row, "option/unrotated_keys");
}

// Stores of 100 slots, in two stretches with two simdgroups each.
shader_attend_row row_of_100(tqkv_format keys, tqkv_format values, int n_queries, int64_t end, bool ring, int window,
                             attend_poison poison)
{
    shader_attend_row row = default_row(keys, values, 64);
    row.problem.n_queries = n_queries;
    row.problem.end = end;
    row.problem.key_capacity = row.problem.value_capacity = 100;
    row.problem.key_ring = row.problem.value_ring = ring;
    row.problem.window = window;
    row.problem.poison = poison;
    row.split = {GPU_MOST, 2, 2};
    return row;
}

void add_non_causal(const char *name, int n_queries, int64_t end, bool ring, int window, attend_poison poison)
{
    shader_attend_row row = row_of_100(TQKV_TQ4, TQKV_F16, n_queries, end, ring, window, poison);
    row.problem.non_causal = true;
    add(row, (std::string("option/non_causal/") + name).c_str());
}

void add_all_non_causal()
{
    add_non_causal("plain", 6, 90, false, 0, POISON_NONE);
    add_non_causal("window", 40, 90, false, 5, POISON_NONE);
    add_non_causal("wide_window", 70, 90, false, 50, POISON_NONE);
    add_non_causal("window_ring", 12, 240, true, 30, POISON_NONE);
    add_non_causal("more_queries_than_positions", 12, 5, false, 0, POISON_NONE);
    add_non_causal("before_start", 30, 8, false, 12, POISON_NONE); // some see a part, some nothing
    add_non_causal("far", 3, INT64_MAX, true, 7, POISON_NONE);
    add_non_causal("poison", 30, 70, false, 4, POISON_NEWEST);
}

void add_tree(const char *name, int n_queries, int64_t end, bool ring, int window, attend_poison poison,
              tqkv_format format)
{
    shader_attend_row row = row_of_100(format, format, n_queries, end, ring, window, poison);
    row.problem.tree = true;
    row.problem.n_kv_heads = n_queries == 64 ? 1 : 2;
    add(row, (std::string("tree/") + name).c_str());
}

void add_trees()
{
    add_tree("nine", 9, 40, false, 0, POISON_NONE, TQKV_I8);
    add_tree("64", 64, 100, false, 0, POISON_NONE, TQKV_TQ4);
    add_tree("ring", 20, 175, true, 0, POISON_NONE, TQKV_I8);
    add_tree("window", 30, 220, true, 6, POISON_NONE, TQKV_TQ5);
    add_tree("before_start", 12, 5, false, 0, POISON_NONE, TQKV_F16);
    add_tree("poison", 9, 70, false, 0, POISON_BRANCH, TQKV_TQ4);
    add_tree("poison_f16", 9, 70, false, 0, POISON_BRANCH, TQKV_F16);
}

// A query with a full mask has the bits of one without a tree, whatever the others see.
void run_full_tree(const void *parameters)
{
    const int kernel = *(const int *)parameters;
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    row.n_queries = 37;
    row.end = 90;
    row.key_capacity = row.value_capacity = 96;
    row.tree = row.bits_alone = true;
    attend_problem problem;
    attend_set_up_floats(&problem, &row);
    for (int i = 0; i < row.n_queries; i += 2) problem.tree[i] = i % 4 ? UINT64_MAX : ((uint64_t)2 << i) - 1;
    const size_t token = problem.n_rows / (size_t)row.n_queries * problem.value_dim;
    std::vector<float> without(problem.n_rows * problem.value_dim);
    CHECK_RUN(gpu_attend(&problem.attention, problem.q, problem.out, {0, 0, 0, 0, kernel}));
    problem.attention.tree = nullptr;
    CHECK_RUN(gpu_attend(&problem.attention, problem.q, without.data(), {0, 0, 0, 0, kernel}));
    for (size_t i = 0; i < (size_t)row.n_queries; i += 2)
        CHECK(!memcmp(&without[i * token], problem.out + i * token, token * sizeof(float)), "query %zu", i);
    attend_tear_down(&problem);
}

// Sizes of the centres, softcap, sinks, both bases.
void add_centers()
{
    const float options[][5] = {{3.0f, 3.0f, 0.0f, 0, 0},    {1000.0f, 1000.0f, 0.0f, 0, 0}, {0.5f, 2.0f, 0.0f, 1, 0},
                                {0.5f, 0.0f, 0.0f, 1, 1},    {1.0f, 0.0f, 4.0f, 0, 0},       {1.0f, 3.0f, 4.0f, 1, 1},
                                {0.0f, 1000.0f, 0.0f, 2, 0}, {3.0f, 3.0f, 0.0f, 3, 1}};
    const tqkv_format formats[][2] = {{TQKV_I8, TQKV_TQ4}, {TQKV_F16, TQKV_F16}, {TQKV_TQ3, TQKV_TQ2}};
    for (int i = 0; i < 24; i++) {
        const float *option = options[i % 8];
        shader_attend_row row = default_row(formats[i / 8][0], formats[i / 8][1], i / 8 == 1 ? 64 : 128);
        row.problem.n_queries = 1 + i % 3;
        row.problem.key_center = option[0];
        row.problem.value_center = option[1];
        row.problem.softcap = option[2];
        row.problem.sinks = (attend_sinks)(int)option[3];
        row.problem.query_basis = row.problem.output_basis = option[4] > 0.0f ? TQKV_ROTATED : TQKV_ORIGINAL;
        row.split = {GPU_MOST, 2, 3, GPU_EACH + i % 3};
        add(row, ("center/" + std::to_string(i)).c_str());
    }
}

// A resident position that only some queries see holds NaN in norms or halves. It must not change the other queries.
void add_poisons()
{
    const tqkv_format formats[] = {TQKV_F16, TQKV_TQ4, TQKV_I8};
    for (tqkv_format keys : formats)
        for (tqkv_format values : formats)
            for (attend_poison poison : {POISON_NEWEST, POISON_OLDEST}) {
                shader_attend_row row = default_row(keys, values, 256);
                row.problem.n_queries = 3;
                row.problem.window = poison == POISON_OLDEST ? 20 : 0;
                row.problem.poison = poison;
                add(row, (std::string("poison/") + tqkv_format_name(keys) + "_" + tqkv_format_name(values) +
                          (poison == POISON_NEWEST ? "/newest" : "/oldest"))
                             .c_str());
            }
}

// The group of 9 makes two blocks, of 5 and of 4 columns.
void add_planned()
{
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    row.key_capacity = row.value_capacity = 1100;
    row.end = 1090;
    test_add(run_planned, &row, sizeof row, "attend/planned/splits2");
    row.group = 9;
    row.n_queries = 3;
    row.sinks = SINKS_SOME;
    test_add(run_planned, &row, sizeof row, "attend/planned/splits2/group9_queries3");
    row.key_ring = row.value_ring = true;
    row.group = 2;
    row.end = 12345;
    test_add(run_planned, &row, sizeof row, "attend/planned/splits2/ring");
    row.window = 1030;
    row.n_queries = 2;
    test_add(run_planned, &row, sizeof row, "attend/planned/splits2/window");
    row = attend_default_row(TQKV_TQ4, TQKV_TQ5, 512); // more splits than attend_merge has simdgroups
    row.n_kv_heads = row.group = 1;
    row.key_capacity = row.value_capacity = 2600;
    row.end = 2600;
    test_add(run_planned, &row, sizeof row, "attend/planned/splits5");
}

// A query's bits do not depend on the queries beside it, nor on what a threadgroup adds up. Short stretches: else only
// long contexts have several.
void run_company(const void *parameters)
{
    const int seed = *(const int *)parameters;
    data_random random = {(uint64_t)seed + 500};
    attend_row row = attend_default_row(test_formats[data_below(&random, TEST_FORMATS)],
                                        test_formats[data_below(&random, TEST_FORMATS)], 32 << data_below(&random, 3));
    const bool planned = seed % 4 == 3;
    row.n_kv_heads = 1;
    row.key_capacity = row.value_capacity = (planned ? 700 : 150) + data_below(&random, 600);
    row.key_ring = row.value_ring = seed % 3 == 0;
    row.end = row.key_ring ? row.key_capacity + data_below(&random, 2000) : row.key_capacity - data_below(&random, 99);
    row.n_queries = 2 + data_below(&random, 6);
    row.group = 1 + data_below(&random, 4);
    row.window = seed % 5 < 2 ? 1 + data_below(&random, 500) : 0;
    row.query_size = 10.0f; // maxima are raised often
    row.sinks = seed % 2 ? SINKS_SOME : SINKS_NONE;
    row.key_center = row.value_center = seed % 7 ? 0.0f : 0.5f;
    row.bits_alone = true;
    attend_problem problem;
    attend_set_up_floats(&problem, &row);
    const int kernel = (planned ? seed / 4 : seed) % 2 ? GPU_MATRICES : GPU_LANES; // where head_dim has both
    const gpu_split as_planned_by_kernel = {0, 0, 0, 0, kernel};
    const gpu_split ways[] = {
        {GPU_MOST, 4, 40, GPU_EACH, kernel}, {8, 4, 40, GPU_SECTIONS, kernel}, {0, 4, 40, GPU_EVERYTHING, kernel}};
    CHECK_RUN(gpu_attend(&problem.attention, problem.q, problem.out, planned ? as_planned_by_kernel : ways[seed % 3]));
    for (int query : {0, data_below(&random, row.n_queries), row.n_queries - 1})
        check_alone(problem.attention, problem.q, problem.out, query,
                    planned ? as_planned_by_kernel : ways[data_below(&random, 3)]);
    attend_tear_down(&problem);
}

// What decides which positions the queries of a context of several stretches see, at random.
void choose_context(attend_row &row, data_random &random)
{
    row.key_capacity = row.value_capacity = 130 + data_below(&random, 1000);
    row.key_ring = row.value_ring = data_below(&random, 2) != 0;
    row.end =
        row.key_ring ? row.key_capacity / 2 + data_below(&random, 2000) : row.key_capacity - data_below(&random, 99);
    row.n_queries = data_below(&random, 2) ? 1 : 1 + data_below(&random, 3);
    row.window = data_below(&random, 3) ? 0 : 1 + data_below(&random, 700);
    row.tree = row.n_queries > 1 && data_below(&random, 2);
    row.non_causal = !row.tree && data_below(&random, 4) == 0;
    if (data_below(&random, 3)) return;
    row.list_block = 1 << 2 * data_below(&random, 4);
    row.list_share = 0.4f;
    row.list_newest = data_below(&random, 100);
}

// A strand by a threadgroup of its own has the bits that one simdgroup of a stretch's threadgroup gives it: by both
// kernels, and where a pipeline has fewer simdgroups than a stretch has strands.
void run_strands(const void *parameters)
{
    const int seed = *(const int *)parameters, head_dims[] = {32, 48, 64, 64, 80, 96, 128, 128, 192, 256, 512, 1024};
    data_random random = {(uint64_t)seed + 900};
    attend_row row =
        attend_default_row(test_formats[data_below(&random, TEST_FORMATS)],
                           test_formats[data_below(&random, TEST_FORMATS)], head_dims[data_below(&random, 12)]);
    choose_context(row, random);
    row.n_kv_heads = 1;
    row.group = 1 + data_below(&random, 9);
    row.query_size = 10.0f; // maxima are raised often
    row.softcap = data_below(&random, 4) ? 0.0f : 3.0f;
    row.key_center = data_below(&random, 4) ? 0.0f : 0.5f;
    row.key_spread = row.value_spread = data_below(&random, 3) ? 0.0f : 10.0f;
    row.bits_alone = true;
    attend_problem problem;
    attend_set_up_floats(&problem, &row);
    const size_t n = problem.n_rows * problem.value_dim;
    const int n_simdgroups = seed % 8 == 7 ? 2 : 4, kernel = seed % 2 ? GPU_MATRICES : GPU_LANES;
    std::vector<float> by_strands(n, NAN);
    CHECK_RUN(gpu_attend(&problem.attention, problem.q, problem.out, {0, n_simdgroups, 0, GPU_EACH, kernel}));
    CHECK_RUN(gpu_attend(&problem.attention, problem.q, by_strands.data(), {0, n_simdgroups, 0, GPU_STRANDS, kernel}));
    CHECK(!memcmp(by_strands.data(), problem.out, n * sizeof(float)), "strands have other bits");
    attend_tear_down(&problem);
}

int planned_strands(const tqkv_attention &call)
{
    const gpu_attention attention(call);
    const tqkv_metal_buffer none = gpu_buffer(nullptr);
    tqkv_metal_plan plan;
    CHECK_RESULT(tqkv_metal_plan_attend(&attention.metal, none, none, none, &plan), TQKV_OK);
    return gpu_args<tqkv__attend_args>(plan.d[plan.n == 4 ? 1 : 0]).strands;
}

// Queries in company leave no threadgroups for strands, and alone they do. With first and last positions as halves,
// which the merge adds in their places.
void run_strands_of_one(const void *parameters)
{
    const int seed = *(const int *)parameters;
    attend_row row = attend_default_row(TQKV_TQ4, TQKV_I8, seed % 2 ? 64 : 32);
    row.n_kv_heads = 8;
    row.group = seed % 2 ? 8 : 2; // by matrices, by lanes
    row.n_queries = seed % 2 ? 17 : 9;
    row.key_capacity = row.value_capacity = 1200;
    row.end = 1190;
    row.query_size = 10.0f;
    row.bits_alone = true;
    if (seed / 2) row.exact_first = 5;
    if (seed / 2) row.exact_last = 30;
    attend_problem problem;
    attend_set_up_floats(&problem, &row);
    CHECK(planned_strands(problem.attention) == 1, "the call has strands");
    CHECK_RUN(gpu_attend(&problem.attention, problem.q, problem.out, as_planned));
    for (int query : {0, row.n_queries - 1}) {
        CHECK(planned_strands(call_of_one_query(problem.attention, query)) == TQKV__STRANDS, "query %d has none",
              query);
        check_alone(problem.attention, problem.q, problem.out, query, as_planned);
    }
    attend_tear_down(&problem);
}

// One stream of keys and values, with a tail or without.
shader_attend_row latent_row(tqkv_format keys, tqkv_format tail, int head_dim, int group)
{
    shader_attend_row row = default_row(keys, keys, head_dim);
    row.problem.shared = true;
    row.problem.n_kv_heads = 1;
    row.problem.group = group;
    row.problem.tail_dim = tail ? 64 : 0;
    row.problem.tail_format = tail;
    return row;
}

// Every format of a part, head_dim, group; the options in turns.
void add_latent_options(int i, attend_row &p)
{
    p.n_queries = 1 + i % 3;
    p.window = i % 5 == 2 ? 19 : 0;
    p.softcap = i % 6 == 3 ? 4.0f : 0.0f;
    p.sinks = i % 4 == 1 ? SINKS_SOME : SINKS_NONE;
    p.key_center = i % 3 == 1 ? 2.0f : 0.0f;
    p.tail_center = p.tail_dim && i % 3 > 0 ? 3.0f : 0.0f;
    p.key_ring = p.value_ring = i % 7 == 4;
    p.end = p.key_ring ? 117 : 40;
    p.tree = p.n_queries > 1 && i % 8 == 7;
    p.query_basis = i % 4 == 2 ? TQKV_ROTATED : TQKV_ORIGINAL;
    p.output_basis = i % 5 == 3 ? TQKV_ROTATED : TQKV_ORIGINAL;
    p.block_scale = p.head_dim == 512 && i % 9 == 5 ? 1.25f : 0.0f;
}

// Stretches and rings of one shape, and values of their own.
void add_latent_places()
{
    shader_attend_row row = latent_row(TQKV_TQ4, TQKV_F16, 512, 8);
    row.problem.end = row.problem.key_capacity = row.problem.value_capacity = 700;
    for (int share : {GPU_EACH, GPU_SECTIONS, GPU_EVERYTHING}) { // stretches that do not end with a round
        row.split = {GPU_MOST, 8, 7, share};
        add(row, ("latent/rounds/share" + std::to_string(share)).c_str());
    }
    row.problem.query_size = 40.0f; // scores in the hundreds
    add(row, "latent/large_scores");
    row = latent_row(TQKV_I8, TQKV_I8, 448, 8); // a ring whose newest positions are far from the oldest in use
    row.problem.key_ring = row.problem.value_ring = true;
    row.problem.key_capacity = row.problem.value_capacity = 2100;
    row.problem.end = 2100 * 3 + 100;
    row.problem.kv_len = 330;
    row.split = {GPU_MOST, 8, 1};
    add(row, "latent/gap/d448");
    row.problem.head_dim = 512;
    add(row, "latent/gap/d512");
    row = latent_row(TQKV_TQ4, TQKV_F16, 512, 8); // values of their own beside a tail
    row.problem.shared = false;
    row.problem.value_format = TQKV_I8;
    row.problem.value_center = 1.0f;
    add(row, "latent/own_values");
}

void add_latents()
{
    const tqkv_format tails[] = {TQKV_F16, TQKV_I8, TQKV_FORMAT_DEFAULT, TQKV_TQ5};
    const int groups[] = {8, 2, 16, 64, 8, 4, 16, 128, 1};
    int i = 0;
    for (int head_dim : {512, 448})
        for (tqkv_format keys : test_formats) {
            shader_attend_row row = latent_row(keys, tails[i % 4], head_dim, groups[i % 9]);
            add_latent_options(i, row.problem);
            if (row.problem.group > 16) row.problem.n_queries = 1;
            row.split = {GPU_MOST, 2, 3, GPU_EACH + i % 3};
            add(row, ("latent/d" + std::to_string(head_dim) + "/" + tqkv_format_name(keys)).c_str());
            i++;
        }
    for (tqkv_format tail : test_formats) { // the tail's row of a lane differs from that of the keys
        shader_attend_row row = latent_row(i % 2 ? TQKV_TQ4 : TQKV_I8, tail, i % 3 ? 512 : 448, 8);
        add_latent_options(i++, row.problem);
        add(row, (std::string("latent/tail/") + tqkv_format_name(tail)).c_str());
    }
    for (attend_poison poison : {POISON_NEWEST, POISON_OLDEST})
        for (tqkv_format keys : {TQKV_F16, TQKV_TQ4, TQKV_I8}) {
            shader_attend_row row = latent_row(keys, TQKV_F16, 512, 8);
            row.problem.n_queries = 3;
            row.problem.window = poison == POISON_OLDEST ? 20 : 0;
            row.problem.poison = poison;
            add(row, (std::string("latent/poison/") + tqkv_format_name(keys) +
                      (poison == POISON_NEWEST ? "/newest" : "/oldest"))
                         .c_str());
        }
    add_latent_places();
}

// Which positions there are, and which of them a call sees.
void choose_positions(attend_row &p, data_random &random)
{
    p.key_ring = data_below(&random, 2) != 0;
    p.value_ring = p.key_ring;
    p.key_capacity = 1 + data_below(&random, 150);
    p.value_capacity = data_below(&random, 3) ? p.key_capacity : 1 + data_below(&random, 150);
    const int capacity = p.key_capacity < p.value_capacity ? p.key_capacity : p.value_capacity;
    p.end = p.key_ring ? 1 + data_below(&random, 400) : 1 + data_below(&random, capacity);
    const int resident = p.end < capacity ? (int)p.end : capacity;
    p.kv_len = data_below(&random, 2) ? 0 : 1 + data_below(&random, resident);
    p.window = data_below(&random, 2) ? 0 : 1 + data_below(&random, 100);
}

// One stream as keys and values, most often with a tail.
void choose_latent(attend_row &p, data_random &random)
{
    p.head_dim = data_below(&random, 3) ? 512 : 448;
    p.block_scale = 0.0f;
    p.shared = true;
    p.value_capacity = p.key_capacity;
    p.tail_dim = data_below(&random, 3) ? 64 : 0;
    p.tail_format = test_formats[data_below(&random, TEST_FORMATS)];
    p.tail_center = data_below(&random, 3) ? 0.0f : 1.0f;
}

// All parameters at random, from a seed.
void add_random(int seed, bool latent)
{
    data_random random = {(uint64_t)seed + (latent ? 7000 : 0)};
    const int head_dims[] = {32, 48, 64, 64, 80, 96, 128, 128, 192, 256, 512, 1024};
    shader_attend_row row =
        default_row(test_formats[data_below(&random, TEST_FORMATS)], test_formats[data_below(&random, TEST_FORMATS)],
                    head_dims[data_below(&random, 12)]);
    attend_row &p = row.problem;
    p.n_kv_heads = 1 + data_below(&random, 3);
    p.group = 1 + data_below(&random, 9);
    p.n_queries = data_below(&random, 2) ? 1 : 1 + data_below(&random, 12);
    choose_positions(p, random);
    p.softcap = data_below(&random, 4) ? 0.0f : 3.0f;
    p.scale = data_below(&random, 3) ? 0.0f : 0.05f;
    p.block_scale = p.head_dim >= 512 && data_below(&random, 2) ? 1.25f : 0.0f;
    p.query_size = data_below(&random, 4) ? 1.5f : 10.0f; // the bound holds to that size of scores
    p.sinks = (attend_sinks)data_below(&random, 4);
    p.query_basis = data_below(&random, 3) ? TQKV_ORIGINAL : TQKV_ROTATED;
    p.output_basis = data_below(&random, 3) ? TQKV_ORIGINAL : TQKV_ROTATED;
    p.key_center = data_below(&random, 4) ? 0.0f : 0.5f;
    p.value_center = data_below(&random, 4) ? 0.0f : 4.0f;
    row.split.columns = data_below(&random, 2) ? GPU_MOST : 1 + data_below(&random, TQKV__MAX_COLUMNS(p.head_dim));
    row.split.n_simdgroups = 1 + data_below(&random, 4);
    row.split.n_stretches = 1 + data_below(&random, 5);
    row.split.share = GPU_EACH + data_below(&random, 3);
    p.tree = p.n_queries > 1 && data_below(&random, 3) == 0;
    p.non_causal = !p.tree && p.n_queries > 1 && seed % 2;
    if (latent) {
        choose_latent(p, random);
        row.split.columns = GPU_MOST;
    }
    p.key_spread = data_below(&random, 3) ? 0.0f : 10.0f;
    p.value_spread = data_below(&random, 3) ? 0.0f : 10.0f;
    p.tail_spread = p.tail_dim && !data_below(&random, 2) ? 6.0f : 0.0f;
    if (!data_below(&random, 3)) { // halves of first and newest positions
        p.value_capacity = p.key_capacity;
        p.exact_first = data_below(&random, 1 + (p.key_ring ? p.key_capacity : (int)p.end));
        p.exact_last = data_below(&random, 90);
    }
    add(row, ((latent ? "latent/random/" : "random/") + std::to_string(seed)).c_str());
}

// The options of the processor's tests that have scales of channels. Only long rows have tails here.
void add_scales()
{
    const int head_dims[] = {64, 128, 80};
    int i = 0;
    for (const option &own : options) {
        if (strncmp(own.name, "scaled", 6) != 0) continue;
        shader_attend_row row = default_row(TQKV_I8, TQKV_TQ4, head_dims[i++ % 3]);
        own.apply(&row.problem);
        if (row.problem.tail_dim || row.problem.block_scale > 0.0f) row.problem.head_dim = 512;
        add(row, (std::string("option/") + own.name).c_str());
    }
}

} // namespace

void attend_shader_cases()
{
    add_scales();
    add_pairs();
    add_head_dims();
    add_unequal_dims();
    if (!gpu_schedules[0].flush_subnormals) add_types();
    add_shapes();
    add_sections();
    add_all_residencies();
    add_options();
    add_all_non_causal();
    add_trees();
    for (int kernel : {GPU_LANES, GPU_MATRICES})
        test_add(run_full_tree, &kernel, sizeof kernel, "attend/tree/full/%d", kernel);
    add_centers();
    add_poisons();
    add_planned();
    for (int seed = 0; seed < 40; seed++) test_add(run_company, &seed, sizeof seed, "attend/company/%d", seed);
    for (int seed = 0; seed < 40; seed++) test_add(run_strands, &seed, sizeof seed, "attend/strands/%d", seed);
    for (int seed = 0; seed < 4; seed++)
        test_add(run_strands_of_one, &seed, sizeof seed, "attend/strands/alone/%d", seed);
    const bool sanitized = gpu_schedules.size() == 1 && !gpu_on_device; // too slow for a million positions
    for (int share : {GPU_EACH, GPU_SECTIONS, GPU_EVERYTHING}) {
        const int positions = sanitized ? 1 << 13 : share == GPU_EVERYTHING || gpu_on_device ? 1 << 20 : 1 << 18;
        add_length({TQKV_I8, TQKV_F16, 32, 1, 1, 1, positions, share});
    }
    for (int seed = 0; seed < 150; seed++) add_random(seed, false);
    add_latents();
    for (int seed = 0; seed < 25; seed++) add_random(seed, true);
}
