// Lists of blocks: against attention over a store that holds the seen positions alone. Those that nothing sees are NaN.
#include "shader_cases.h"
#include <algorithm>

namespace
{

struct list_row {
    attend_row row;
    int block, length, newest, page_size; // page_size 0: no pages
    bool per_head;
    gpu_split split;
};

// An attention with lists, and pools in place of its stores if it has pages.
struct listed {
    attend_problem problem;
    tqkv_attention attention;
    tqkv_store pools[2];
    std::vector<int32_t> list, table;
    listed(const list_row &row, data_random *random);
    ~listed();
    listed(const listed &) = delete;
};

// The rows of a list, ascending: some blocks of all up to the end and one more, then -1 and what is not read.
std::vector<int32_t> random_lists(const list_row &row, const tqkv_attention &a, data_random *random)
{
    const int blocks = (int)(a.end / row.block) + 2, oldest = (int)(reference_attention_shape(&a).oldest / row.block);
    const int rows = a.n_queries * (row.per_head ? a.keys->n_kv_heads : 1), room = blocks - std::max(oldest - 2, 0);
    std::vector<int32_t> list;
    for (int i = 0; i < rows; i++) {
        std::vector<int32_t> own;
        for (int b = blocks - room; b < blocks; b++)
            if (row.length >= room || data_below(random, room) < row.length) own.push_back(b);
        if (data_below(random, 3) || (int)own.size() > row.length) own.resize(std::min(own.size(), (size_t)row.length));
        if ((int)own.size() < row.length) own.push_back(-1);
        while ((int)own.size() < row.length) own.push_back(data_below(random, blocks));
        list.insert(list.end(), own.begin(), own.end());
    }
    return list;
}

bool is_listed(const tqkv_attention &a, int query, int kv_head, int64_t position)
{
    const int32_t *row =
        a.list.rows + (size_t)(query * a.list.heads + (a.list.heads > 1 ? kv_head : 0)) * (size_t)a.list.length;
    for (int i = 0; i < a.list.length && row[i] != -1; i++)
        if (row[i] == position / a.list.block) return true;
    return false;
}

// What a query sees by a list, ascending.
std::vector<int64_t> seen_positions(const tqkv_attention &a, int query, int kv_head)
{
    std::vector<int64_t> seen;
    int left = a.list.newest;
    for (int64_t p = a.end - 1; p >= reference_attention_shape(&a).oldest; p--) {
        if (!reference_is_visible(&a, query, p)) continue;
        if (left-- > 0 || is_listed(a, query, kv_head, p)) seen.push_back(p);
    }
    std::reverse(seen.begin(), seen.end());
    return seen;
}

void copy_row(const tqkv_store &from, int from_head, int64_t at, const tqkv_store &to, int to_head, int64_t position)
{
    const size_t norms = (size_t)reference_norms_per_row(from.format, from.head_dim) * sizeof(float);
    memcpy((void *)(uintptr_t)reference_codes_at(&to, to_head, position), reference_codes_at(&from, from_head, at),
           reference_row_bytes(from.format, from.head_dim));
    if (norms)
        memcpy((void *)(uintptr_t)reference_norms_at(&to, to_head, position), reference_norms_at(&from, from_head, at),
               norms);
}

void poison_unseen(listed &l)
{
    const tqkv_attention &a = l.attention;
    std::vector<bool> seen((size_t)(a.end - reference_attention_shape(&a).oldest));
    for (int i = 0; i < a.n_queries; i++)
        for (int h = 0; h < a.keys->n_kv_heads; h++)
            for (int64_t p : seen_positions(a, i, h)) seen[(size_t)(p - reference_attention_shape(&a).oldest)] = true;
    for (size_t i = 0; i < seen.size(); i++) {
        if (seen[i]) continue;
        attend_poison_position(&l.problem.keys, reference_attention_shape(&a).oldest + (int64_t)i, true);
        attend_poison_position(&l.problem.values, reference_attention_shape(&a).oldest + (int64_t)i, true);
    }
}

listed::listed(const list_row &row, data_random *random) : pools()
{
    attend_set_up_floats(&problem, &row.row);
    attention = problem.attention;
    list = random_lists(row, attention, random);
    attention.list.rows = list.data();
    attention.list.length = row.length;
    attention.list.heads = row.per_head ? problem.keys.n_kv_heads : 1;
    attention.list.block = row.block;
    attention.list.newest = row.newest;
    poison_unseen(*this);
    if (!row.page_size) return;
    const int n_pages = ((int)attention.end + row.page_size - 1) / row.page_size;
    for (int i = 0; i < n_pages; i++) table.push_back((i * 7 + 3) % n_pages);
    if (n_pages % 7 == 0) std::reverse(table.begin(), table.end());
    for (int i = 0; i < 2; i++) {
        const tqkv_store &from = i ? problem.values : problem.keys;
        pools[i] = test_store(from.format, from.head_dim, from.n_kv_heads, n_pages * row.page_size, false);
        pools[i].center = from.center;
        pools[i].pages = table.data();
        pools[i].n_pages = n_pages;
        pools[i].page_size = row.page_size;
        for (int64_t p = 0; p < attention.end; p++)
            for (int h = 0; h < from.n_kv_heads; h++) copy_row(from, h, p, pools[i], h, p);
    }
    attention.keys = &pools[0];
    attention.values = &pools[1];
}

listed::~listed()
{
    for (tqkv_store &s : pools)
        if (s.codes) test_store_free(&s);
    attend_tear_down(&problem);
}

// The positions that a query sees by its list, in a store of one head.
tqkv_store gathered(const tqkv_store &from, int kv_head, const std::vector<int64_t> &positions)
{
    tqkv_store s = test_store(from.format, from.head_dim, 1, std::max((int)positions.size(), 1), false);
    s.rotation = from.rotation;
    s.block_scale = from.block_scale;
    if (from.center) s.center = from.center + kv_head * from.head_dim;
    for (size_t i = 0; i < positions.size(); i++) copy_row(from, kv_head, positions[i], s, 0, (int64_t)i);
    return s;
}

// The rows of one query and KV head.
void expect_rows(const listed &l, int query, int kv_head, std::vector<double> *out)
{
    const attend_problem &p = l.problem;
    const int group = p.attention.n_heads / p.keys.n_kv_heads;
    const size_t first = (size_t)(query * p.attention.n_heads + kv_head * group);
    const std::vector<int64_t> seen = seen_positions(l.attention, query, kv_head);
    tqkv_store keys = gathered(p.keys, kv_head, seen), values = gathered(p.values, kv_head, seen);
    tqkv_attention a = p.attention;
    a.keys = &keys;
    a.values = &values;
    a.n_heads = group;
    a.n_queries = 1;
    a.end = (int64_t)seen.size();
    a.kv_len = a.window = 0;
    a.tree = nullptr;
    if (a.sinks) a.sinks += kv_head * group;
    if (a.end) reference_attend_as(REFERENCE_FLOATS, &a, p.q + first * p.head_dim, &(*out)[first * p.value_dim]);
    test_store_free(&keys);
    test_store_free(&values);
}

void run_list(const void *parameters)
{
    const list_row &row = *(const list_row *)parameters;
    data_random random = {(uint64_t)(row.block * 1000 + row.length)};
    const listed l(row, &random);
    const size_t n = l.problem.n_rows * l.problem.value_dim, d = l.problem.value_dim;
    std::vector<float> got(n, NAN);
    std::vector<double> expected(n);
    for (int i = 0; i < l.attention.n_queries; i++)
        for (int h = 0; h < l.problem.keys.n_kv_heads; h++) expect_rows(l, i, h, &expected);
    for (int kernel : {GPU_LANES, GPU_MATRICES}) {
        gpu_split split = row.split;
        split.kernel = kernel;
        CHECK_RUN(gpu_attend(&l.attention, l.problem.q, got.data(), split));
        for (size_t i = 0; i < l.problem.n_rows; i++) {
            const double error = reference_relative_error(&got[i * d], &expected[i * d], d);
            CHECK(error <= ATTEND_TOLERANCE, "row %zu: relative error %.3g%s", i, error,
                  kernel == GPU_MATRICES ? ", by matrices" : "");
        }
    }
}

list_row make_row(tqkv_format keys, tqkv_format values, int head_dim, int block, int length)
{
    list_row row = {attend_default_row(keys, values, head_dim), block, length, 0, 0, false, as_planned};
    row.row.key_capacity = row.row.value_capacity = 512;
    row.row.end = 500;
    return row;
}

list_row random_row(int seed, data_random *random)
{
    const int head_dims[] = {64, 128, 80, 64, 256, 32, 192, 128}, blocks[] = {1, 4, 16, 64, 128};
    list_row row = make_row(test_formats[data_below(random, TEST_FORMATS)],
                            test_formats[data_below(random, TEST_FORMATS)], head_dims[seed % 8], blocks[seed % 5], 0);
    attend_row &r = row.row;
    r.value_dim = r.head_dim == 192 && seed % 2 ? 128 : 0;
    r.end = 20 + data_below(random, r.head_dim > 128 ? 200 : 480);
    r.n_queries = seed % 3 ? 1 : 1 + data_below(random, 5);
    r.group = 1 + data_below(random, 9);
    r.tree = r.n_queries > 1 && seed % 2;
    r.kv_len = seed % 7 == 3 ? 1 + data_below(random, (int)r.end) : 0;
    r.window = seed % 7 == 5 ? 1 + data_below(random, 200) : 0;
    r.non_causal = !r.tree && seed % 3 == 0;
    r.softcap = seed % 6 == 5 ? 3.0f : 0.0f;
    r.sinks = (attend_sinks)(seed % 4);
    r.key_center = r.value_center = seed % 8 ? 0.0f : 0.5f;
    row.page_size = seed % 4 == 2 ? seed % 8 == 6 ? 8 : 64 : 0;
    if (!row.page_size && seed % 3 == 1) { // a ring, wrapped or not
        r.key_ring = r.value_ring = true;
        r.key_capacity = 40 + data_below(random, 300);
        r.value_capacity = r.key_capacity + (seed % 2 ? 0 : 30);
    }
    if (r.kv_len > r.key_capacity) r.kv_len = r.key_capacity;
    row.length = 1 + data_below(random, 1 + (int)r.end / row.block);
    row.newest = seed % 2 ? data_below(random, 70) : 0;
    row.per_head = seed % 3 == 2;
    if (seed % 4 == 1) row.split = {seed % 8 == 1 ? GPU_MOST : 0, 1 + data_below(random, 4), 5, GPU_EACH + seed % 3};
    return row;
}

// A list of all blocks gives the bits that there are without one, at any place of the oldest position.
void run_full(const void *parameters)
{
    list_row row = *(const list_row *)parameters;
    row.length = (int)row.row.end / row.block + 1;
    data_random random = {7};
    listed l(row, &random);
    const size_t n = l.problem.n_rows * l.problem.value_dim;
    std::vector<float> expected(n), got(n, NAN);
    for (size_t i = 0; i < l.list.size(); i++) l.list[i] = (int32_t)(i % (size_t)row.length);
    attend_tear_down(&l.problem);
    attend_set_up_floats(&l.problem, &row.row); // no position is hidden
    tqkv_attention a = l.problem.attention, b = a;
    b.list.rows = l.list.data();
    b.list.length = row.length;
    b.list.block = row.block;
    b.list.newest = row.newest;
    for (int kernel : {GPU_LANES, GPU_MATRICES}) {
        gpu_split split = row.split;
        split.kernel = kernel;
        CHECK_RUN(gpu_attend(&a, l.problem.q, expected.data(), split));
        CHECK_RUN(gpu_attend(&b, l.problem.q, got.data(), split));
        CHECK(!memcmp(expected.data(), got.data(), n * sizeof(float)), "not the bits without a list%s",
              kernel == GPU_MATRICES ? ", by matrices" : "");
    }
}

// Bad entries are left out: the bits are those of a list without them. A query has the same bits alone.
void run_bad_entries(const void *parameters)
{
    list_row row = *(const list_row *)parameters;
    data_random random = {11};
    listed l(row, &random);
    const int length = row.length, wide = 3 * length + 1;
    const size_t n = l.problem.n_rows * l.problem.value_dim, each = n / (size_t)l.attention.n_queries;
    std::vector<float> expected(n), got(n, NAN), alone(each, NAN);
    std::vector<int32_t> bad;
    for (int i = 0; i < l.attention.n_queries; i++) {
        int32_t largest = 0;
        for (int j = 0; j < length && l.list[(size_t)(i * length + j)] != -1; j++) {
            const int32_t block = largest = l.list[(size_t)(i * length + j)],
                          wrong[] = {block, -2, INT32_MIN, block - 1};
            bad.push_back(block);
            bad.push_back(wrong[data_below(&random, 4)] == -1 ? -3 : wrong[data_below(&random, 3)]);
            if (j % 2) bad.push_back(block / 2 == block ? -5 : block / 2);
        }
        bad.push_back(INT32_MAX - i);
        if ((int)bad.size() < (i + 1) * wide) bad.push_back(largest);
        bad.resize((size_t)((i + 1) * wide), -1);
    }
    CHECK_RUN(gpu_attend(&l.attention, l.problem.q, expected.data(), as_planned));
    tqkv_attention a = l.attention;
    a.list.rows = bad.data();
    a.list.length = wide;
    gpu_known_tables = false;
    CHECK_RUN(gpu_attend(&a, l.problem.q, got.data(), as_planned));
    gpu_known_tables = true;
    CHECK(!memcmp(expected.data(), got.data(), n * sizeof(float)), "bad entries change bits");
    for (int i = 0; i < l.attention.n_queries; i++) {
        a = l.attention;
        a.n_queries = 1;
        a.end = l.attention.end - l.attention.n_queries + i + 1;
        a.list.rows += i * length;
        CHECK_RUN(gpu_attend(
            &a, l.problem.q + (size_t)i * l.problem.n_rows / (size_t)l.attention.n_queries * l.problem.head_dim,
            alone.data(), as_planned));
        CHECK(!memcmp(&expected[(size_t)i * each], alone.data(), each * sizeof(float)), "query %d has other bits alone",
              i);
    }
}

// A window that begins in the second stretch, while its block begins in the first: the slots of a ring may lie so.
void add_window()
{
    list_row row = make_row(TQKV_I8, TQKV_TQ4, 64, 128, 1);
    row.newest = 224;
    row.row.key_ring = row.row.value_ring = true;
    row.row.key_capacity = row.row.value_capacity = 1200;
    row.row.end = 2400;
    row.row.kv_len = 1000;
    row.row.window = 680;
    test_add(run_list, &row, sizeof row, "list/ring_window");
}

void add_full()
{
    const int blocks[] = {1, 4, 16, 64, 128};
    for (int i = 0; i < 10; i++) {
        list_row row = make_row(test_formats[i % TEST_FORMATS], test_formats[(i + 4) % TEST_FORMATS], i % 3 ? 64 : 80,
                                blocks[i % 5], 0);
        row.row.key_capacity = row.row.value_capacity = i % 4 == 3 ? 501 : i == 2 ? 19 : 512;
        row.row.end = i == 2 ? 19 : i % 4 == 1 ? 333 : 500;
        row.row.n_queries = 1 + i % 3;
        row.row.group = 1 + i % 6;
        row.row.kv_len = i % 4 == 1 ? 190 : 0;
        row.row.window = i == 6 || i == 8 ? 170 : 0;
        row.newest = i % 5 == 4 ? 30 : 0;
        if (i == 5) row.split = {0, 2, 40, GPU_SECTIONS};
        test_add(run_full, &row, sizeof row, "list/full/%d", i);
    }
}

// Rows whose values eight simdgroups share, over several rounds of eight tiles.
void add_long()
{
    for (int i = 0; i < 4; i++) {
        list_row row =
            make_row(i % 2 ? TQKV_TQ4 : TQKV_I8, i == 2 ? TQKV_F16 : TQKV_TQ4, i % 2 ? 512 : 448, i % 2 ? 1 : 16, 700);
        row.row.key_capacity = row.row.value_capacity = 800;
        row.row.end = 700 + i;
        row.row.group = 8;
        row.length = (int)row.row.end / row.block * 3 / 4;
        test_add(run_list, &row, sizeof row, "list/long/%d", i);
        row.row.shared = true;
        row.row.value_format = row.row.key_format;
        row.row.tail_dim = 64;
        row.row.tail_format = TQKV_F16;
        test_add(run_full, &row, sizeof row, "list/long/full/%d", i);
    }
}

} // namespace

void list_shader_cases()
{
    for (int seed = 0; seed < 40; seed++) {
        data_random random = {(uint64_t)seed + 300};
        const list_row row = random_row(seed, &random);
        test_add(run_list, &row, sizeof row, "list/random/%d", seed);
    }
    add_full();
    add_long();
    add_window();
    for (int block : {1, 16}) {
        list_row row = make_row(TQKV_I8, TQKV_TQ4, 64, block, 100 / block);
        row.row.n_queries = 3;
        row.row.group = 4;
        test_add(run_bad_entries, &row, sizeof row, "list/bad_entries/%d", block);
    }
}
