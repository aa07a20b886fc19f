// attend, attend_list and attend_merge against double precision on the same codes, and against themselves: attentions
// at random from the seed in a case's name, as tqkv.h plans them and divided in other ways, in one of six forms.
#include "forms.h"
#include "random_attend.h"
#include "shader_cases.h"
#include "../history.h"
#ifdef GPU_DEVICE
#include "../cuda/products.h"
#endif
#include <algorithm>
#include <memory>
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

static size_t check_divided(attend_problem &problem, const attend_row &row, const std::vector<gpu_split> &splits)
{
    const std::vector<gpu_split> ways = with_both_kernels(splits, row);
    for (const gpu_split &split : ways) {
        std::string what = std::string(split.kernel == GPU_MATRICES ? "by matrices, " : "") + "columns " +
                           std::to_string(split.columns) + ", simdgroups " + std::to_string(split.n_simdgroups) +
                           ", stretches " + std::to_string(split.n_stretches) + ", share " +
                           std::to_string(split.share);
        std::fill_n(problem.out, problem.n_rows * problem.value_dim, NAN);
        CHECK_RUN(gpu_attend(&problem.attention, problem.q, problem.out, split));
#ifdef GPU_DEVICE
        // gpu_force leaves calls of several parts as they are planned.
        const bool planned = !split.kernel || row.exact_first || row.exact_last,
                   matrices = planned ? row.group >= PLANNED_MATRIX_GROUP : split.kernel == GPU_MATRICES;
        problem.allowed = matrices && gpu_has_matrices(row.head_dim) ? error_of_products : nullptr;
#endif
        attend_check(&problem, problem.out, what.c_str());
    }
    return ways.size();
}

size_t check_attend(const attend_row &row, const std::vector<gpu_split> &splits)
{
    attend_problem problem;
    attend_set_up_floats(&problem, &row);
    const size_t n = check_divided(problem, row, splits);
    attend_tear_down(&problem);
    return n;
}

void run_shape(const void *parameters)
{
    const shape_row *row = (const shape_row *)parameters;
    check_attend(row->problem, {as_planned, row->split});
}

// The call's query number `query` alone, over the positions that it sees in the call.
static tqkv_attention call_of_one_query(const tqkv_attention &call, int query)
{
    tqkv_attention a = call;
    a.end = call.end - call.n_queries + query + 1;
    a.kv_len = (int)(a.end - reference_attention_shape(&call).oldest);
    a.n_queries = 1;
    if (a.list.rows) a.list.rows += query * std::max(a.list.heads, 1) * a.list.length;
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
      values(test_store(row.values, row.head_dim, row.n_kv_heads, row.positions, false)),
      call(test_attention(&keys, &values, row.n_kv_heads * row.group, row.n_queries, row.positions))
{
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

// ---- Attentions at random ----

namespace
{

// One of them, and how it is divided.
struct random_problem : attend_problem {
    attend_row row;
    data_random random;
    gpu_split split, planned; // planned: by the same kernel
    size_t n_out;
    random_problem(const attend_row &from, int seed);
    ~random_problem() { attend_tear_down(this); }
    random_problem(const random_problem &) = delete;
    std::vector<float> run(const tqkv_attention &a, gpu_split how) const
    {
        std::vector<float> to(n_out, NAN);
        CHECK_RUN(gpu_attend(&a, q, to.data(), how));
        return to;
    }
    int below(int limit) { return data_below(&random, limit); }
};

random_problem::random_problem(const attend_row &from, int seed)
    : attend_problem(), row(from), random({(uint64_t)seed + 5000})
{
    const int kernel = GPU_LANES + below(2), columns = below(2) ? GPU_MOST : 1 + below(TQKV__MAX_COLUMNS(row.head_dim));
    split = {columns, 1 + below(4), 1 + below(below(4) ? 5 : 40), GPU_EACH + below(3), kernel};
    planned = {0, 0, 0, 0, kernel};
    if (row.list_block) split.n_stretches = split.share = 0; // they divide ranks, of which there may be more than slots
    attend_set_up_floats(this, &row);
    n_out = n_rows * value_dim;
}

void check_bits(const std::vector<float> &a, const std::vector<float> &b, const char *what)
{
    CHECK(!memcmp(a.data(), b.data(), a.size() * sizeof(float)), "%s", what);
}

// A query's bits depend neither on the queries beside it nor on what a threadgroup adds up, nor on strands.
void check_company(random_problem &p)
{
    const int kernel = p.split.kernel, n = p.below(4) ? 4 : 2; // simdgroups: fewer than a stretch has strands
    const gpu_split ways[] = {
        {GPU_MOST, 4, 40, GPU_EACH, kernel}, {8, 4, 40, GPU_SECTIONS, kernel}, {0, 4, 40, GPU_EVERYTHING, kernel}};
    const bool divided = p.below(3) && !p.row.list_block;
    const std::vector<float> out = p.run(p.attention, divided ? ways[p.below(3)] : p.planned);
    for (int query : {0, p.below(p.row.n_queries), p.row.n_queries - 1})
        check_alone(p.attention, p.q, out.data(), query, divided ? ways[p.below(3)] : p.planned);
    if (p.row.list_block) return;
    check_bits(p.run(p.attention, {0, n, 0, GPU_EACH, kernel}), p.run(p.attention, {0, n, 0, GPU_STRANDS, kernel}),
               "strands have other bits");
}

gpu_slice slice_of(const random_problem &p, int64_t first, int64_t end, bool on_processor, gpu_split split)
{
    gpu_slice to(p.n_rows, p.value_dim);
    const int count = (int)(end - first);
    if (on_processor)
        CHECK_RESULT(tqkv_attend_partial(&p.attention, p.q, first, count, to.out.data(), to.max.data(), to.sum.data()),
                     TQKV_OK);
    else
        CHECK_RUN(gpu_attend_partial(&p.attention, p.q, first, count, to, split));
    return to;
}

// Slices between the cuts, merged from number `begin` on. mixed: some by the processor, and so perhaps merges and the
// end.
std::vector<float> in_slices(random_problem &p, const std::vector<int64_t> &cuts, size_t begin, bool mixed,
                             gpu_split split)
{
    const tqkv_attention *a = &p.attention;
    const size_t n = cuts.size() - 1;
    const auto processor = [&](int one_of) { return mixed && p.below(one_of) == 0; };
    gpu_slice total = slice_of(p, cuts[begin], cuts[begin + 1], processor(2), split);
    for (size_t i = 1; i < n; i++) {
        const size_t at = (i + begin) % n;
        const gpu_slice other = slice_of(p, cuts[at], cuts[at + 1], processor(2), split);
        if (processor(3))
            CHECK_RESULT(tqkv_attend_merge(a, total.out.data(), total.max.data(), total.sum.data(), a, other.out.data(),
                                           other.max.data(), other.sum.data()),
                         TQKV_OK);
        else
            CHECK_RUN(gpu_call(tqkv_metal_plan_attend_merge, a, total.out.data(), total.max.data(), total.sum.data(), a,
                               other.out.data(), other.max.data(), other.sum.data()));
    }
    std::vector<float> out(p.n_out, NAN);
    if (!processor(3)) {
        CHECK_RUN(gpu_call(tqkv_metal_plan_attend_finish, a, total.out.data(), total.max.data(), total.sum.data(),
                           out.data()));
        return out;
    }
    CHECK_RESULT(tqkv_attend_finish(a, total.out.data(), total.max.data(), total.sum.data()), TQKV_OK);
    return total.out;
}

// Positions behind a slice, in its last tile, and before it hold NaN: the slice keeps its bits, by both kernels.
void check_beyond(const random_problem &p, int64_t first, int64_t end)
{
    const reference_shape shape = reference_attention_shape(&p.attention);
    gpu_split other = p.split;
    other.kernel = GPU_LANES + GPU_MATRICES - other.kernel;
    const gpu_slice clean[] = {slice_of(p, first, end, false, p.split), slice_of(p, first, end, false, other)};
    for (int64_t at : {first - 1, end, end + 1, shape.end - 1})
        for (const tqkv_store *s : {p.attention.keys, p.attention.values})
            if (at >= shape.oldest && at < shape.end && (at < first || at >= end))
                attend_poison_position(const_cast<tqkv_store *>(s), at, true);
    for (const gpu_slice &own : clean) {
        const gpu_slice poisoned = slice_of(p, first, end, false, &own == clean ? p.split : other);
        CHECK(own.out == poisoned.out && own.max == poisoned.max && own.sum == poisoned.sum, "a slot beyond was read");
    }
}

// Four slices of the resident positions, one of them empty. The processor's go with formats whose centroids are a
// GPU's.
void check_slices(random_problem &p)
{
    const reference_shape shape = reference_attention_shape(&p.attention);
    const int resident = (int)(shape.end - shape.oldest);
    const bool parts = p.row.exact_first || p.row.exact_last, mixed = !parts && !p.row.list_block && p.row.bits_alone;
    std::vector<int64_t> cuts = {shape.oldest, 0, 0, 0, shape.end};
    for (size_t i = 1; i < 4; i++) cuts[i] = shape.oldest + p.below(resident + 1);
    cuts[2] = cuts[1];
    std::sort(cuts.begin(), cuts.end());
    if (mixed) p.tolerance += attend_tolerance(&p.row);
    attend_check(&p, in_slices(p, cuts, (size_t)p.below(4), mixed, p.split).data(), "slices");
    if (!parts) check_beyond(p, cuts[1], cuts[3]);
}

// The same rows in pools, by tables with bad entries where nothing is seen. One page may be two of a table.
void check_pages(random_problem &p)
{
    const int sizes[] = {64, 16, 128, 1, 48, 7, 32, 64}, size = sizes[p.below(8)], capacity = p.row.key_capacity;
    const tqkv_attention whole = p.attention;
    const bool one_table = p.row.shared || p.below(2);
    const tqkv_store &value_shape = *whole.values;
    pool keys(p.keys, size, capacity, &p.random);
    const pool *same = one_table ? &keys : nullptr;
    pool values(value_shape, one_table || p.below(2) ? size : 192, one_table ? capacity : (int)whole.end, &p.random,
                same),
        tail(whole.tail ? p.tail : p.keys, size, capacity, &p.random, &keys);
    tqkv_attention paged = whole;
    paged.keys = &keys.store;
    paged.values = p.row.shared ? &keys.store : &values.store;
    if (whole.tail) paged.tail = &tail.store;
    if (!one_table && !p.row.window && !p.row.kv_len && !p.row.list_block && !p.row.exact_first && !p.row.exact_last &&
        whole.end >= 3 * size) {
        for (int i = 0; i < size; i++) copy_position(p.keys, 2 * size + i, p.keys, i);
        for (int i = 0; i < size && whole.tail; i++) copy_position(p.tail, 2 * size + i, p.tail, i);
        keys.table[0] = keys.table[2];
        reference_attend_as(REFERENCE_FLOATS, &whole, p.q, p.expected);
    }
    keys.copy_seen(paged, p.keys, &p.random);
    if (!p.row.shared) values.copy_seen(paged, p.values, &p.random);
    if (whole.tail) tail.copy_seen(paged, p.tail, &p.random);
    gpu_known_tables = p.below(2) != 0;
    const gpu_split split = gpu_known_tables ? p.planned : gpu_split{0, 0, 5, p.split.share, p.split.kernel};
    const std::vector<float> got = p.run(paged, split);
    check_bits(p.run(whole, split), got, "not the bits of a linear store");
    attend_check(&p, got.data(), "pages");
    gpu_known_tables = true;
}

// Queries and outputs of other types, and with gaps: the rounded floats, bit for bit, and nothing between them.
void check_strides(random_problem &p)
{
    const tqkv_type types[] = {TQKV_TYPE_F32, TQKV_TYPE_F16, TQKV_TYPE_BF16};
    const int n_heads = p.attention.n_heads;
    typed_rows q(types[p.below(3)], p.row.n_queries, n_heads, (int)p.head_dim, p.below(READ_LAYOUTS)),
        to(types[p.below(3)], p.row.n_queries, n_heads, (int)p.value_dim, p.below(LAYOUTS));
    q.fill(5, DATA_GAUSSIAN, p.row.query_size);
    const std::vector<char> packed_q = q.packed();
    std::vector<char> packed = to.packed();
    tqkv_attention calls[2] = {p.attention, p.attention};
    calls[0].query_type = q.type;
    calls[0].output_type = to.type;
    calls[1] = calls[0];
    calls[1].query_strides = q.at.strides;
    calls[1].output_strides = to.at.strides;
    CHECK_RUN(gpu_attend(&calls[0], packed_q.data(), packed.data(), p.split));
    CHECK_RUN(gpu_attend(&calls[1], q.first(), to.first(), p.split));
    CHECK(to.holds(packed), "%s to %s", q.at.name, to.at.name);
    for (size_t i = 0; i < p.n_rows * p.head_dim; i++) p.q[i] = q.value(packed_q, i);
    const std::vector<float> floats = p.run(p.attention, p.split);
    for (size_t i = 0; i < p.n_out && to.type != TQKV_TYPE_F32 && !gpu_schedules[0].flush_subnormals; i++) {
        uint16_t half;
        memcpy(&half, &packed[2 * i], 2);
        CHECK(half == reference_narrow(to.type, floats[i]), "value %zu: %.9g became %04x", i, (double)floats[i], half);
    }
}

// Bad entries are left out, and the longest row ends without a -1: the bits of the list without them.
void check_bad_entries(random_problem &p)
{
    tqkv_attention other = p.attention;
    const int rows = p.row.n_queries * std::max(other.list.heads, 1);
    std::vector<std::vector<int32_t>> lists((size_t)rows);
    size_t longest = 1;
    for (int i = 0; i < rows; i++) {
        const int32_t *const row = p.attention.list.rows + i * p.attention.list.length;
        for (const int32_t *at = row; *at != -1; at++) {
            const int32_t wrong[] = {*at, -2, INT32_MIN, -5};
            lists[(size_t)i].push_back(*at);
            if (p.below(2)) lists[(size_t)i].push_back(wrong[p.below(4)]);
            if (p.below(2) && at > row) lists[(size_t)i].push_back(at[-1]);
        }
        if (p.below(2)) lists[(size_t)i].push_back(INT32_MAX - i);
        longest = std::max(longest, lists[(size_t)i].size());
    }
    std::vector<int32_t> all;
    for (std::vector<int32_t> &row : lists) {
        if (row.size() < longest) row.push_back(-1);
        for (int32_t block = 0; row.size() < longest;) row.push_back(block++); // not read
        all.insert(all.end(), row.begin(), row.end());
    }
    other.list.rows = all.data();
    other.list.length = (int)longest;
    const std::vector<float> expected = p.run(p.attention, p.planned);
    gpu_known_tables = false;
    check_bits(expected, p.run(other, p.planned), "bad entries change bits");
    gpu_known_tables = true;
}

// A list of all blocks, and full masks of a tree, give the bits that there are without: whatever masks others have.
void check_full(random_problem &p)
{
    const int blocks[] = {1, 4, 16, 64, 128}, block = blocks[p.below(5)], n = p.row.n_queries;
    const bool tree = n > 1 && n <= 64 && !p.row.tree && !p.row.non_causal && p.below(2);
    const size_t length = (size_t)(p.attention.end / block) + 1, each = p.n_out / (size_t)n;
    std::vector<int32_t> list;
    std::vector<uint64_t> masks;
    for (int i = 0; i < n; i++) {
        for (size_t j = 0; j < length; j++) list.push_back((int32_t)j);
        masks.push_back(i % 2 ? data_bits(&p.random) : i % 4 ? UINT64_MAX : ((uint64_t)2 << i) - 1);
    }
    tqkv_attention other = p.attention;
    if (tree) {
        other.tree = masks.data();
    } else {
        other.list.rows = list.data();
        other.list.length = (int)length;
        other.list.block = block;
        other.list.newest = p.below(2) ? p.below(40) : 0;
    }
    const std::vector<float> expected = p.run(p.attention, p.planned), got = p.run(other, p.planned);
    for (int i = 0; i < n; i += tree ? 2 : 1)
        CHECK(!memcmp(&expected[(size_t)i * each], &got[(size_t)i * each], each * sizeof(float)),
              "query %d has other bits than without the %s", i, tree ? "tree" : "list");
}

void check_lists(random_problem &p)
{
    if (p.row.list_block)
        check_bad_entries(p);
    else
        check_full(p);
}

void check_nothing_more(random_problem &) {}

void (*const checks[])(random_problem &) = {check_nothing_more, check_company, check_slices,
                                            check_pages,        check_strides, check_lists};
enum form { DIVIDED, COMPANY, SLICES, PAGES, STRIDES, LISTS, FORMS };

// Makes a problem one that there is in the form.
void fit(attend_row &p, form as, int seed)
{
    const tqkv_format alike[] = {TQKV_F16, TQKV_I8, TQKV_TQ8};
    if (as != DIVIDED) p.poison = POISON_NONE;
    if (as == COMPANY) p.tree = p.non_causal = false, p.query_size = 10.0f; // maxima are raised often
    if (as == PAGES) { // whole tiles, so the last one is where it is in a pool
        p.key_ring = p.value_ring = false;
        p.key_capacity = p.value_capacity = 512;
        p.end = 40 + p.end % 200;
        p.kv_len = p.kv_len > p.end ? 0 : p.kv_len;
        const bool ends = !p.tail_dim && p.value_format != TQKV_F16; // of both streams
        p.exact_first = ends ? std::min(p.exact_first, 9) : 0;
        p.exact_last = ends ? std::min(p.exact_last, 20) : 0;
        p.codes_of_ends = 0;
    }
    if (as == SLICES) p.key_center = std::min(p.key_center, 0.5f); // which maxima of slices have
    if (as == SLICES && seed % 2) {                                // some of the processor's
        p.key_format = alike[seed / 2 % 3];
        p.value_format = p.shared ? p.key_format : alike[seed / 6 % 3];
        p.keys_turned = p.keys_turned && p.key_format == TQKV_TQ8;
        p.values_turned = p.values_turned && p.value_format == TQKV_TQ8;
        p.tail_format = TQKV_F16;
    }
    if (as == LISTS && seed % 2) p.list_block = p.list_block ? p.list_block : 1 << 2 * (seed % 4), p.list_share = 0.6f;
    if (as == LISTS && seed % 2 == 0) { // of all blocks: those of slots in the order of positions
        p.list_block = p.exact_first = p.exact_last = 0;
        p.key_ring = p.value_ring = false;
        p.end = 1 + p.end % std::min(p.key_capacity, p.value_capacity);
        p.kv_len = p.kv_len > p.end ? 0 : p.kv_len;
    }
}

struct seed_row {
    int seed, head_dim;
    form as;
};

attend_row row_of_seed(const seed_row &seed)
{
    const int most = seed.head_dim > 128 ? 120 : seed.as == COMPANY ? 400 : seed.seed % 9 == 8 ? 900 : 150;
    attend_row row = random_attend(seed.seed / FORMS + 13 * seed.as, seed.head_dim, most);
    fit(row, seed.as, seed.seed);
    return row;
}

void run_row(const seed_row &seed, const attend_row &row)
{
    random_problem p(row, seed.seed);
    p.row.bits_alone = seed.as == SLICES && seed.seed % 2; // then formats are alike
    gpu_split split = p.split;
    split.kernel = 0;
    check_divided(p, row, {as_planned, split});
    checks[seed.as](p);
}

// ---- What fails is shrunk: whatever it fails without becomes as in the default row ----

const struct {
    const char *name;
    void (*leave_out)(attend_row &p);
} options[] = {{"formats", [](attend_row &p) { p.key_format = p.value_format = p.tail_format = TQKV_I8; }},
               {"types of rotation", [](attend_row &p) { p.keys_turned = p.values_turned = false; }},
               {"bases", [](attend_row &p) { p.query_basis = p.output_basis = TQKV_ORIGINAL; }},
               {"block_scale", [](attend_row &p) { p.block_scale = 0.0f; }},
               {"scale", [](attend_row &p) { p.scale = 0.0f; }},
               {"softcap", [](attend_row &p) { p.softcap = 0.0f; }},
               {"large queries", [](attend_row &p) { p.query_size = 1.5f; }},
               {"sinks", [](attend_row &p) { p.sinks = SINKS_NONE; }},
               {"centers", [](attend_row &p) { p.key_center = p.value_center = p.tail_center = 0.0f; }},
               {"scales of channels", [](attend_row &p) { p.key_spread = p.value_spread = p.tail_spread = 0.0f; }},
               {"value_dim", [](attend_row &p) { p.value_dim = 0; }},
               {"one stream", [](attend_row &p) { p.shared = false; }},
               {"a tail", [](attend_row &p) { p.tail_dim = 0; }},
               {"a list", [](attend_row &p) { p.list_block = 0; }},
               {"halves", [](attend_row &p) { p.exact_first = p.exact_last = p.codes_of_ends = 0; }},
               {"poison", [](attend_row &p) { p.poison = POISON_NONE; }},
               {"a tree", [](attend_row &p) { p.tree = false, p.poison = POISON_NONE; }},
               {"queries that look ahead", [](attend_row &p) { p.non_causal = false; }},
               {"several queries", [](attend_row &p) { p.n_queries = 1, p.tree = false, p.poison = POISON_NONE; }},
               {"groups", [](attend_row &p) { p.group = p.n_kv_heads = 1; }},
               {"window", [](attend_row &p) { p.window = 0, p.poison = POISON_NONE; }},
               {"kv_len", [](attend_row &p) { p.kv_len = 0; }},
               {"positions", [](attend_row &p) {
                    p.key_ring = p.value_ring = false, p.poison = POISON_NONE;
                    p.end = 40, p.key_capacity = p.value_capacity = 48, p.kv_len = 0;
                }}};
enum { OPTIONS = sizeof options / sizeof *options };
seed_row shrunk;

// Runs a seed with these options alone.
int run_options(const uint8_t *numbers, size_t n)
{
    attend_row row = row_of_seed(shrunk);
    for (uint8_t i = 0; i < OPTIONS; i++)
        if (std::find(numbers, numbers + n, i) == numbers + n) options[i].leave_out(row);
    run_row(shrunk, row);
    return 0;
}

void shrink(const seed_row &seed)
{
    const history_row history = {run_options, seed.seed, 1};
    uint8_t numbers[HISTORY_BYTES];
    shrunk = seed;
    for (uint8_t i = 0; i < OPTIONS; i++) numbers[i] = i;
    if (!history_fails(&history, numbers, OPTIONS, true)) return;
    const size_t n = history_shrink(&history, numbers, OPTIONS);
    printf("  seed %d, d%d fails with", seed.seed, seed.head_dim);
    for (size_t i = 0; i < n; i++) printf("%s %s", i ? "," : "", options[numbers[i]].name);
    printf("%s\n", n ? "" : " nothing more");
}

void run_random(const void *parameters)
{
    const seed_row *seed = (const seed_row *)parameters;
    run_row(*seed, row_of_seed(*seed));
    if (test_failures() && !gpu_on_device) shrink(*seed);
}

void add_random(int n)
{
    static const char *const names[FORMS] = {"divided", "company", "slices", "pages", "strides", "lists"};
    const int head_dims[] = {64, 128, 32, 512, 80, 256, 64, 448, 48, 192, 96, 1024};
    for (int seed = 0; seed < n; seed++) {
        const seed_row row = {seed, head_dims[seed / FORMS % 12], (form)(seed % FORMS)};
        test_add(run_random, &row, sizeof row, "attend/%s/d%d/%d", names[row.as], row.head_dim, seed);
    }
}

// ---- Batches ----

// A call of a batch, with stores of its own.
struct item {
    attend_problem problem;
    std::unique_ptr<pool> keys, values;
    tqkv_attention call;
    item(const attend_row &row, int page_size, data_random *random); // 0: no pages
    ~item() { attend_tear_down(&problem); }
    item(const item &) = delete;
};

item::item(const attend_row &row, int page_size, data_random *random)
{
    attend_set_up_floats(&problem, &row);
    call = problem.attention;
    if (!page_size) return;
    keys.reset(new pool(problem.keys, page_size, row.key_capacity, random));
    values.reset(new pool(problem.values, 128, row.key_capacity, random));
    call.keys = &keys->store;
    call.values = &values->store;
    keys->copy_seen(call, problem.keys, random);
    values->copy_seen(call, problem.values, random);
}

// Row of a call of a batch whose calls have lists, halves of the first and last positions, pages, or none of them.
attend_row row_of_item(attend_row p, int seed, bool paged, data_random *random)
{
    random_context(&p, seed % 3 ? 60 : 300, random);
    p.end = p.end > INT32_MAX ? 500 : p.end;
    p.value_capacity = p.key_capacity; // as wide as halves
    if (paged) p.key_ring = p.value_ring = false, p.key_capacity = p.value_capacity = 384, p.end = p.end % 384;
    if (paged || p.kv_len > p.end || p.kv_len > p.key_capacity) p.kv_len = 0;
    p.exact_first = seed % 6 < 2 ? p.exact_first : 0;
    p.exact_last = seed % 6 < 2 ? 1 + data_below(random, 40) : 0;
    p.codes_of_ends = 0;
    if (seed % 6 != 1 && seed % 6 != 2) p.list_block = 0;
    if ((seed % 6 == 1 || seed % 6 == 2) && !p.list_block) p.list_block = 4, p.list_share = 0.5f;
    p.list_by_head = seed % 4 != 0;
    p.bits_alone = true;
    return p;
}

const int batch_dims[] = {64, 128, 80, 64, 192, 32, 512, 448};

// Each call has the bits that it has alone. Queries and outputs of all lie in one array, in some layouts between those
// of others.
void run_batch(const void *parameters)
{
    const int seed = *(const int *)parameters;
    data_random random = {(uint64_t)seed + 900};
    attend_row common = random_kernel(7 * seed, batch_dims[seed % 8], &random);
    const bool paged = seed % 2 && !common.shared && !common.tail_dim, lanes = seed % 4 > 1;
    common.key_spread = common.value_spread = common.tail_spread = 0.0f;
    for (tqkv_format *format : {&common.key_format, &common.value_format}) // of which no position is a half
        if (*format == TQKV_F16 && seed % 6 < 2) *format = TQKV_TQ4;
    if (lanes) common.group = 1 + common.group % 5; // calls of several parts run as they are planned
    std::vector<std::unique_ptr<item>> items;
    int n = 0, at = 0, n_heads = common.n_kv_heads * common.group; // n: queries; at: rows
    for (int i = 0; i < 1 + seed % 5; i++) {
        const attend_row row = row_of_item(common, seed, paged, &random);
        items.emplace_back(new item(row, !paged ? 0 : seed % 3 == 1 && i % 2 == 0 ? 16 : 64, &random));
        if (i == 3) items[3]->call.end = items[3]->call.kv_len = 0; // sees nothing
        if (i == 3 && paged) items[3]->keys->store.n_pages = 0;
        n += row.n_queries;
    }
    typed_rows q(test_no_type(seed % 3), n, n_heads, (int)items[0]->problem.head_dim,
                 seed % 5 ? 0 : seed % READ_LAYOUTS),
        to(test_no_type(seed / 3 % 3), n, n_heads, (int)items[0]->problem.value_dim, seed % 5 > 1 ? 0 : seed % LAYOUTS);
    q.fill(5, DATA_GAUSSIAN, common.query_size);
    const std::vector<char> packed_q = q.packed();
    std::vector<char> expected = to.packed();
    std::vector<tqkv_attention> calls;
    std::vector<const void *> sources;
    std::vector<void *> outputs;
    for (std::unique_ptr<item> &own : items) {
        own->call.query_type = q.type;
        own->call.output_type = to.type;
        CHECK_RUN(gpu_attend(&own->call, &packed_q[(size_t)(at * q.dim) * size_of(q.type)],
                             &expected[(size_t)(at * to.dim) * size_of(to.type)], {0, 0, 0, 0, lanes ? GPU_LANES : 0}));
        own->call.query_strides = q.at.strides;
        own->call.output_strides = to.at.strides;
        calls.push_back(own->call);
        sources.push_back(q.row(at));
        outputs.push_back(to.row(at));
        at += own->call.n_queries * n_heads;
    }
    CHECK_RUN(gpu_attend_batch(calls, sources, outputs, lanes));
    CHECK(to.holds(expected), "an item of %zu has other bits alone", items.size());
}

// ---- Shapes that are not found at random ----

int planned_strands(const tqkv_attention &call)
{
    tqkv_metal_plan plan;
    CHECK_RESULT(gpu_plan(tqkv_metal_plan_attend, &call, nullptr, nullptr, nullptr, &plan), TQKV_OK);
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
    const random_problem p(row, seed);
    const std::vector<float> out = p.run(p.attention, as_planned);
    CHECK(planned_strands(p.attention) == 1, "the call has strands");
    for (int query : {0, row.n_queries - 1}) {
        CHECK(planned_strands(call_of_one_query(p.attention, query)) == TQKV__STRANDS, "query %d has none", query);
        check_alone(p.attention, p.q, out.data(), query, as_planned);
    }
}

// Slices that begin with a stretch or a section, added in this order, have the bits of the whole call, which is near
// double precision: by both kernels.
struct slices_row {
    tqkv_format keys, values;
    int head_dim, group, n_queries, end, window;
    float softcap, key_center;
    gpu_split split;
    int cuts[6];
};

void run_bits_of_slices(const void *parameters)
{
    const slices_row *from = (const slices_row *)parameters;
    attend_row row = attend_default_row(from->keys, from->values, from->head_dim);
    row.n_kv_heads = 1;
    row.group = from->group;
    row.n_queries = from->n_queries;
    row.end = row.key_capacity = row.value_capacity = from->end;
    row.window = from->window;
    row.softcap = from->softcap;
    row.key_center = from->key_center; // under softcap a part of each score
    row.sinks = SINKS_SOME;
    row.query_size = 10.0f; // maxima differ between the slices
    random_problem p(row, 0);
    check_divided(p, row, {from->split});
    std::vector<int64_t> cuts(1, 0);
    for (int at : from->cuts)
        if (at) cuts.push_back(at);
    cuts.push_back(from->end);
    check_bits(in_slices(p, cuts, 0, false, from->split), p.run(p.attention, from->split),
               "slices have other bits than the whole call");
}

void add_bits_of_slices()
{
    const slices_row rows[] = {{TQKV_I8, TQKV_TQ4, 64, 2, 1, 1690, 0, 0.0f, 0.0f, as_planned, {512, 1024, 1536}},
                               {TQKV_I8, TQKV_TQ4, 64, 8, 3, 1690, 0, 0.0f, 0.0f, as_planned, {512, 1024, 1536}},
                               {TQKV_I8, TQKV_TQ4, 64, 8, 1, 1690, 0, 4.0f, 0.5f, as_planned, {1024, 1536}},
                               {TQKV_I8, TQKV_TQ4, 512, 8, 1, 300, 0, 0.0f, 0.0f, {0, 0, 10}, {192, 224, 256, 288}},
                               {TQKV_F16, TQKV_TQ3, 32, 2, 1, 4790, 1200, 0.0f, 0.0f, {0, 2, 150}, {3584, 4096, 4608}}};
    for (const slices_row &row : rows)
        test_add(run_bits_of_slices, &row, sizeof row, "attend/bits_of_slices/%d", (int)(&row - rows));
    for (int share : {GPU_EACH, GPU_SECTIONS, GPU_EVERYTHING}) { // 150 stretches in 10 sections
        const slices_row row = {
            TQKV_I8, TQKV_TQ4, 32, 2, 2, 4800, 0, 0.0f, 0.0f, {0, 2, 150, share}, {416, 448, 480, 512, 2560, 4608}};
        test_add(run_bits_of_slices, &row, sizeof row, "attend/sections/share%d", share);
    }
}

// More columns and rows than a threadgroup takes, and prefill.
void add_shapes()
{
    const int shapes[][6] = {{8, 1, 8, 4, 2, GPU_SECTIONS},      {4, 9, 3, 4, 40, GPU_EVERYTHING},
                             {2, 45, 32, 2, 40, GPU_EVERYTHING}, {2, 40, 32, 1, 5, GPU_EACH},
                             {2, 200, 8, 2, 40, GPU_EVERYTHING}, {1, 600, 32, 4, 3, GPU_EVERYTHING}};
    for (const int *shape : shapes) {
        shape_row row = {attend_default_row(TQKV_I8, TQKV_TQ4, 128), {shape[2], shape[3], shape[4], shape[5]}};
        attend_row &p = row.problem;
        p.group = shape[0];
        p.n_queries = shape[1];
        p.end = p.n_queries > 100 ? p.n_queries + 30 : p.n_queries > 17 ? 44 : 100; // of 45 queries one sees nothing
        p.key_capacity = p.value_capacity = p.n_queries > 100 ? (int)p.end : 110;
        p.n_kv_heads = p.n_queries > 500 ? 1 : 2;
        test_add(run_shape, &row, sizeof row, "attend/shape/group%d_queries%d", p.group, p.n_queries);
    }
}

// A position that only some queries see holds NaN in norms or halves.
void add_poisons()
{
    const tqkv_format formats[] = {TQKV_F16, TQKV_TQ4, TQKV_I8};
    for (int i = 0; i < 18; i++) {
        shape_row row = {attend_default_row(formats[i % 3], formats[i / 3 % 3], 256), {GPU_MOST, 2, 1}};
        row.problem.n_queries = 3;
        row.problem.window = i < 9 ? 0 : 20;
        row.problem.poison = i < 9 ? POISON_NEWEST : POISON_OLDEST;
        test_add(run_shape, &row, sizeof row, "attend/poison/%d", i);
    }
}

// The masks of a tree have two words.
void add_tree()
{
    shape_row row = {attend_default_row(TQKV_TQ4, TQKV_TQ4, 64), {GPU_MOST, 2, 2}};
    row.problem.n_kv_heads = 1;
    row.problem.n_queries = 64;
    row.problem.end = row.problem.key_capacity = row.problem.value_capacity = 100;
    row.problem.tree = true;
    test_add(run_shape, &row, sizeof row, "attend/tree");
}

// Long rows in stretches that do not end with a round of tiles; one with scores in the hundreds, one by lanes whose
// newest keys are halves and have their tails among the others.
void add_rounds()
{
    for (int share : {GPU_EACH, GPU_SECTIONS, GPU_EVERYTHING, GPU_STRANDS}) {
        shape_row row = {attend_default_row(TQKV_TQ4, TQKV_TQ4, 512), {GPU_MOST, 8, 7, share}};
        row.problem.shared = true;
        row.problem.n_kv_heads = 1;
        row.problem.group = share == GPU_STRANDS ? 2 : 8;
        row.problem.exact_last = share == GPU_STRANDS ? 40 : 0;
        row.problem.tail_dim = 64;
        row.problem.tail_format = TQKV_F16;
        row.problem.end = row.problem.key_capacity = row.problem.value_capacity = 700;
        row.problem.query_size = share == GPU_EVERYTHING ? 40.0f : 1.5f;
        test_add(run_shape, &row, sizeof row, "attend/rounds/share%d", share);
    }
}

} // namespace

void attend_shader_cases()
{
    add_random(gpu_record ? 72 : gpu_on_device ? 120 : 432);
    add_shapes();
    add_bits_of_slices();
    add_poisons();
    add_tree();
    add_rounds();
    for (int seed = 0; seed < 4; seed++) test_add(run_strands_of_one, &seed, sizeof seed, "attend/strands/%d", seed);
    for (int seed = 0; seed < 48; seed++)
        test_add(run_batch, &seed, sizeof seed, "batch/d%d/%d", batch_dims[seed % 8], seed);
    const bool sanitized = gpu_schedules.size() == 1 && !gpu_on_device; // too slow for a million positions
    for (int share : {GPU_EACH, GPU_SECTIONS, GPU_EVERYTHING}) {
        const int positions = sanitized ? 1 << 13 : share == GPU_EVERYTHING || gpu_on_device ? 1 << 20 : 1 << 18;
        add_length({TQKV_I8, TQKV_F16, 32, 1, 1, 1, positions, share});
    }
}
