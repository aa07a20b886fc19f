// Page tables: the bytes and bits of a linear store, whatever the table.
// Pools hold NaN where no sequence has a position.
// Batches: the bits of each item alone.
#include "shader_cases.h"
#include <algorithm>
#include <memory>

namespace
{

// A pool over its own memory, and a table for `positions` positions: pages at random, no entry that nothing uses.
struct pool {
    tqkv_store store;
    std::vector<int32_t> table;
    pool(const tqkv_store &shape, int page_size, int positions, data_random *random);
    ~pool() { test_store_free(&store); }
    pool(const pool &) = delete;
};

pool::pool(const tqkv_store &shape, int page_size, int positions, data_random *random)
{
    const int n_pages = (positions + page_size - 1) / page_size, spare = 1 + data_below(random, 3);
    store = test_store(shape.format, shape.head_dim, shape.n_kv_heads, (n_pages + spare) * page_size, false);
    store.type = shape.type;
    store.center = shape.center;
    store.rotation = shape.rotation;
    store.block_scale = shape.block_scale;
    for (int i = 0; i < n_pages + spare; i++) { // shuffled
        const size_t j = (size_t)data_below(random, i + 1);
        table.push_back(i);
        std::swap(table[j], table.back());
    }
    table.resize((size_t)n_pages);
    store.pages = table.data();
    store.n_pages = (int)table.size();
    store.page_size = page_size;
}

void copy_position(const tqkv_store &from, int64_t at, const tqkv_store &to, int64_t position)
{
    for (int head = 0; head < from.n_kv_heads; head++) {
        const size_t norms = (size_t)reference_norms_per_row(from.format, from.head_dim) * sizeof(float);
        memcpy((void *)(uintptr_t)reference_codes_at(&to, head, position), reference_codes_at(&from, head, at),
               reference_row_bytes(from.format, from.head_dim));
        if (norms)
            memcpy((void *)(uintptr_t)reference_norms_at(&to, head, position), reference_norms_at(&from, head, at),
                   norms);
    }
}

// ---- Encoding and decoding ----

struct codec_row {
    tqkv_format format, value_format;
    int head_dim, value_dim, page_size, n_tokens;
    int64_t position;
};

tqkv_store make_linear(tqkv_format format, int head_dim, const float *center)
{
    tqkv_store s = test_store(format, head_dim, 3, 512, false);
    s.center = center;
    return s;
}

bool same_positions(const tqkv_store &a, const tqkv_store &b, int64_t first, int n)
{
    const size_t norms = (size_t)reference_norms_per_row(a.format, a.head_dim) * sizeof(float);
    for (int64_t p = first; p < first + n; p++)
        for (int head = 0; head < a.n_kv_heads; head++)
            if (memcmp(reference_codes_at(&a, head, p), reference_codes_at(&b, head, p),
                       reference_row_bytes(a.format, a.head_dim)) ||
                (norms && memcmp(reference_norms_at(&a, head, p), reference_norms_at(&b, head, p), norms)))
                return false;
    return true;
}

// The slots that no token has hold what test_store filled them with.
bool is_rest_untouched(const pool &p, const std::vector<int32_t> &written)
{
    tqkv_store s = p.store;
    s.pages = nullptr;
    for (int slot = 0; slot < s.capacity; slot++) {
        if (std::find(written.begin(), written.end(), slot) != written.end()) continue;
        for (int head = 0; head < s.n_kv_heads; head++)
            for (size_t i = 0; i < reference_row_bytes(s.format, s.head_dim); i++)
                if (reference_codes_at(&s, head, slot)[i] != 0xff) return false;
    }
    return true;
}

std::vector<int32_t> slots_of(const pool &p, int64_t first, int n)
{
    std::vector<int32_t> slots;
    for (int64_t at = first; at < first + n; at++) slots.push_back((int32_t)reference_slot(&p.store, at));
    return slots;
}

void check_codec(const codec_row &row, bool known)
{
    data_random random = {(uint64_t)row.head_dim};
    const int d = row.head_dim, v = row.value_dim ? row.value_dim : d, n = row.n_tokens;
    float *k = test_rows(3, DATA_GAUSSIAN, n * 3, d), *values = test_rows(4, DATA_STUDENT, n * 3, v);
    float *center = test_rows(5, DATA_GAUSSIAN, 3, d);
    tqkv_store linear = make_linear(row.format, d, center), linear_values = make_linear(row.value_format, v, nullptr);
    pool paged(linear, row.page_size, 300, &random), paged_values(linear_values, 64, 300, &random);
    if (row.position >= row.page_size) paged.table[0] = -1; // no token has a position here
    CHECK_RESULT(tqkv_encode(&linear, k, n, row.position), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&linear_values, values, n, row.position), TQKV_OK);
    gpu_known_tables = known;
    CHECK_RUN(gpu_encode_kv(&paged.store, &paged_values.store, k, values, n, row.position, nullptr));
    CHECK(same_positions(linear, paged.store, row.position, n), "keys of the pair");
    CHECK(same_positions(linear_values, paged_values.store, row.position, n), "values of the pair");
    memset(paged.store.codes, 0xff, paged.store.codes_size);
    CHECK_RUN(gpu_encode(&paged.store, k, n, row.position, nullptr));
    CHECK(same_positions(linear, paged.store, row.position, n), "keys alone");
    CHECK(is_rest_untouched(paged, slots_of(paged, row.position, n)), "another slot was written");
    std::vector<float> expected((size_t)(n * 3 * d)), got(expected);
    CHECK_RESULT(tqkv_decode(&linear, row.position, n, TQKV_ORIGINAL, expected.data()), TQKV_OK);
    CHECK_RUN(gpu_decode(&paged.store, row.position, n, TQKV_ORIGINAL, got.data()));
    CHECK(!memcmp(expected.data(), got.data(), got.size() * sizeof(float)), "decoded rows differ");
    gpu_known_tables = true;
    for (tqkv_store *s : {&linear, &linear_values}) test_store_free(s);
    for (float *p : {k, values, center}) free(p);
}

void run_codec(const void *parameters)
{
    for (bool known : {true, false}) check_codec(*(const codec_row *)parameters, known);
}

// Entries that the processor does not know leave their tokens out, and decoding reads some row of the store. 64 times
// the largest ones wraps to a slot of the store.
void check_bad_entries(int32_t first, int32_t second)
{
    data_random random = {9};
    float *rows = test_rows(3, DATA_GAUSSIAN, 130 * 3, 64);
    tqkv_store linear = make_linear(TQKV_TQ4, 64, nullptr);
    pool paged(linear, 64, 192, &random);
    CHECK_RESULT(tqkv_encode(&linear, rows, 130, 0), TQKV_OK);
    const std::vector<int32_t> last = slots_of(paged, 128, 2);
    std::vector<float> decoded(130 * 3 * 64);
    gpu_known_tables = false;
    paged.table[0] = first;
    paged.table[1] = second;
    CHECK_RUN(gpu_encode(&paged.store, rows, 130, 0, nullptr));
    CHECK(same_positions(linear, paged.store, 128, 2), "the good entry");
    CHECK(is_rest_untouched(paged, last), "a bad entry was followed");
    CHECK_RUN(gpu_decode(&paged.store, 0, 130, TQKV_ORIGINAL, decoded.data()));
    gpu_known_tables = true;
    test_store_free(&linear);
    free(rows);
}

void run_bad_entries(const void *)
{
    check_bad_entries(-1, 6); // of 4 to 6 pages
    check_bad_entries(INT32_MIN, 1 << 26);
}

// [n]: slots of a pool, none twice; every seventh token is left out.
std::vector<int32_t> random_slots(int n, int capacity, data_random *random)
{
    std::vector<int32_t> all, slots;
    for (int i = 0; i < capacity; i++) all.push_back(i);
    for (int t = 0; t < n; t++) {
        std::swap(all[(size_t)t], all[(size_t)(t + data_below(random, capacity - t))]);
        slots.push_back(t % 7 == 2 ? -1 : all[(size_t)t]);
    }
    return slots;
}

void check_slots(const codec_row &row, int n, bool known)
{
    data_random random = {(uint64_t)row.head_dim};
    const int d = row.head_dim, v = row.value_dim ? row.value_dim : d;
    float *k = test_rows(3, DATA_GAUSSIAN, n * 3, d), *values = test_rows(4, DATA_STUDENT, n * 3, v);
    const tqkv_store shape = make_linear(row.format, d, nullptr),
                     value_shape = make_linear(row.value_format, v, nullptr);
    tqkv_store stores[4] = {make_linear(row.format, d, nullptr), make_linear(row.value_format, v, nullptr), shape,
                            value_shape};
    for (int i = 0; i < 2; i++) stores[i].ring = true; // not looked at
    std::vector<int32_t> slots = random_slots(n, shape.capacity, &random);
    uint32_t flag = 1;
    gpu_known_tables = known;
    CHECK_RESULT(test_encode_slots(&stores[2], k, n, slots.data()), TQKV_OK);
    CHECK_RESULT(test_encode_slots(&stores[3], values, n, slots.data()), TQKV_OK);
    if (!known) slots[2] = shape.capacity; // as good as left out
    CHECK_RUN(gpu_encode_slots(&stores[0], &stores[1], k, values, n, slots.data(), &flag));
    CHECK(!flag && !memcmp(stores[0].codes, stores[2].codes, stores[2].codes_size), "keys of the pair");
    CHECK(!memcmp(stores[1].codes, stores[3].codes, stores[3].codes_size), "values of the pair");
    const size_t norms = stores[3].norms_size;
    CHECK(!norms || !memcmp(stores[1].norms, stores[3].norms, norms), "the values' norms");
    memset(stores[0].codes, 0xff, stores[0].codes_size);
    k[2 * 3 * d] = NAN; // of a token that is left out
    CHECK_RUN(gpu_encode_slots(&stores[0], nullptr, k, nullptr, n, slots.data(), &flag));
    CHECK(flag == 1, "NaN in a token that is left out");
    CHECK(!memcmp(stores[0].codes, stores[2].codes, stores[2].codes_size), "keys alone");
    gpu_known_tables = true;
    for (tqkv_store &s : stores) test_store_free(&s);
    free(k);
    free(values);
}

void run_slots(const void *parameters)
{
    const codec_row *row = (const codec_row *)parameters;
    check_slots(*row, 40, true);
    check_slots(*row, 33, false);
}

void add_slots()
{
    for (int i = 0; i < TEST_FORMATS; i += 3) {
        codec_row row = {test_formats[i], test_formats[(i + 1) % TEST_FORMATS], gpu_head_dims[i], 0, 0, 0, 0};
        row.value_dim = row.head_dim == 192 ? 128 : 0;
        test_add(run_slots, &row, sizeof row, "pages/slots/%s/d%d", tqkv_format_name(row.format), row.head_dim);
    }
}

void add_codec()
{
    for (int i = 0; i < TEST_FORMATS; i++) {
        const int head_dim = gpu_head_dims[i % 10];
        const codec_row row = {
            test_formats[i],           test_formats[(i + 3) % TEST_FORMATS], head_dim,
            head_dim == 192 ? 128 : 0, i % 3 == 2 ? 7 : i % 2 ? 64 : 192,    head_dim > 256 ? 3 : 70 + i,
            i % 2 ? 127 : 180};
        test_add(run_codec, &row, sizeof row, "pages/encode/%s/d%d", tqkv_format_name(row.format), head_dim);
    }
    test_add(run_bad_entries, nullptr, 0, "pages/bad_entries");
}

// ---- Attention ----

// Copies the positions that some query sees. Entries of the other pages become bad ones.
void copy_seen(const tqkv_attention &a, const tqkv_store &from, pool *to, data_random *random)
{
    const int32_t bad[] = {-1, INT32_MIN, INT32_MAX, to->store.capacity / to->store.page_size};
    std::vector<bool> used(to->table.size());
    for (int64_t p = 0; p < a.end; p++) {
        if (!attend_is_seen(&a, p)) continue;
        copy_position(from, p, to->store, p);
        used[(size_t)(p / to->store.page_size)] = true;
    }
    for (size_t i = 0; i < used.size(); i++)
        if (!used[i]) to->table[i] = bad[data_below(random, 4)];
}

// Makes page `to` of a linear store the same as page `from`, and one page of the table both.
void share_page(const tqkv_store &linear, pool *paged, int from, int to)
{
    for (int i = 0; i < paged->store.page_size; i++)
        copy_position(linear, from * paged->store.page_size + i, linear, to * paged->store.page_size + i);
    paged->table[(size_t)to] = paged->table[(size_t)from];
}

// From LATENT_SEED on one stream is keys and values, and has a tail; from SMALL_SEED on only every second, and matrices
// read small pages.
enum { LINEAR = 512, LATENT_SEED = 20, SMALL_SEED = 28, END_SEED = 34, LATENT_BATCH = 24, PARTS_BATCH = 30 };

attend_row random_row(int seed, data_random *random)
{
    const int head_dims[] = {64, 128, 64, 80, 256, 32, 48, 192, 512, 128, 448, 512},
              by_matrices[] = {64, 512, 256, 448, 128, 512};
    const bool small = seed >= SMALL_SEED, latent = small ? seed % 2 != 0 : seed >= LATENT_SEED;
    const int d = small ? by_matrices[seed - SMALL_SEED] : latent ? head_dims[10 + seed % 2] : head_dims[seed % 10];
    const int positions = small ? 500 : d > 128 ? 100 : 200;
    attend_row row = attend_default_row(test_formats[data_below(random, TEST_FORMATS)],
                                        test_formats[data_below(random, TEST_FORMATS)], d);
    row.key_capacity = row.value_capacity = LINEAR; // whole tiles, so the last one is where it is in a pool
    row.end = 1 + data_below(random, positions);
    row.n_queries = seed % 3 ? 1 : 1 + data_below(random, 9);
    row.group = seed % 2 ? 4 : 1 + data_below(random, 5);
    row.tree = row.n_queries > 1 && seed % 2;
    row.kv_len = seed % 5 == 4 ? 1 + data_below(random, (int)row.end) : 0;
    row.window = seed % 7 == 3 ? 1 + data_below(random, 200) : 0;
    row.non_causal = !row.tree && seed % 6 == 3;
    row.softcap = seed % 6 == 5 ? 3.0f : 0.0f;
    row.sinks = (attend_sinks)(seed % 4);
    row.key_center = row.value_center = seed % 8 ? 0.0f : 0.5f;
    row.bits_alone = true; // the stores still change
    row.shared = latent;
    row.tail_dim = latent ? 64 : 0;
    row.tail_format = seed % 4 ? TQKV_F16 : TQKV_I8;
    return row;
}

// The tail in the pages of the keys; NULL without one. `twin` makes a table of the same pages.
std::unique_ptr<pool> make_tail(const attend_problem &problem, const pool &keys, data_random *twin, data_random *random,
                                tqkv_attention *paged)
{
    if (!problem.attention.tail) return nullptr;
    std::unique_ptr<pool> tail(new pool(problem.tail, keys.store.page_size, LINEAR, twin));
    tail->table = keys.table;
    copy_seen(*paged, problem.tail, tail.get(), random);
    tail->store.pages = keys.store.pages;
    tail->store.n_pages = keys.store.n_pages;
    paged->tail = &tail->store;
    return tail;
}

void run_attend(const void *parameters)
{
    const int seed = *(const int *)parameters;
    data_random random = {(uint64_t)seed + 700};
    const attend_row row = random_row(seed, &random);
    const bool by_matrices = seed >= SMALL_SEED || seed / 2 % 2 == 0, has_small = seed >= SMALL_SEED || seed % 4 == 2;
    const int kernel = by_matrices ? GPU_MATRICES : GPU_LANES, share = GPU_EACH + seed % 3;
    const gpu_split split = {0, 0, 5, share, kernel};
    const gpu_split whole = {0, 0, 0, 0, kernel};
    attend_problem problem;
    attend_set_up_floats(&problem, &row);
    const bool one_table = seed % 3 == 1 || row.shared;
    const int small[] = {16, 1, 48, 7, 32}; // these end within tiles
    const int page_size = has_small ? small[(seed < SMALL_SEED ? seed / 4 : seed) % 5] : 64 << data_below(&random, 2);
    data_random twin = random, tail_twin = random;
    pool keys(problem.keys, page_size, LINEAR, &random),
        values(problem.values, seed % 3 == 2 ? 192 : page_size, one_table ? LINEAR : (int)row.end,
               one_table ? &twin : &random);
    if (one_table) values.store.pages = keys.table.data();
    if (seed % 4 == 1 && !one_table && !row.window && !row.kv_len && row.end >= 3 * keys.store.page_size)
        share_page(problem.keys, &keys, 2, 0);
    tqkv_attention paged = problem.attention;
    paged.keys = &keys.store;
    paged.values = &values.store;
    copy_seen(paged, problem.keys, &keys, &random);
    if (!row.shared) copy_seen(paged, problem.values, &values, &random);
    if (row.shared) paged.values = paged.keys;
    const std::unique_ptr<pool> tail = make_tail(problem, keys, &tail_twin, &random, &paged);
    const size_t n = problem.n_rows * problem.value_dim;
    std::vector<float> expected(n), got(n, NAN), again(n, NAN);
    CHECK_RUN(gpu_attend(&problem.attention, problem.q, expected.data(), whole));
    CHECK_RUN(gpu_attend(&paged, problem.q, got.data(), whole));
    CHECK(!memcmp(expected.data(), got.data(), n * sizeof(float)), "not the bits of a linear store");
    reference_attend_as(REFERENCE_FLOATS, &problem.attention, problem.q, problem.expected);
    attend_check(&problem, got.data(), "pages");
    gpu_known_tables = false;
    CHECK_RUN(gpu_attend(&problem.attention, problem.q, expected.data(), split));
    CHECK_RUN(gpu_attend(&paged, problem.q, again.data(), split));
    CHECK(!memcmp(expected.data(), again.data(), n * sizeof(float)), "not the bits of a linear store, divided");
    gpu_known_tables = true;
    attend_tear_down(&problem);
}

// ---- Batches ----

// An item of a batch, with stores of its own.
struct item {
    attend_problem problem;
    std::unique_ptr<pool> keys, values;
    tqkv_attention attention;
    std::vector<float> expected, got;
    item(const attend_row &row, int page_size, data_random *random); // 0: no pages
    ~item() { attend_tear_down(&problem); }
    item(const item &) = delete;
};

item::item(const attend_row &row, int page_size, data_random *random)
{
    attend_set_up_floats(&problem, &row);
    attention = problem.attention;
    expected.assign(problem.n_rows * problem.value_dim, NAN);
    got = expected;
    if (!page_size) return;
    keys.reset(new pool(problem.keys, page_size, row.key_capacity, random));
    values.reset(new pool(problem.values, 128, row.key_capacity, random));
    attention.keys = &keys->store;
    attention.values = &values->store;
    copy_seen(attention, problem.keys, keys.get(), random);
    copy_seen(attention, problem.values, values.get(), random);
}

// What the items of a batch may differ in.
attend_row row_of_item(const attend_row &common, int seed, bool paged, data_random *random)
{
    attend_row row = common;
    row.end = 1 + data_below(random, seed % 3 ? 60 : 300);
    row.key_capacity = row.value_capacity = paged ? 384 : (int)row.end + data_below(random, 40);
    row.n_queries = data_below(random, 3) ? 1 : 1 + data_below(random, 9);
    row.tree = row.n_queries > 1 && data_below(random, 2);
    row.non_causal = row.n_queries > 1 && !row.tree;
    row.window = data_below(random, 4) ? 0 : 1 + data_below(random, 50);
    row.scale = data_below(random, 3) ? 0.0f : 0.05f;
    row.key_ring = !paged && data_below(random, 4) == 0;
    row.value_ring = row.key_ring;
    if (row.key_ring) row.end += 500;
    return row;
}

// What the items of seeds from PARTS_BATCH on have: halves of the first and last positions, lists, or both.
void give_parts(attend_row *row, int seed, data_random *random)
{
    const int blocks[] = {1, 4, 16};
    if (seed % 3 != 1) row->exact_first = data_below(random, 12);
    if (seed % 3 != 1) row->exact_last = 1 + data_below(random, 40);
    if (seed % 3 == 0) return;
    row->list_block = blocks[data_below(random, 3)];
    row->list_newest = data_below(random, 20);
    row->list_share = 0.5f;
    row->list_by_head = data_below(random, 2) != 0;
}

// Each item has the bits that it has alone.
void run_batch(const void *parameters)
{
    const int seed = *(const int *)parameters, head_dims[] = {64, 128, 80, 64, 192, 32, 512, 448};
    const bool parts = seed >= PARTS_BATCH, latent = seed >= LATENT_BATCH && (!parts || seed % 6 == 1);
    data_random random = {(uint64_t)seed + 900};
    const bool paged = seed % 2 != 0 && !latent, lanes = seed % 4 > 1;
    attend_row common = attend_default_row(test_formats[data_below(&random, TEST_FORMATS)],
                                           test_formats[data_below(&random, TEST_FORMATS)],
                                           latent ? head_dims[6 + seed % 2] : head_dims[seed % 6]);
    common.shared = latent;
    common.tail_dim = latent ? 64 : 0;
    common.tail_format = seed % 3 ? TQKV_F16 : TQKV_I8;
    common.tail_center = seed % 4 ? 0.0f : 0.5f;
    common.value_dim = common.head_dim == 192 ? 128 : 0;
    common.group = seed % 3 ? 4 : 1 + data_below(&random, 5);
    common.softcap = seed % 5 == 1 ? 3.0f : 0.0f;
    common.sinks = (attend_sinks)(seed % 3);
    common.key_center = common.value_center = seed % 4 ? 0.0f : 0.5f;
    common.bits_alone = true;
    if (parts && common.key_format == TQKV_F16) common.key_format = TQKV_TQ4;
    std::vector<std::unique_ptr<item>> items;
    std::vector<tqkv_attention> calls;
    std::vector<const void *> q;
    std::vector<void *> out;
    for (int i = 0; i < 1 + seed % 5; i++) {
        const int page_size = seed % 3 == 1 && i % 2 == 0 ? 16 : 64;
        attend_row row = row_of_item(common, seed + i, paged, &random);
        if (parts) give_parts(&row, seed, &random);
        items.emplace_back(new item(row, paged ? page_size : 0, &random));
        item &own = *items.back();
        if (i == 3) own.attention.end = own.attention.kv_len = 0; // sees nothing
        if (i == 3 && paged) own.keys->store.n_pages = 0;
        const gpu_split split = {0, 0, 0, 0, lanes ? GPU_LANES : 0};
        CHECK_RUN(gpu_attend(&own.attention, own.problem.q, own.expected.data(), split));
        calls.push_back(own.attention);
        q.push_back(own.problem.q);
        out.push_back(own.got.data());
    }
    CHECK_RUN(gpu_attend_batch(calls, q, out, lanes));
    for (size_t i = 0; i < items.size(); i++)
        CHECK(!memcmp(items[i]->expected.data(), items[i]->got.data(), items[i]->got.size() * sizeof(float)),
              "item %zu of %zu has other bits alone", i, items.size());
}

// An empty table: nothing is seen.
void run_empty(const void *)
{
    data_random random = {1};
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    attend_problem problem;
    attend_set_up_floats(&problem, &row);
    pool keys(problem.keys, 64, 1, &random), values(problem.values, 64, 1, &random);
    keys.store.n_pages = 0;
    problem.attention.keys = &keys.store;
    problem.attention.values = &values.store;
    problem.attention.end = 0;
    CHECK_RUN(gpu_attend(&problem.attention, problem.q, problem.out, as_planned));
    for (size_t i = 0; i < problem.n_rows * problem.value_dim; i++)
        CHECK(problem.out[i] == 0.0f, "value %zu is %g", i, (double)problem.out[i]);
    attend_tear_down(&problem);
}

} // namespace

void page_shader_cases()
{
    add_codec();
    add_slots();
    for (int seed = 0; seed < END_SEED; seed++) test_add(run_attend, &seed, sizeof seed, "pages/attend/%d", seed);
    test_add(run_empty, nullptr, 0, "pages/empty");
    for (int seed = 0; seed < PARTS_BATCH + 12; seed++) test_add(run_batch, &seed, sizeof seed, "batch/%d", seed);
}
