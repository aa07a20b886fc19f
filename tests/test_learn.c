/* Caches that learn centre and scale of their keys: drafts around the position from which they do, copies, trees,
 * memory. fuzz/fuzz_cache.c has what they learn, what each query gives, chunks and edits. */
#include "cache_fixture.h"

enum { MOST = 130, D = 64, LEARNS_AT = 40, HEADS = CACHE_HEADS * CACHE_GROUP, DRAFTS = 6, WIDE = HEADS * D };

typedef struct learn_row {
    int exact_first, exact_last;
    bool repeats, non_causal; /* repeats: values of every other position are those of the one before */
} learn_row;

/* Rows of keys with channels of different sizes and a constant part, of values, of queries. */
typedef struct learn_data {
    tqkv_cache_desc desc;
    float *k, *v, *q;
} learn_data;

static learn_data open_data(const learn_row *row)
{
    const cache_row shape = {TQKV_TQ4, TQKV_TQ3, D, 240, false, 0, -1};
    learn_data data = {cache_desc(&shape, NULL), cache_data(1, MOST, D), cache_data(2, MOST, D),
                       test_rows(3, DATA_GAUSSIAN, MOST * HEADS, D)};
    float *sizes = test_scales(4, CACHE_HEADS, D, 8.0);
    const int n = CACHE_HEADS * D;
    for (int i = 0; i < MOST * n; i++) data.k[i] = (data.k[i] + (float)(i % 5)) * sizes[i % n];
    for (int t = 1; row->repeats && t < MOST; t += 2)
        memcpy(data.v + t * n, data.v + (t - 1) * n, (size_t)n * sizeof(float));
    for (int i = 0; i < MOST * n; i++) { /* as halves hold them, which a tree keeps */
        data.k[i] = (float)reference_half_value(reference_half(data.k[i]));
        data.v[i] = (float)reference_half_value(reference_half(data.v[i]));
    }
    free(sizes);
    data.desc.calibrate = LEARNS_AT;
    data.desc.exact_first = row->exact_first;
    data.desc.exact_last = row->exact_last;
    data.desc.non_causal = row->non_causal;
    return data;
}

static void close_data(learn_data *data)
{
    free(data->k);
    free(data->v);
    free(data->q);
}

static tqkv_cache *open_cache(const tqkv_cache_desc *desc) { return cache_given(desc, NULL, NULL, NULL, NULL); }

static void append(const learn_data *data, tqkv_cache *cache, int t, int n)
{
    const int at = t * CACHE_HEADS * D;
    CHECK_RESULT(tqkv_cache_append(cache, data->k + at, data->v + at, n), TQKV_OK);
}

/* Tokens [first, end) one after the other. */
static void append_each(const learn_data *data, tqkv_cache *cache, int first, int end)
{
    for (int t = first; t < end; t++) append(data, cache, t, 1);
}

/* A cache that was given what another has learned, and the same tokens. */
static tqkv_cache *given_cache(const learn_data *data, const tqkv_cache *learned, int end)
{
    tqkv_cache_desc desc = data->desc;
    desc.calibrate = 0;
    tqkv_cache *cache = cache_given(&desc, test_keys(learned)->center, test_keys(learned)->channel_scale, NULL, NULL);
    append_each(data, cache, 0, end);
    return cache;
}

static void check_same(const tqkv_cache *a, const tqkv_cache *b, const char *what)
{
    stream of_a = stream_of_cache(a), of_b = stream_of_cache(b);
    CHECK(stream_is_equal(&of_a, &of_b), "%s: other snapshots", what);
    stream_free(&of_a);
    stream_free(&of_b);
}

/* ---- Drafts ---- */

/* Appends drafts whose rows are those of other positions, but for the right ones: t + i in the place kept[i]. */
static void append_drafts(const learn_data *data, tqkv_cache *cache, int t, const int *kept, int n_kept)
{
    enum { ROW = CACHE_HEADS * D };
    float drafts[2][DRAFTS * ROW];
    for (int side = 0; side < 2; side++) {
        const float *rows = side ? data->v : data->k;
        memcpy(drafts[side], rows + (MOST - DRAFTS) * ROW, sizeof drafts[side]);
        for (int i = 0; i < n_kept; i++)
            memcpy(drafts[side] + kept[i] * ROW, rows + (t + i) * ROW, ROW * sizeof(float));
    }
    CHECK_RESULT(tqkv_cache_append(cache, drafts[0], drafts[1], DRAFTS), TQKV_OK);
}

/* Drafts that the cache would learn from, attended to and taken back, leave no trace: by truncation, or of a tree whose
 * path stays. */
static void check_drafts(const void *parameters)
{
    static const int paths[4][3] = {{0, 1, 2}, {0, 2, 5}, {1, 3, 4}, {5, 0, 0}};
    learn_data data = open_data((const learn_row *)parameters);
    static float out[2][DRAFTS * WIDE];
    for (int t = LEARNS_AT - DRAFTS - 1; t <= LEARNS_AT + 1; t++)
        for (int way = 0; way < 8; way++) {
            const int *path = paths[way % 4], n_kept = way < 4 ? way : way < 7 ? 3 : 1;
            tqkv_cache *cache = open_cache(&data.desc), *without = open_cache(&data.desc);
            append_each(&data, cache, 0, t);
            append_each(&data, without, 0, t + n_kept);
            append_drafts(&data, cache, t, way < 4 ? paths[0] : path, n_kept);
            CHECK_RESULT(tqkv_cache_attend(cache, data.q, DRAFTS, out[0]), TQKV_OK);
            CHECK_RESULT(way < 4 ? tqkv_cache_truncate(cache, t + n_kept)
                                 : tqkv_cache_keep(cache, DRAFTS, path, n_kept),
                         TQKV_OK);
            for (int p = t + n_kept; p < LEARNS_AT + 20; p++) {
                append(&data, cache, p, 1);
                append(&data, without, p, 1);
                for (int i = 0; i < 2; i++)
                    CHECK_RESULT(tqkv_cache_attend(i ? without : cache, data.q, 1, out[i]), TQKV_OK);
                CHECK(!memcmp(out[0], out[1], WIDE * sizeof(float)), "way %d at %d: other bits at %d", way, t, p);
            }
            check_same(cache, without, "behind drafts");
            tqkv_cache_destroy(cache);
            tqkv_cache_destroy(without);
        }
    close_data(&data);
}

/* ---- Copies ---- */

/* A copy made between the append that learns and its queries has no halves for them, and says so; from the next append
 * on it is as good as the cache. What was learned stays until the cache is empty. */
static void check_copies(const void *parameters)
{
    enum { BEFORE = LEARNS_AT - 5, N = 9 };
    learn_data data = open_data((const learn_row *)parameters);
    static float out[2][N * WIDE];
    for (int loads = 0; loads < 2; loads++) {
        tqkv_cache *cache = open_cache(&data.desc), *copy = NULL;
        append(&data, cache, 0, BEFORE);
        append(&data, cache, BEFORE, N);
        stream s = stream_of_cache(cache);
        CHECK_RESULT(loads ? tqkv_cache_load(&data.desc, stream_read, &s, &copy) : tqkv_cache_fork(cache, NULL, &copy),
                     TQKV_OK);
        stream_free(&s);
        REQUIRE(copy, "no copy");
        test_explained = NULL;
        CHECK_RESULT(tqkv_cache_attend(copy, data.q, N, out[0]), TQKV_OUT_OF_RANGE);
        CHECK(test_explained && strstr(test_explained, "copy"), "no text");
        for (int i = 0; i < 2; i++) CHECK_RESULT(tqkv_cache_attend(i ? copy : cache, data.q, 4, out[i]), TQKV_OK);
        CHECK(!memcmp(out[0], out[1], 4 * WIDE * sizeof(float)), "queries behind: other bits");
        CHECK_RESULT(tqkv_cache_truncate(copy, LEARNS_AT), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(copy, data.q, 1, out[0]), TQKV_OUT_OF_RANGE);
        CHECK(!test_view(copy, 1).keys, "a view of what is not there");
        append_each(&data, copy, LEARNS_AT, MOST);
        append_each(&data, cache, LEARNS_AT + 4, MOST);
        check_same(copy, cache, "a copy that goes on");
        CHECK_RESULT(tqkv_cache_truncate(cache, LEARNS_AT / 2), TQKV_OK);
        CHECK(test_keys(cache)->channel_scale, "a truncation forgets the scale");
        CHECK_RESULT(tqkv_cache_truncate(cache, 0), TQKV_OK);
        CHECK(!test_keys(cache)->channel_scale, "an empty cache remembers the scale");
        tqkv_cache_destroy(copy);
        tqkv_cache_destroy(cache);
    }
    close_data(&data);
}

/* ---- Several queries at once ---- */

/* Queries of a tree, or that see what is behind them, read halves or codes: as from a cache of halves, or from one that
 * was given the scale. On both sides of the position there is no view of them. */
static void check_several(const void *parameters)
{
    enum { N = 6 };
    static const uint64_t tree[N] = {1, 3, 5, 11, 19, 37};
    const learn_row *row = (const learn_row *)parameters;
    learn_data data = open_data(row);
    static float out[2][N * WIDE];
    tqkv_cache_desc halves = data.desc;
    halves.calibrate = halves.exact_first = halves.exact_last = 0;
    halves.key_format = halves.value_format = TQKV_F16;
    for (int before = 0; before <= N; before++) { /* so many queries stand before the position */
        const int end = LEARNS_AT + N - before;
        tqkv_cache *cache = open_cache(&data.desc), *other;
        tqkv_attention some;
        memset(&some, 0, sizeof some);
        if (!row->non_causal) some.tree = tree;
        append(&data, cache, 0, end - N);
        append(&data, cache, end - N, N);
        const bool codes = row->non_causal || before == 0, both = !codes && before < N;
        other = codes ? given_cache(&data, cache, end) : open_cache(&halves);
        if (!codes) append(&data, other, 0, end);
        CHECK_RESULT(row->non_causal ? tqkv_cache_attend(cache, data.q, N, out[0])
                                     : test_attend_some(cache, &some, data.q, N, out[0]),
                     both ? TQKV_OUT_OF_RANGE : TQKV_OK);
        CHECK_RESULT(test_attend_some(other, &some, data.q, N, out[1]), TQKV_OK);
        CHECK(both || !memcmp(out[0], out[1], sizeof out[0]), "%d queries are before", before);
        tqkv_cache_destroy(cache);
        tqkv_cache_destroy(other);
    }
    close_data(&data);
}

/* A call whose first queries stand where rows are read raw is refused and writes nothing. */
static void check_cut_refused(tqkv_cache *cache, int n, const float *q, float *out, const float *all, size_t size,
                              const char *what)
{
    float *before = (float *)test_alloc(size);
    memcpy(before, all, size);
    const tqkv_result r = tqkv_cache_attend(cache, q, n, out);
    CHECK(r == TQKV_INVALID_ARGUMENT && !memcmp(before, all, size), "%s: %s", what, tqkv_result_string(r));
    free(before);
}

/* Queries on both sides of the position are one call: its outputs may overlap neither the queries of the other side,
 * nor each other, nor the cache. */
static void check_overlap(const void *parameters)
{
    enum { N = 6, RAW = 3, ALL = (N + RAW) * WIDE };
    learn_data data = open_data((const learn_row *)parameters);
    const size_t size = ALL * sizeof(float);
    float *all = (float *)test_alloc_filled(size, 0), *behind = all + RAW * WIDE;
    for (int sharing = 0; sharing < 2; sharing++) {
        tqkv_cache_desc desc = data.desc;
        if (sharing) desc.strides.out.token = D, desc.strides.out.head = RAW * D;
        tqkv_cache *cache = open_cache(&desc);
        append(&data, cache, 0, LEARNS_AT - RAW);
        append(&data, cache, LEARNS_AT - RAW, N);
        float *codes = (float *)test_keys(cache)->codes;
        if (sharing) {
            check_cut_refused(cache, N, data.q, all, all, size, "outputs that share rows");
        } else {
            check_cut_refused(cache, N, all, behind, all, size, "outputs in the queries behind");
            check_cut_refused(cache, N, behind, all, all, size, "outputs in the queries before");
            check_cut_refused(cache, N, all, codes, all, size, "outputs in the codes");
            check_cut_refused(cache, N, all, codes - (N - 1) * WIDE, all, size, "the last output in the codes");
        }
        tqkv_cache_destroy(cache);
    }
    tqkv_cache *cache = open_cache(&data.desc);
    append(&data, cache, 0, LEARNS_AT);
    check_cut_refused(cache, RAW, all, (float *)test_keys(cache)->codes, all, size,
                      "outputs in codes that no query reads");
    tqkv_cache_destroy(cache);
    free(all);
    close_data(&data);
}

/* ---- Memory ---- */

/* Rows of halves are counted as long as they are there, and until the queries of the append that learns. */
static void check_memory(const void *parameters)
{
    learn_data data = open_data((const learn_row *)parameters);
    tqkv_cache_desc plain = data.desc;
    plain.calibrate = 0;
    tqkv_cache *cache = open_cache(&plain);
    const size_t without = tqkv_cache_bytes(cache), raw = 4 * LEARNS_AT * CACHE_HEADS * D;
    tqkv_cache_destroy(cache);
    cache = open_cache(&data.desc);
    CHECK(tqkv_cache_bytes(cache) == without, "%d bytes, without %d", (int)tqkv_cache_bytes(cache), (int)without);
    append(&data, cache, 0, 10);
    CHECK(tqkv_cache_bytes(cache) >= without + raw, "%d bytes, without %d", (int)tqkv_cache_bytes(cache), (int)without);
    append(&data, cache, 10, 60);
    CHECK(tqkv_cache_bytes(cache) >= without + raw, "the halves are gone before the next append");
    append(&data, cache, 70, 1);
    CHECK(tqkv_cache_bytes(cache) == without, "%d bytes are left, without %d", (int)tqkv_cache_bytes(cache),
          (int)without);
    tqkv_cache_destroy(cache);
    close_data(&data);
}

static void check_set(const void *parameters)
{
    (void)parameters;
    const cache_row row = {TQKV_TQ4, TQKV_TQ3, D, 100, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    desc.calibrate = 20;
    float *scales = test_scales(1, CACHE_HEADS, D, 6.0), *rows = test_rows(2, DATA_GAUSSIAN, 30 * CACHE_HEADS, D);
    tqkv_cache *learning = cache_given(&desc, NULL, NULL, NULL, NULL);
    for (int way = 0; way < 2; way++) { /* a centre or a scale switches learning off */
        tqkv_cache *cache = cache_given(&desc, way ? NULL : scales, way ? scales : NULL, NULL, way ? scales : NULL);
        CHECK_RESULT(tqkv_cache_append(learning, rows, rows, 5), TQKV_OK);
        CHECK(tqkv_cache_bytes(cache) < tqkv_cache_bytes(learning), "room for halves");
        CHECK_RESULT(tqkv_cache_append(cache, rows, rows, 30), TQKV_OK);
        const tqkv_store *keys = test_keys(cache), *values = test_values(cache);
        CHECK((keys->center != NULL) == (way == 0) && (keys->channel_scale != NULL) == (way == 1) &&
                  (values->channel_scale != NULL) == (way == 1) && !values->center,
              "way %d: other centres or scales", way);
        CHECK(way != 1 || (keys->channel_scale && keys->channel_scale != scales &&
                           !memcmp(keys->channel_scale, scales, sizeof(float) * CACHE_HEADS * D)),
              "the scale is no copy");
        tqkv_cache *copy = NULL;
        CHECK_RESULT(tqkv_cache_fork(cache, NULL, &copy), TQKV_OK);
        check_same(cache, copy, "a fork");
        tqkv_cache_destroy(copy);
        tqkv_cache_destroy(cache);
    }
    tqkv_cache_destroy(learning);
    free(scales);
    free(rows);
}

/* A copy of less capacity learns from as many positions as the cache does, to the same codes; one that cannot hold them
 * learns from all that it holds. */
static void check_smaller(const void *parameters)
{
    (void)parameters;
    enum { BEFORE = 40, N = 110 };
    float *rows = test_rows(2, DATA_GAUSSIAN, N * CACHE_HEADS, D);
    for (int capacity = 400; capacity >= 50; capacity -= 50) {
        const cache_row row = {TQKV_TQ4, TQKV_TQ4, D, 400, false, 0, -1};
        tqkv_cache_desc desc = cache_desc(&row, NULL), smaller = test_cache_desc(0, 0, 0, capacity);
        tqkv_cache *cache = NULL, *copy = NULL;
        desc.calibrate = 64;
        desc.exact_last = 8;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        CHECK_RESULT(tqkv_cache_append(cache, rows, rows, BEFORE), TQKV_OK);
        CHECK_RESULT(tqkv_cache_fork(cache, &smaller, &copy), TQKV_OK);
        const int n = (capacity < N ? capacity : N) - BEFORE;
        const float *rest = rows + BEFORE * CACHE_HEADS * D;
        CHECK_RESULT(tqkv_cache_append(cache, rest, rest, n), TQKV_OK);
        CHECK_RESULT(tqkv_cache_append(copy, rest, rest, n), TQKV_OK);
        const tqkv_store *keys[2] = {test_keys(cache), test_keys(copy)};
        REQUIRE(keys[1]->channel_scale, "capacity %d: the copy has not learned", capacity);
        if (capacity > 64) {
            CHECK(!memcmp(keys[0]->channel_scale, keys[1]->channel_scale, sizeof(float) * CACHE_HEADS * D),
                  "capacity %d: another scale", capacity);
            for (int p = 0; p < 2 * (BEFORE + n); p++)
                CHECK(!memcmp(reference_codes_at(keys[0], p % 2, p / 2), reference_codes_at(keys[1], p % 2, p / 2),
                              reference_row_bytes(TQKV_TQ4, D)),
                      "capacity %d: codes of %d", capacity, p / 2);
        }
        tqkv_cache_destroy(copy);
        tqkv_cache_destroy(cache);
    }
    free(rows);
}

void test_learn_cases(void)
{
    static const learn_row rows[] = {
        {0, 0, false, false}, {4, 9, false, false}, {0, 0, true, false}, {4, 9, true, false}, {4, 9, false, true}};
    for (int i = 0; i < 4; i++) test_add(check_drafts, &rows[i], sizeof *rows, "learn/drafts/%d", i);
    for (int i = 0; i < 2; i++) {
        test_add(check_copies, &rows[i], sizeof *rows, "learn/copies/%d", i);
        test_add(check_memory, &rows[i], sizeof *rows, "learn/memory/%d", i);
    }
    test_add(check_several, &rows[1], sizeof *rows, "learn/tree");
    test_add(check_several, &rows[4], sizeof *rows, "learn/non_causal");
    test_add(check_overlap, &rows[1], sizeof *rows, "learn/overlap");
    test_add(check_set, NULL, 0, "learn/set");
    test_add(check_smaller, NULL, 0, "learn/smaller");
}
