/* Paged stores: the rows and the attention of a linear store, whatever the table. */
#include "attend_fixture.h"

enum { PAGES_HEADS = 2, POOL_PAGES = 9, POOL_SLOTS = POOL_PAGES * 64 };

/* Slots of a pool of so large pages: POOL_PAGES of them, or more if they are small. */
static int pool_slots(int page_size) { return page_size > 64 ? POOL_PAGES * page_size : POOL_SLOTS; }

static tqkv_store make_pool(tqkv_format format, int head_dim, int page_size)
{
    tqkv_store s = test_store(format, head_dim, PAGES_HEADS, pool_slots(page_size), false);
    s.page_size = page_size;
    return s;
}

/* Every page once, shuffled; pages: [n] */
static void shuffle_pages(data_random *random, int n, int32_t *pages)
{
    for (int i = 0; i < n; i++) {
        const int j = data_below(random, i + 1);
        if (j < i) pages[i] = pages[j];
        pages[j] = i;
    }
}

static bool is_same_row(const tqkv_store *a, int64_t at, const tqkv_store *b, int64_t position, int head)
{
    const size_t norms = (size_t)reference_norms_per_row(a->format, a->head_dim) * sizeof(float);
    return !memcmp(reference_codes_at(a, head, at), reference_codes_at(b, head, position),
                   reference_row_bytes(a->format, a->head_dim)) &&
           (!norms || !memcmp(reference_norms_at(a, head, at), reference_norms_at(b, head, position), norms));
}

static bool is_untouched(const tqkv_store *pool, int slot)
{
    tqkv_store s = *pool;
    const size_t n = reference_row_bytes(s.format, s.head_dim);
    s.pages = NULL;
    for (int head = 0; head < PAGES_HEADS; head++)
        for (size_t i = 0; i < n; i++)
            if (reference_codes_at(&s, head, slot)[i] != 0xff) return false;
    return true;
}

/* ---- Encoding and decoding ---- */

static void check_decoded(const tqkv_store *pool, const tqkv_store *linear, int64_t position, int n)
{
    const size_t bytes = (size_t)(n * PAGES_HEADS * pool->head_dim) * sizeof(float);
    float *a = (float *)test_alloc(bytes), *b = (float *)test_alloc(bytes);
    CHECK_RESULT(tqkv_decode(pool, position, n, TQKV_ORIGINAL, a), TQKV_OK);
    CHECK_RESULT(tqkv_decode(linear, position, n, TQKV_ORIGINAL, b), TQKV_OK);
    CHECK(!memcmp(a, b, bytes), "%d positions from %d on decode otherwise", n, (int)position);
    free(a);
    free(b);
}

/* 150 positions in pieces: the rows of a linear store, in the slots that the table says,
 * and nothing else is written. */
static void check_encode(const void *parameters)
{
    const tqkv_format format = *(const tqkv_format *)parameters;
    const int page_sizes[] = {64, 1, 48}, page_size = page_sizes[format % 3];
    const int pieces[] = {1, 70, 0, 64, 15}, d = 64;
    data_random random = {(uint64_t)format};
    int32_t pages[POOL_SLOTS];
    tqkv_store pool = make_pool(format, d, page_size), linear = test_store(format, d, PAGES_HEADS, 150, false);
    float *rows = test_rows(3, DATA_GAUSSIAN, 150 * PAGES_HEADS, d), *center = test_rows(4, DATA_GAUSSIAN, 2, d);
    float *scales = test_scales(5, PAGES_HEADS, d, 8.0);
    shuffle_pages(&random, pool.capacity / page_size, pages);
    pool.pages = pages;
    pool.n_pages = 256 / page_size;
    pages[pool.n_pages - 1] = -1; /* of positions that nothing sees or writes */
    pool.center = linear.center = center;
    pool.channel_scale = linear.channel_scale = scales;
    CHECK_RESULT(tqkv_encode(&linear, rows, 150, 0), TQKV_OK);
    for (int i = 0, at = 0; i < 5; at += pieces[i++])
        CHECK_RESULT(tqkv_encode(&pool, rows + at * PAGES_HEADS * d, pieces[i], at), TQKV_OK);
    for (int p = 0; p < 150; p++)
        for (int h = 0; h < PAGES_HEADS; h++)
            CHECK(is_same_row(&pool, p, &linear, p, h), "head %d of position %d", h, p);
    for (int slot = 0; slot < pool.capacity; slot++) {
        bool mapped = false;
        for (int p = 0; p < 150; p++) mapped = mapped || reference_slot(&pool, p) == slot;
        CHECK(mapped || is_untouched(&pool, slot), "slot %d was written", slot);
    }
    check_decoded(&pool, &linear, 60, 70);
    check_decoded(&pool, &linear, 149, 1);
    test_store_free(&pool);
    test_store_free(&linear);
    free(rows);
    free(center);
    free(scales);
}

/* Tokens by slots: each row is where its slot says; left-out tokens are nowhere. */
static void check_slots(const void *parameters)
{
    const tqkv_format format = *(const tqkv_format *)parameters;
    enum { n = 90, d = 32 };
    int32_t slots[n];
    data_random random = {(uint64_t)format};
    tqkv_store pool = make_pool(format, d, 64), linear = test_store(format, d, PAGES_HEADS, n, false);
    float *rows = test_rows(5, DATA_STUDENT, n * PAGES_HEADS, d);
    bool used[POOL_PAGES * 64] = {false};
    for (int t = 0; t < n; t++) {
        do slots[t] = data_below(&random, POOL_PAGES * 64);
        while (used[slots[t]]);
        used[slots[t]] = true;
        if (t % 7 == 2) {
            used[slots[t]] = false;
            slots[t] = -1;
        }
    }
    CHECK_RESULT(tqkv_encode(&linear, rows, n, 0), TQKV_OK);
    CHECK_RESULT(test_encode_slots(&pool, rows, n, slots), TQKV_OK);
    CHECK_RESULT(test_encode_slots(&pool, rows, 0, slots), TQKV_OK);
    pool.pages = NULL;
    for (int t = 0; t < n; t++)
        for (int h = 0; slots[t] >= 0 && h < PAGES_HEADS; h++)
            CHECK(is_same_row(&pool, slots[t], &linear, t, h), "head %d of token %d", h, t);
    for (int slot = 0; slot < pool.capacity; slot++)
        CHECK(used[slot] || is_untouched(&pool, slot), "slot %d was written", slot);
    test_store_free(&pool);
    test_store_free(&linear);
    free(rows);
}

/* Numbers that occur twice are found wherever they stand, beyond the 32768 that are marked at a time too. */
static void check_twice(const void *parameters)
{
    (void)parameters;
    enum { n = 3, d = 32, capacity = 100000 };
    tqkv_store pool = test_store(TQKV_TQ2, d, 1, capacity, false);
    float *rows = test_rows(6, DATA_GAUSSIAN, n, d);
    const int32_t starts[] = {0, 32767, 32768, 5 + 32767, 5 + 32768, 65535, capacity - 1};
    for (int i = 0; i < (int)(sizeof starts / sizeof *starts); i++) {
        const int32_t twice[n] = {starts[i], 5, starts[i]}, apart[n] = {starts[i], 5, starts[i] / 2 + 1};
        CHECK_RESULT(test_encode_slots(&pool, rows, n, twice), TQKV_INVALID_ARGUMENT);
        CHECK_RESULT(test_encode_slots(&pool, rows, n, apart), TQKV_OK);
    }
    test_store_free(&pool);
    free(rows);
}

/* ---- Attention ---- */

/* A paged copy of what is resident in a linear store, in another order; entries of unseen pages are -1. */
static tqkv_store copy_to_pages(const tqkv_store *linear, const tqkv_attention *a, int page_size, int32_t *pages)
{
    tqkv_store pool = make_pool(linear->format, linear->head_dim, page_size);
    const size_t row = reference_row_bytes(pool.format, pool.head_dim);
    const size_t norms = (size_t)reference_norms_per_row(pool.format, pool.head_dim) * sizeof(float);
    pool.pages = pages;
    pool.n_pages = pool.capacity / page_size;
    pool.center = linear->center;
    pool.channel_scale = linear->channel_scale;
    for (int p = 0; p < a->end; p++)
        for (int h = 0; h < PAGES_HEADS; h++) {
            memcpy((void *)(uintptr_t)reference_codes_at(&pool, h, p), reference_codes_at(linear, h, p), row);
            if (norms)
                memcpy((void *)(uintptr_t)reference_norms_at(&pool, h, p), reference_norms_at(linear, h, p), norms);
        }
    for (int i = 0; i < pool.n_pages; i++) {
        bool seen = false;
        for (int p = i * page_size; p < (i + 1) * page_size; p++) seen = seen || attend_is_seen(a, p);
        if (!seen) pages[i] = -1;
    }
    return pool;
}

static void run_backwards(void *user, int count, tqkv_task task, void *context)
{
    (void)user;
    for (int i = count; i-- > 0;) task(context, i);
}

/* A row of options for case `index`. */
static attend_row paged_row(int index, int page_size, data_random *random)
{
    attend_row row = attend_default_row(test_formats[index % TEST_FORMATS], test_formats[(index + 2) % TEST_FORMATS],
                                        index % 2 ? 64 : 32);
    row.key_capacity = row.value_capacity = pool_slots(page_size);
    row.end = 1 + data_below(random, pool_slots(page_size));
    row.n_queries = 1 + data_below(random, index % 4 ? 5 : 64);
    row.window = index % 5 == 1 ? 1 + data_below(random, 200) : 0;
    row.kv_len = index % 5 == 2 ? 1 + data_below(random, (int)row.end) : 0;
    row.softcap = index % 3 ? 0.0f : 3.0f;
    row.key_center = index % 4 == 1 ? 2.0f : 0.0f;
    row.key_spread = row.value_spread = index % 3 == 1 ? 8.0f : 0.0f;
    row.tree = index % 4 == 0;
    row.bits_alone = true;
    row.exact_first = index % 8 == 5 ? 70 : 0; /* linear stores beside the paged ones */
    row.exact_last = index % 8 > 4 ? 30 : 0;
    row.non_causal = index % 7 == 3 && !row.tree;
    return row;
}

/* The same bits as over linear stores, whole and as a slice; sometimes only the keys or the values have pages. */
static void check_attend(const void *parameters)
{
    const int index = *(const int *)parameters, small[] = {1, 16, 48, 9, 32, 96, 144};
    const int page_size = index < 60 ? 64 << index % 3 : small[index % 7];
    data_random random = {(uint64_t)index};
    const attend_row row = paged_row(index, page_size, &random);
    attend_problem problem;
    attend_set_up(&problem, &row);
    tqkv_attention *a = &problem.attention, paged = *a;
    int32_t key_pages[POOL_SLOTS], value_pages[POOL_SLOTS];
    shuffle_pages(&random, pool_slots(page_size) / page_size, key_pages);
    shuffle_pages(&random, pool_slots(page_size) / page_size, value_pages);
    tqkv_store keys = copy_to_pages(&problem.keys, a, page_size, key_pages);
    tqkv_store values = copy_to_pages(&problem.values, a, page_size, value_pages);
    if (index % 6 != 5) paged.keys = &keys;
    if (index % 6 != 4) paged.values = &values;
    const size_t rows = problem.n_rows, bytes = rows * problem.head_dim * sizeof(float);
    float *out = (float *)test_alloc(bytes), *max = (float *)test_alloc(4 * rows * sizeof *max);
    CHECK_RESULT(tqkv_attend(a, problem.q, problem.out), TQKV_OK);
    CHECK_RESULT(tqkv_attend(&paged, problem.q, out), TQKV_OK);
    CHECK(!memcmp(out, problem.out, bytes), "pages change the result");
    paged.parallel.run = run_backwards;
    CHECK_RESULT(tqkv_attend(&paged, problem.q, out), TQKV_OK);
    CHECK(!memcmp(out, problem.out, bytes), "pages change the result in parallel");
    const int64_t oldest = reference_attention_shape(a).oldest, first = oldest + data_below(&random, 2);
    const int count = data_below(&random, (int)(a->end - first) + 1);
    CHECK_RESULT(tqkv_attend_partial(a, problem.q, first, count, problem.out, max, max + rows), TQKV_OK);
    CHECK_RESULT(tqkv_attend_partial(&paged, problem.q, first, count, out, max + 2 * rows, max + 3 * rows), TQKV_OK);
    CHECK(!memcmp(out, problem.out, bytes) && !memcmp(max, max + 2 * rows, 2 * rows * sizeof *max), "a slice");
    test_store_free(&keys);
    test_store_free(&values);
    free(out);
    free(max);
    attend_tear_down(&problem);
}

/* A tree hides the newest page from all queries: its entry is not looked at. */
static void check_hidden(const void *parameters)
{
    (void)parameters;
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    uint64_t tree[64] = {0};
    int32_t pages[POOL_PAGES] = {3, 0, 1, 2, 4, 5, 6, 7, 8};
    row.key_capacity = row.value_capacity = POOL_PAGES * 64;
    row.end = 128;
    row.n_queries = 64;
    attend_problem problem;
    attend_set_up(&problem, &row);
    tqkv_attention a = problem.attention;
    const size_t one = problem.n_rows / 64 * problem.head_dim;
    tqkv_store keys = copy_to_pages(&problem.keys, &a, 64, pages);
    tqkv_store values = copy_to_pages(&problem.values, &a, 64, pages);
    a.keys = &keys;
    a.values = &values;
    a.tree = tree;
    pages[1] = INT32_MIN;
    CHECK_RESULT(tqkv_attend(&a, problem.q, problem.out), TQKV_OK);
    tree[63] = (uint64_t)1 << 40;
    CHECK_RESULT(tqkv_attend(&a, problem.q, problem.out), TQKV_OUT_OF_RANGE);
    float *alone = (float *)test_alloc(one * sizeof *alone); /* the last query, at the end of the first page */
    a.tree = NULL;
    a.end = 64;
    a.n_queries = 1;
    CHECK_RESULT(tqkv_attend(&a, problem.q + 63 * one, alone), TQKV_OK);
    CHECK(!memcmp(alone, problem.out + 63 * one, one * sizeof *alone), "the hidden page counts");
    test_store_free(&keys);
    test_store_free(&values);
    free(alone);
    attend_tear_down(&problem);
}

enum { PROMPT = 128, TAIL = 40 };

/* Encodes a prompt, or none, and what a sequence has behind it, as keys (0) or values (1). */
static void fill_sequence(const tqkv_store *store, int side, int sequence, bool prompt)
{
    const uint64_t seed = (uint64_t)(2 * sequence + side);
    float *rows = test_rows(10 + (uint64_t)side, DATA_GAUSSIAN, PROMPT * PAGES_HEADS, store->head_dim);
    float *own = test_rows(12 + seed, DATA_GAUSSIAN, TAIL * PAGES_HEADS, store->head_dim);
    if (prompt) CHECK_RESULT(tqkv_encode(store, rows, PROMPT, 0), TQKV_OK);
    CHECK_RESULT(tqkv_encode(store, own, TAIL, PROMPT), TQKV_OK);
    free(rows);
    free(own);
}

/* Two sequences share the pages of a prompt; each attends as over stores of its own. */
static void check_shared(const void *parameters)
{
    (void)parameters;
    enum { d = 64 };
    const int32_t tables[2][3] = {{4, 1, 7}, {4, 1, 2}};
    tqkv_store pool[2] = {make_pool(TQKV_I8, d, 64), make_pool(TQKV_TQ4, d, 64)};
    tqkv_store linear[2] = {test_store(TQKV_I8, d, PAGES_HEADS, 200, false),
                            test_store(TQKV_TQ4, d, PAGES_HEADS, 200, false)};
    float *q = test_rows(9, DATA_GAUSSIAN, PAGES_HEADS, d), out[PAGES_HEADS * d], expected[PAGES_HEADS * d];
    for (int sequence = 0; sequence < 2; sequence++)
        for (int i = 0; i < 2; i++) {
            pool[i].pages = tables[sequence];
            pool[i].n_pages = 3;
            fill_sequence(&pool[i], i, sequence, sequence == 0);
        }
    for (int sequence = 0; sequence < 2; sequence++) {
        tqkv_attention a;
        memset(&a, 0, sizeof a);
        a.n_heads = PAGES_HEADS;
        a.n_queries = 1;
        a.end = PROMPT + TAIL;
        for (int i = 0; i < 2; i++) {
            fill_sequence(&linear[i], i, sequence, true);
            pool[i].pages = tables[sequence];
        }
        a.keys = &pool[0];
        a.values = &pool[1];
        CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
        a.keys = &linear[0];
        a.values = &linear[1];
        CHECK_RESULT(tqkv_attend(&a, q, expected), TQKV_OK);
        CHECK(!memcmp(out, expected, sizeof out), "sequence %d", sequence);
    }
    for (int i = 0; i < 2; i++) {
        test_store_free(&pool[i]);
        test_store_free(&linear[i]);
    }
    free(q);
}

void test_pages_cases(void)
{
    for (int i = 0; i < TEST_FORMATS; i++) {
        const tqkv_format format = test_formats[i];
        test_add(check_encode, &format, sizeof format, "pages/encode/%s", tqkv_format_name(format));
        test_add(check_slots, &format, sizeof format, "pages/slots/%s", tqkv_format_name(format));
    }
    for (int i = 0; i < 120; i++) test_add(check_attend, &i, sizeof i, "pages/attend/%d", i);
    test_add(check_twice, NULL, 0, "pages/twice");
    test_add(check_hidden, NULL, 0, "pages/hidden");
    test_add(check_shared, NULL, 0, "pages/shared");
}
