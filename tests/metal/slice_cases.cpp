// Slices: attend_merge from partial results to a slice, from a slice to another, from a slice to the result. Against
// the double-precision reference, the processor's slices, and the bits of the whole call.
#include "shader_cases.h"
#include <algorithm>
#include <deque>
#include <math.h>

namespace
{

gpu_slice make_slice(const attend_problem &p) { return gpu_slice(p.n_rows, p.value_dim); }

void attend_slice(const attend_problem &p, int64_t first, int64_t end, bool on_processor, gpu_split split,
                  gpu_slice &to)
{
    const int count = (int)(end - first);
    if (on_processor)
        CHECK_RESULT(tqkv_attend_partial(&p.attention, p.q, first, count, to.out.data(), to.max.data(), to.sum.data()),
                     TQKV_OK);
    else
        CHECK_RUN(gpu_attend_partial(&p.attention, p.q, first, count, to, split));
}

// ---- Random problems in random slices ----

attend_row random_row(data_random *random)
{
    const int head_dims[] = {32, 48, 64, 80, 96, 128, 192, 256, 512, 1024};
    attend_row p =
        attend_default_row(test_formats[data_below(random, TEST_FORMATS)],
                           test_formats[data_below(random, TEST_FORMATS)], head_dims[data_below(random, 10)]);
    p.n_kv_heads = 1 + data_below(random, 2);
    p.group = 1 + data_below(random, 5);
    p.n_queries = data_below(random, 2) ? 1 : 1 + data_below(random, 12);
    p.key_ring = p.value_ring = data_below(random, 2) != 0;
    p.key_capacity = 1 + data_below(random, 150);
    p.value_capacity = data_below(random, 3) ? p.key_capacity : 1 + data_below(random, 150);
    const int capacity = std::min(p.key_capacity, p.value_capacity);
    p.end = p.key_ring ? 1 + data_below(random, 400) : 1 + data_below(random, capacity);
    p.window = data_below(random, 2) ? 0 : 1 + data_below(random, 100);
    p.softcap = data_below(random, 4) ? 0.0f : 3.0f;
    p.block_scale = p.head_dim >= 512 && data_below(random, 2) ? 1.25f : 0.0f;
    p.query_size = data_below(random, 4) ? 1.5f : 25.0f;
    p.sinks = (attend_sinks)data_below(random, 4);
    p.query_basis = data_below(random, 3) ? TQKV_ORIGINAL : TQKV_ROTATED;
    p.output_basis = data_below(random, 3) ? TQKV_ORIGINAL : TQKV_ROTATED;
    p.key_center = data_below(random, 3) ? 0.0f : 0.5f;
    p.value_center = data_below(random, 3) ? 0.0f : 4.0f;
    p.tree = p.n_queries > 1 && data_below(random, 3) == 0;
    p.non_causal = !p.tree && data_below(random, 3) == 0;
    return p;
}

// Four slices of the resident positions, one of them empty, merged in some order. Some may be the processor's, of
// formats whose centroids are those of the GPU, and so may the last merge and the end.
void run_random(const void *parameters)
{
    const int seed = *(const int *)parameters;
    data_random random = {(uint64_t)seed + 900};
    attend_row row = random_row(&random);
    const bool mixed = data_below(&random, 2) != 0;
    const tqkv_format alike[] = {TQKV_F16, TQKV_I8, TQKV_TQ8};
    if (mixed) row.key_format = alike[seed % 3], row.value_format = alike[seed / 3 % 3];
    if (mixed) row.keys_unrotated = row.keys_unrotated && row.key_format == TQKV_TQ8;
    if (mixed) row.values_unrotated = row.values_unrotated && row.value_format == TQKV_TQ8;
    attend_problem p;
    attend_set_up_floats(&p, &row);
    if (mixed) p.tolerance += attend_tolerance(&row);
    const reference_shape shape = reference_attention_shape(&p.attention);
    const int resident = (int)(shape.end - shape.oldest);
    int64_t cuts[5] = {shape.oldest, 0, 0, 0, shape.end};
    for (int i = 1; i < 4; i++) cuts[i] = shape.oldest + data_below(&random, resident + 1);
    cuts[2] = cuts[1];
    std::sort(cuts, cuts + 5);
    const gpu_split split = {GPU_MOST, 1 + data_below(&random, 4), 1 + data_below(&random, 5),
                             GPU_EACH + data_below(&random, 3)};
    gpu_slice total = make_slice(p), other = total;
    const int order = data_below(&random, 4);
    for (int i = 0; i < 4; i++) {
        const int at = (i + order) % 4;
        attend_slice(p, cuts[at], cuts[at + 1], mixed && data_below(&random, 2), split, i ? other : total);
        if (!i) continue;
        if (mixed && data_below(&random, 3) == 0)
            CHECK_RESULT(tqkv_attend_merge(&p.attention, total.out.data(), total.max.data(), total.sum.data(),
                                           &p.attention, other.out.data(), other.max.data(), other.sum.data()),
                         TQKV_OK);
        else
            CHECK_RUN(gpu_attend_merge(&p.attention, total, &p.attention, other));
    }
    if (mixed && data_below(&random, 3) == 0) {
        CHECK_RESULT(tqkv_attend_finish(&p.attention, total.out.data(), total.max.data(), total.sum.data()), TQKV_OK);
        std::copy(total.out.begin(), total.out.end(), p.out);
    } else {
        CHECK_RUN(gpu_attend_finish(&p.attention, total, p.out));
    }
    attend_check(&p, p.out, "slices");
    attend_tear_down(&p);
}

// ---- The bits of the whole call ----

struct bits_row {
    attend_row problem;
    gpu_split split;
    const std::vector<int> *cuts; // the last is the end
};

void run_bits(const void *parameters)
{
    const bits_row *row = (const bits_row *)parameters;
    attend_problem p;
    attend_set_up_floats(&p, &row->problem);
    CHECK_RUN(gpu_attend(&p.attention, p.q, p.out, row->split));
    gpu_slice total = make_slice(p), other = total;
    std::vector<float> out(p.n_rows * p.value_dim, NAN);
    int begin = 0;
    for (int end : *row->cuts) {
        attend_slice(p, begin, end, false, row->split, begin ? other : total);
        if (begin) CHECK_RUN(gpu_attend_merge(&p.attention, total, &p.attention, other));
        begin = end;
    }
    CHECK_RUN(gpu_attend_finish(&p.attention, total, out.data()));
    CHECK(!memcmp(out.data(), p.out, out.size() * sizeof(float)), "slices have other bits than the whole call");
    attend_tear_down(&p);
}

void add_bits(const char *name, const attend_row &problem, gpu_split split, const std::vector<int> &cuts)
{
    static std::deque<std::vector<int>> kept; // for as long as the program
    kept.push_back(cuts);
    bits_row row = {problem, split, &kept.back()};
    row.problem.bits_alone = true;
    test_add(run_bits, &row, sizeof row, "slice/bits/%s", name);
}

// Stretches of 512 positions; of 32, so that there are sections of 512 and then 2048 positions; by both kernels.
void add_all_bits()
{
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    row.n_kv_heads = 1;
    row.key_capacity = row.value_capacity = 1700;
    row.end = 1690;
    row.sinks = SINKS_SOME;
    row.query_size = 10.0f; // maxima differ between the slices
    const std::vector<int> cuts = {512, 1024, 1536, 1690};
    add_bits("lanes", row, as_planned, cuts);
    row.group = 8;
    row.n_queries = 3;
    add_bits("matrices", row, as_planned, cuts);
    row.softcap = 4.0f;
    row.key_center = 0.5f; // under softcap it is a part of each score
    row.n_queries = 1;
    add_bits("softcap", row, as_planned, {1024, 1536, 1690});
    row = attend_default_row(TQKV_F16, TQKV_TQ3, 32);
    row.n_kv_heads = 1;
    row.key_capacity = row.value_capacity = 4800;
    row.end = 4790;
    row.query_size = 10.0f;
    row.sinks = SINKS_SOME;
    for (int share : {GPU_EACH, GPU_SECTIONS, GPU_EVERYTHING})
        add_bits(("sections/share" + std::to_string(share)).c_str(), row, {0, 2, 150, share},
                 {416, 448, 480, 512, 2560, 4608, 4790});
    attend_row wide = attend_default_row(TQKV_I8, TQKV_TQ4, 512);
    wide.n_kv_heads = 1;
    wide.group = 8;
    wide.key_capacity = wide.value_capacity = 320;
    wide.end = 300;
    wide.query_size = 10.0f;
    add_bits("long_rows", wide, {0, 0, 10}, {192, 224, 256, 288, 300});
    row.window = 1200;
    add_bits("window", row, {0, 2, 150, 0}, {3584, 4096, 4608, 4790});
}

// ---- Slices of other formats, of numbers at random ----

struct basis_row {
    int head_dim;
    tqkv_format values, slice;
    tqkv_type type;
};

void fill_slice(data_random *random, float offset, gpu_slice &to)
{
    for (float &x : to.out) x = (float)data_gaussian(random);
    for (float &x : to.sum) x = 0.5f + (float)data_below(random, 1000) / 100.0f;
    for (float &x : to.max) x = offset + (float)data_gaussian(random);
    to.max[0] = -INFINITY; // saw nothing
    to.sum[0] = 0.0f;
    std::fill(to.out.begin(), to.out.begin() + (long)(to.out.size() / to.max.size()), 0.0f);
}

// merge and finish against the processor's.
void run_basis(const void *parameters)
{
    const basis_row *row = (const basis_row *)parameters;
    const size_t d = (size_t)row->head_dim, n_rows = 2 * 3 * 3;
    tqkv_store keys = test_store(TQKV_I8, row->head_dim, 3, 8, false), values = keys, others = keys;
    values.format = row->values;
    others.format = row->slice;
    tqkv_attention a = {}, b = {};
    const float sinks[6] = {0.5f, -1.0f, 2.0f, -INFINITY, 0.0f, 1.0f};
    a.keys = b.keys = &keys;
    a.values = &values;
    b.values = &others;
    a.n_heads = b.n_heads = 6;
    a.n_queries = b.n_queries = 3;
    a.sinks = sinks;
    data_random random = {(uint64_t)row->head_dim};
    gpu_slice total(n_rows, d), other(n_rows, d);
    fill_slice(&random, 3.0f, total);
    fill_slice(&random, 2.0f, other);
    gpu_slice expected = total;
    CHECK_RUN(gpu_attend_merge(&a, total, &b, other));
    CHECK_RESULT(tqkv_attend_merge(&a, expected.out.data(), expected.max.data(), expected.sum.data(), &b,
                                   other.out.data(), other.max.data(), other.sum.data()),
                 TQKV_OK);
    std::vector<float> out(n_rows * d, NAN);
    CHECK_RUN(gpu_attend_finish(&a, total, out.data()));
    tqkv_attention typed = a;
    typed.output_type = row->type;
    std::vector<uint16_t> narrow(n_rows * d, 0xffff);
    CHECK_RUN(gpu_attend_finish(&typed, total, narrow.data()));
    for (size_t i = 0; i < narrow.size(); i++)
        CHECK(narrow[i] == reference_narrow(row->type, out[i]), "value %zu rounded", i);
    CHECK_RESULT(tqkv_attend_finish(&a, expected.out.data(), expected.max.data(), expected.sum.data()), TQKV_OK);
    for (size_t i = 0; i < n_rows; i++) {
        const std::vector<double> right(&expected.out[i * d], &expected.out[i * d] + d);
        const double error = reference_relative_error(&out[i * d], right.data(), d);
        CHECK(error <= 2e-6, "row %zu: relative error %.3g", i, error);
        CHECK(fabsf(total.max[i] - expected.max[i]) <= 1e-6f * fabsf(expected.max[i]) ||
                  total.max[i] == expected.max[i],
              "row %zu: max %g, the processor's %g", i, (double)total.max[i], (double)expected.max[i]);
    }
    test_store_free(&keys);
}

void add_bases()
{
    const tqkv_format formats[][2] = {{TQKV_TQ4, TQKV_F16}, {TQKV_F16, TQKV_I8}, {TQKV_I8, TQKV_TQ2}};
    for (int head_dim : gpu_head_dims)
        for (int i = 0; i < 3; i++) {
            const basis_row row = {head_dim, formats[i][0], formats[i][1], i % 2 ? TQKV_TYPE_F16 : TQKV_TYPE_BF16};
            test_add(run_basis, &row, sizeof row, "slice/basis/d%d/%d", head_dim, i);
        }
}

// ---- What lies beyond a slice ----

// Positions behind the slice, in its last tile, and before it hold NaN: the slice keeps its bits.
// Pages stand for others.
void run_beyond(const void *parameters)
{
    const int number = *(const int *)parameters;
    const tqkv_format formats[] = {TQKV_F16, TQKV_TQ4, TQKV_I8};
    attend_row row = attend_default_row(formats[number % 3], formats[number / 3 % 3], 64);
    row.group = number % 2 ? 8 : 2; // by matrices, by lanes
    row.n_queries = 2;
    row.end = 300;
    row.key_capacity = row.value_capacity = 320;
    row.bits_alone = true;
    const int32_t pages[] = {4, 2, 0, 1, 3};
    attend_problem p;
    attend_set_up_floats(&p, &row);
    if (number % 4 == 3)
        for (tqkv_store *s : {&p.keys, &p.values}) {
            s->pages = pages;
            s->n_pages = 5;
            s->page_size = 64;
        }
    gpu_slice clean = make_slice(p), poisoned = clean;
    const int64_t first = 70 + number, end = 250 - number;
    attend_slice(p, first, end, false, as_planned, clean);
    for (int64_t at : {first - 1, end, end + 1, (int64_t)299})
        for (tqkv_store *s : {&p.keys, &p.values}) attend_poison_position(s, at, true);
    attend_slice(p, first, end, false, as_planned, poisoned);
    CHECK(clean.out == poisoned.out && clean.max == poisoned.max && clean.sum == poisoned.sum,
          "a slot beyond was read");
    gpu_slice expected = make_slice(p);
    const double most = reference_gpu_difference(row.key_format, TQKV_FORMAT_DEFAULT, TQKV_F16, (double)row.query_size);
    attend_slice(p, first, end, true, as_planned, expected);
    for (size_t i = 0; i < p.n_rows; i++) {
        const double got = (double)clean.max[i] + log((double)clean.sum[i]),
                     right = (double)expected.max[i] + log((double)expected.sum[i]);
        CHECK(fabs(got - right) <= (row.key_format == TQKV_F16 ? 1e-5 : most), "row %zu: %g, the processor's %g", i,
              got, right);
    }
    attend_tear_down(&p);
}

// ---- Positions that are kept as halves, and lists ----

// Slots of codes that halves replace hold NaN, and halves have nothing to do with the codes. Whole, and in two slices.
void run_ends(const void *parameters)
{
    const attend_row *row = (const attend_row *)parameters;
    attend_problem p;
    attend_set_up_floats(&p, row);
    CHECK_RUN(gpu_attend(&p.attention, p.q, p.out, as_planned));
    attend_check(&p, p.out, "ends");
    const reference_shape shape = reference_attention_shape(&p.attention);
    const int64_t cut = shape.oldest + (shape.end - shape.oldest) / 3;
    gpu_slice total = make_slice(p), other = total;
    attend_slice(p, shape.oldest, cut, false, as_planned, total);
    attend_slice(p, cut, shape.end, false, as_planned, other);
    CHECK_RUN(gpu_attend_merge(&p.attention, total, &p.attention, other));
    CHECK_RUN(gpu_attend_finish(&p.attention, total, p.out));
    attend_check(&p, p.out, "ends, in slices");
    attend_tear_down(&p);
}

void add_ends(int seed)
{
    data_random random = {(uint64_t)seed + 700};
    attend_row row = random_row(&random);
    if (row.key_format == TQKV_F16) row.key_format = TQKV_I8;
    row.keys_unrotated = row.values_unrotated = false;
    row.key_capacity = row.value_capacity = 100 + data_below(&random, 100);
    row.end = row.key_ring ? 50 + data_below(&random, 300) : row.key_capacity - data_below(&random, 50);
    row.exact_first = data_below(&random, 3) ? 1 + data_below(&random, 20) : 0;
    row.exact_last = data_below(&random, 4) ? 1 + data_below(&random, 80) : 0;
    if (seed % 8 == 7) row.exact_first = row.key_ring ? 0 : (int)row.end; // all
    row.codes_of_ends = seed % 5 == 4 ? 1 + data_below(&random, 2) : 0;
    if (seed % 3 == 0) row.head_dim = seed % 2 ? 512 : 128;
    row.shared = seed % 3 == 0;
    test_add(run_ends, &row, sizeof row, "slice/ends/%d", seed);
}

// Keys with a tail, which lies in the slots of the codes: by lanes and by matrices, linear and in a ring, with lists.
void add_ends_of_tails(int seed)
{
    const tqkv_format tails[] = {TQKV_F16, TQKV_I8, TQKV_TQ4};
    attend_row row = attend_default_row(seed % 2 ? TQKV_I8 : TQKV_TQ4, TQKV_TQ4, seed % 3 == 2 ? 448 : 512);
    row.n_kv_heads = 1 + seed % 2;
    row.group = seed % 4 == 1 ? 2 : 8;
    row.n_queries = 1 + seed % 3;
    row.shared = seed % 4 != 3;
    row.tail_dim = 64;
    row.tail_format = tails[seed % 3];
    row.tail_center = seed % 3 == 1 ? 2.0f : 0.0f;
    row.sinks = seed % 2 ? SINKS_SOME : SINKS_NONE;
    row.key_ring = row.value_ring = seed % 2 != 0;
    row.key_capacity = row.value_capacity = 110;
    row.end = row.key_ring ? 247 : 105;
    row.exact_first = row.key_ring ? 150 : 5;
    row.exact_last = 70;
    row.list_block = seed >= 4 ? 4 : 0;
    row.list_share = 0.5f;
    test_add(run_ends, &row, sizeof row, "slice/ends/tail/%d", seed);
}

// Lists, and most of them with halves.
void add_lists(int seed)
{
    const int blocks[] = {1, 4, 16, 64, 128};
    data_random random = {(uint64_t)seed + 500};
    attend_row row = random_row(&random);
    if (row.key_format == TQKV_F16) row.key_format = TQKV_I8;
    row.keys_unrotated = row.values_unrotated = false;
    row.query_size = 1.5f;
    row.key_capacity = row.value_capacity = 100 + data_below(&random, 100);
    row.end = row.key_ring ? 50 + data_below(&random, 300) : row.key_capacity - data_below(&random, 50);
    row.exact_first = seed % 4 ? data_below(&random, 20) : 0;
    row.exact_last = seed % 4 ? data_below(&random, 80) : 0;
    row.list_block = blocks[seed % 5];
    row.list_newest = data_below(&random, 3) ? data_below(&random, 60) : 0;
    row.list_share = 0.6f;
    row.list_by_head = data_below(&random, 2) != 0;
    test_add(run_ends, &row, sizeof row, "slice/list/%d", seed);
}

// Of a context that is cut into stretches, sections and threadgroups that take everything.
void add_long_ends()
{
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    row.n_kv_heads = 1;
    row.key_capacity = row.value_capacity = 1700;
    row.end = 1690;
    row.exact_first = 4;
    row.exact_last = 600;
    row.sinks = SINKS_SOME;
    row.key_center = row.value_center = 0.5f;
    test_add(run_ends, &row, sizeof row, "slice/ends/long");
    row.group = 8;
    test_add(run_ends, &row, sizeof row, "slice/ends/long/matrices");
    row.n_kv_heads = 8;
    row.n_queries = 300; // a threadgroup takes everything
    row.end = row.key_capacity = row.value_capacity = 400;
    row.exact_last = 64;
    row.head_dim = 32;
    row.group = 1;
    test_add(run_ends, &row, sizeof row, "slice/ends/everything");
}

} // namespace

void slice_shader_cases()
{
    const int n = gpu_on_device ? 12 : 60, n_ends = gpu_on_device ? 12 : 40; // each has pipelines of its own
    for (int seed = 0; seed < n; seed++) test_add(run_random, &seed, sizeof seed, "slice/random/%d", seed);
    for (int seed = 0; seed < n_ends; seed++) add_ends(seed);
    for (int seed = 0; seed < 8; seed++) add_ends_of_tails(seed);
    for (int seed = 0; seed < (gpu_on_device ? 10 : 30); seed++) add_lists(seed);
    add_long_ends();
    add_all_bits();
    if (!gpu_schedules[0].flush_subnormals) add_bases();
    for (int i = 0; i < 9; i++) test_add(run_beyond, &i, sizeof i, "slice/beyond/%d", i);
}
