/* Caches that learn centre and scale of their keys from their first positions: every query against a cache of halves or
 * a cache with that centre and scale; chunks and edits change nothing. Copies: test_learn_history.c. */
#include "learn_fixture.h"

static const int chunkings[6][8] = {{1}, {MOST}, {7, 40, 1, 90}, {31, 1, 1, 3}, {50, 3, 64}, {64, 64}};

static void check_chunks(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    learn_model m;
    model_open(&m, row);
    for (int c = 0; c < 6; c++) {
        const tqkv_cache_desc desc = describe(row);
        tqkv_cache *cache = NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        for (int end = 0, i = 0, n; end < row->tokens; end += n, i = chunkings[c][i + 1] ? i + 1 : 0) {
            n = chunkings[c][i] < row->tokens - end ? chunkings[c][i] : row->tokens - end;
            /* a ring finds its whole window only in pieces of so many tokens */
            if (row->ring && row->window && n > row->capacity - row->window + 1) n = row->capacity - row->window + 1;
            if (row->ring && !row->window) n = 1;
            append(&m, cache, end, n);
            check_queries(&m, cache, end + n, n, "all at once");
            if (n > 2) check_queries(&m, cache, end + n, n / 2, "some");
            check_view(&m, cache, end + n);
        }
        check_settled(&m, cache);
        tqkv_cache_destroy(cache);
    }
    model_close(&m);
}

/* ---- Edits on the way ---- */

typedef enum edit { EDIT_TRUNCATE, EDIT_REMOVE, EDIT_KEEP, EDITS } edit;

/* Rows that are not to stay are appended and taken away before the cache learns;
 * a truncation after it undoes nothing. */
static void check_edits(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    learn_model m;
    model_open(&m, row);
    for (int how = 0; how < EDITS; how++) {
        const tqkv_cache_desc desc = describe(row);
        tqkv_cache *cache = NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        append(&m, cache, 0, 5);
        append(&m, cache, 100, 4);
        append(&m, cache, 5, how == EDIT_TRUNCATE ? 1 : 2);
        if (how == EDIT_TRUNCATE) CHECK_RESULT(tqkv_cache_truncate(cache, 5), TQKV_OK);
        if (how == EDIT_REMOVE) CHECK_RESULT(tqkv_cache_remove(cache, 5, 4), row->ring ? TQKV_UNSUPPORTED : TQKV_OK);
        if (how == EDIT_KEEP || (how == EDIT_REMOVE && row->ring)) {
            CHECK_RESULT(tqkv_cache_truncate(cache, 9), TQKV_OK);
            append(&m, cache, 5, 2);
            const int newest[2] = {4, 5};
            CHECK_RESULT(tqkv_cache_keep(cache, 6, newest, 2), TQKV_OK);
        }
        const int end = (int)tqkv_cache_end(cache);
        check_queries(&m, cache, end, 2, "after an edit");
        for (int t = end; t < row->tokens; t++) append(&m, cache, t, 1);
        check_settled(&m, cache);
        if (!row->ring) {
            CHECK_RESULT(tqkv_cache_truncate(cache, row->learns_at / 2), TQKV_OK);
            CHECK(test_keys(cache)->channel_scale, "a truncation forgets the scale");
            for (int t = row->learns_at / 2; t < row->tokens; t++) append(&m, cache, t, 1);
            CHECK_RESULT(tqkv_cache_truncate(cache, 0), TQKV_OK);
            CHECK(!test_keys(cache)->channel_scale, "an empty cache remembers the scale");
            for (int t = 0; t < row->tokens; t++) append(&m, cache, t, 1);
            check_settled(&m, cache);
            check_queries(&m, cache, row->tokens, 1, "after another beginning");
        }
        tqkv_cache_destroy(cache);
    }
    model_close(&m);
}

/* ---- Drafts ---- */

enum { DRAFTS = 6 };

/* Appends drafts whose rows are those of other positions, but for the right ones: t + i in the place kept[i]. */
static void append_drafts(const learn_model *m, tqkv_cache *cache, int t, const int *kept, int n_kept)
{
    const size_t rows[2] = {(size_t)(CACHE_HEADS * m->key_dim) * value_size(m->row),
                            (size_t)(CACHE_HEADS * m->value_dim) * value_size(m->row)};
    char *drafts[2];
    for (int which = 0; which < 2; which++) {
        drafts[which] = (char *)test_alloc(DRAFTS * rows[which]);
        memcpy(drafts[which], row_at(m, which, MOST - DRAFTS), DRAFTS * rows[which]);
        for (int i = 0; i < n_kept; i++)
            memcpy(drafts[which] + (size_t)kept[i] * rows[which], row_at(m, which, t + i), rows[which]);
    }
    CHECK_RESULT(tqkv_cache_append(cache, drafts[0], drafts[1], DRAFTS), TQKV_OK);
    for (int which = 0; which < 2; which++) free(drafts[which]);
}

/* Drafts that the cache would learn from, attended to and taken back, leave no trace: by truncation, or of a tree whose
 * path stays. */
static void check_drafts(const void *parameters)
{
    static const int paths[4][3] = {{0, 1, 2}, {0, 2, 5}, {1, 3, 4}, {5, 0, 0}};
    const learn_row *row = (const learn_row *)parameters;
    const tqkv_cache_desc desc = describe(row);
    learn_model m;
    model_open(&m, row);
    float *out = (float *)test_alloc(DRAFTS * sizeof(float) * (size_t)(HEADS * m.value_dim));
    for (int t = row->learns_at - DRAFTS - 1; t <= row->learns_at + 1; t++)
        for (int way = 0; way < 8; way++) {
            const int *path = paths[way % 4], n_kept = way < 4 ? way : way < 7 ? 3 : 1;
            tqkv_cache *cache = NULL;
            CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
            append(&m, cache, 0, t);
            append_drafts(&m, cache, t, way < 4 ? paths[0] : path, n_kept);
            CHECK_RESULT(tqkv_cache_attend(cache, row_at(&m, 2, t), DRAFTS, out), TQKV_OK);
            CHECK_RESULT(way < 4 ? tqkv_cache_truncate(cache, t + n_kept)
                                 : tqkv_cache_keep(cache, DRAFTS, path, n_kept),
                         TQKV_OK);
            if (t + n_kept > 0 && n_kept) check_queries(&m, cache, t + n_kept, 1, "after the drafts");
            for (int p = t + n_kept; p < row->tokens; p++) {
                append(&m, cache, p, 1);
                check_queries(&m, cache, p + 1, 1, "behind drafts");
            }
            check_settled(&m, cache);
            tqkv_cache_destroy(cache);
        }
    free(out);
    model_close(&m);
}

/* A copy made between the append that learns and its queries has no halves for them, and says so; from the next append
 * on it is as good as the cache. */
static void check_copy_before_queries(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    const tqkv_cache_desc desc = describe(row);
    const int before = row->learns_at - 5, n = 9;
    learn_model m;
    model_open(&m, row);
    float *out = (float *)test_alloc((size_t)n * sizeof(float) * (size_t)(HEADS * m.value_dim));
    for (int loads = 0; loads < 2; loads++) {
        tqkv_cache *cache = NULL, *copy = NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        append(&m, cache, 0, before);
        append(&m, cache, before, n);
        if (loads)
            copy = reloaded(row, cache);
        else
            CHECK_RESULT(tqkv_cache_fork(cache, NULL, &copy), TQKV_OK);
        REQUIRE(copy, "no copy");
        test_explained = NULL;
        CHECK_RESULT(tqkv_cache_attend(copy, row_at(&m, 2, before), n, out), TQKV_OUT_OF_RANGE);
        CHECK(test_explained && strstr(test_explained, "copy"), "no text");
        check_queries(&m, copy, before + n, n - 5, "of a copy, behind");
        check_queries(&m, cache, before + n, n, "of the cache");
        CHECK_RESULT(tqkv_cache_truncate(copy, before + 5), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(copy, row_at(&m, 2, before), 1, out), TQKV_OUT_OF_RANGE);
        const tqkv_attention view = test_view(copy, 1);
        CHECK(!view.keys, "a view of what is not there");
        for (int p = before + 5; p < row->tokens; p++) {
            append(&m, copy, p, 1);
            if (!row->exact_last) check_queries(&m, copy, p + 1, 1, "of a copy that goes on");
        }
        check_settled(&m, copy);
        tqkv_cache_destroy(copy);
        tqkv_cache_destroy(cache);
    }
    free(out);
    model_close(&m);
}

/* ---- Trees ---- */

/* Queries of a tree read halves or codes; on both sides of the position there is no view of them. */
static void check_tree(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    enum { N = 6 };
    static const uint64_t tree[N] = {1, 3, 5, 11, 19, 37};
    const size_t size = sizeof(float) * (size_t)(HEADS * row->head_dim);
    learn_model m;
    model_open(&m, row);
    const tqkv_cache_desc desc = describe(row);
    for (int before = 0; before <= N; before++) {
        const int end = row->learns_at + N - before;
        tqkv_cache *caches[3] = {NULL, NULL, NULL}; /* which learns, of halves, with the scale */
        float *out[3];
        tqkv_attention some;
        memset(&some, 0, sizeof some);
        some.tree = tree;
        tqkv_cache_desc halves = desc;
        halves.calibrate = halves.exact_first = halves.exact_last = 0;
        halves.key_format = halves.value_format = TQKV_F16;
        CHECK_RESULT(tqkv_cache_create(&desc, &caches[0]), TQKV_OK);
        CHECK_RESULT(tqkv_cache_create(&halves, &caches[1]), TQKV_OK);
        caches[2] = make_plain(&m);
        append(&m, caches[0], 0, end - N);
        append(&m, caches[0], end - N, N);
        append(&m, caches[1], 0, end);
        for (int t = 0; t < end; t++) append_plain(&m, caches[2], t);
        for (int i = 0; i < 3; i++) {
            out[i] = (float *)test_alloc_filled(N * size, 0xff);
            CHECK_RESULT(test_attend_some(caches[i], &some, row_at(&m, 2, end - N), N, out[i]),
                         !i && before % N ? TQKV_OUT_OF_RANGE : TQKV_OK);
        }
        CHECK(before % N || !memcmp(out[0], out[before ? 1 : 2], N * size), "%d queries are before", before);
        for (int i = 0; i < 3; i++) {
            free(out[i]);
            tqkv_cache_destroy(caches[i]);
        }
    }
    model_close(&m);
}

/* Whether a call whose first queries stand where rows are read raw is refused and writes nothing. */
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
    const learn_row *row = (const learn_row *)parameters;
    enum { N = 6, RAW = 3 };
    const int values = HEADS * row->head_dim;
    const size_t size = sizeof(float) * (size_t)((N + RAW) * values);
    const tqkv_cache_desc desc = describe(row);
    tqkv_cache_desc sharing = desc;
    sharing.strides.out.token = (size_t)row->head_dim;
    sharing.strides.out.head = (size_t)(RAW * row->head_dim);
    learn_model m;
    model_open(&m, row);
    {
        float *all = (float *)test_alloc_filled(size, 0), *behind = all + RAW * values;
        tqkv_cache *cache = NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        append(&m, cache, 0, row->learns_at - RAW);
        append(&m, cache, row->learns_at - RAW, N);
        check_cut_refused(cache, N, all, behind, all, size, "outputs in the queries behind");
        check_cut_refused(cache, N, behind, all, all, size, "outputs in the queries before");
        float *codes = (float *)test_keys(cache)->codes;
        check_cut_refused(cache, N, all, codes, all, size, "outputs in the codes");
        check_cut_refused(cache, N, all, codes - (N - 1) * values, all, size, "the last output in the codes");
        tqkv_cache_destroy(cache);
        CHECK_RESULT(tqkv_cache_create(&sharing, &cache), TQKV_OK);
        append(&m, cache, 0, row->learns_at - RAW);
        append(&m, cache, row->learns_at - RAW, N);
        float *out = (float *)test_alloc_filled(size, 0xa5);
        check_cut_refused(cache, N, all, out, out, size, "outputs that share rows");
        free(out);
        tqkv_cache_destroy(cache);
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        append(&m, cache, 0, row->learns_at);
        codes = (float *)test_keys(cache)->codes;
        check_cut_refused(cache, RAW, all, codes, all, size, "outputs in codes that no query reads");
        tqkv_cache_destroy(cache);
        free(all);
    }
    model_close(&m);
}

/* ---- Non-causal ---- */

static void check_non_causal(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    const size_t size = sizeof(float) * (size_t)(HEADS * row->head_dim);
    float *out[2] = {(float *)test_alloc(8 * size), (float *)test_alloc(8 * size)};
    learn_model m;
    model_open(&m, row);
    const tqkv_cache_desc desc = describe(row);
    tqkv_cache *cache = NULL, *halves = NULL;
    tqkv_cache_desc raw = desc;
    raw.calibrate = 0;
    raw.key_format = raw.value_format = TQKV_F16;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    CHECK_RESULT(tqkv_cache_create(&raw, &halves), TQKV_OK);
    for (int end = 8; end <= row->tokens; end += 8) {
        append(&m, cache, end - 8, 8);
        append(&m, halves, end - 8, 8);
        tqkv_cache *plain = make_plain(&m);
        for (int t = 0; t < end; t++) append_plain(&m, plain, t);
        CHECK_RESULT(tqkv_cache_attend(cache, row_at(&m, 2, 0), 8, out[0]), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(end < row->learns_at ? halves : plain, row_at(&m, 2, 0), 8, out[1]), TQKV_OK);
        CHECK(!memcmp(out[0], out[1], 8 * size), "at %d", end);
        tqkv_cache_destroy(plain);
    }
    tqkv_cache_destroy(cache);
    tqkv_cache_destroy(halves);
    free(out[0]);
    free(out[1]);
    model_close(&m);
}
void test_learn_cases(void)
{
    const tqkv_type f32 = TQKV_TYPE_F32;
    const tqkv_pairs none = TQKV_PAIRS_NONE;
    const learn_row rows[] = {
        {TQKV_TQ4, TQKV_TQ4, 64, 0, 240, 40, 40, 0, 0, 0, 0, 100, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_TQ4, 64, 0, 300, 40, 40, 4, 9, 0, 0, 220, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_I8, TQKV_TQ3, 128, 64, 230, 100, 57, 50, 20, 0, 0, 120, 0, 0, 0, 1, 0, f32, 0, none},
        {TQKV_TQ3, TQKV_TQ2, 80, 0, 40, 512, 16, 4, 8, 0, 0, 39, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_I8, 64, 0, 90, 22, 22, 3, 17, 0, 30, 210, 1, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ5, TQKV_F16, 64, 0, 70, 17, 17, 5, 6, 0, 0, 150, 1, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_TQ4, 96, 0, 200, 30, 30, 2, 5, 0, 0, 80, 0, 1, 0, 0, 0, f32, 0, none},
        {TQKV_TQ6, TQKV_TQ4, 128, 0, 200, 30, 30, 2, 5, 64, 0, 80, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_TQ4, 64, 0, 80, 18, 18, 3, 5, 32, 25, 130, 1, 1, 0, 0, 0, f32, 0, none},
        {TQKV_TQ5, TQKV_TQ4, 64, 0, 200, 30, 30, 40, 5, 0, 0, 120, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_TQ5, 512, 0, 100, 20, 20, 0, 10, 0, 0, 60, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_TQ4, 64, 0, 200, 19, 19, 3, 5, 0, 0, 90, 0, 0, 0, 0, 0, TQKV_TYPE_F16, 0, none},
        {TQKV_F16, TQKV_TQ4, 64, 0, 200, 30, 30, 3, 5, 0, 0, 70, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_TQ3, 64, 0, 300, 60, 60, 4, 9, 0, 0, 160, 0, 0, 0, 0, 0, f32, 2, TQKV_PAIRS_HALVES},
        {TQKV_TQ4, TQKV_TQ3, 64, 0, 240, 40, 40, 2, 9, 0, 0, 100, 0, 0, 0, 0, 0, f32, 2, none},
        {TQKV_TQ5, TQKV_TQ4, 64, 0, 240, 40, 40, 2, 9, 0, 0, 100, 0, 0, 0, 1, 0, f32, 10, none},
        {TQKV_TQ4, TQKV_TQ4, 96, 0, 200, 46, 46, 2, 5, 0, 0, 80, 0, 1, 0, 0, 0, TQKV_TYPE_F16, 2, none},
        {TQKV_TQ4, TQKV_TQ5, 64, 0, 240, 60, 60, 3, 5, 0, 25, 150, 1, 0, 0, 0, 0, f32, 2, none},
    };
    for (int i = 0; i < (int)(sizeof rows / sizeof *rows); i++) {
        test_add(check_chunks, &rows[i], sizeof *rows, "learn/chunks/%d", i);
        test_add(check_edits, &rows[i], sizeof *rows, "learn/edits/%d", i);
    }
    test_add(check_tree, &rows[1], sizeof *rows, "learn/tree");
    for (int i = 0; i < 2; i++) {
        learn_row drafts = rows[i ? 1 : 0], halves = rows[i ? 14 : 11]; /* a tree keeps the halves of rows of floats */
        drafts.type = halves.type = TQKV_TYPE_F16;
        drafts.exact_last = halves.exact_last = i ? 9 : 0;
        test_add(check_drafts, &drafts, sizeof drafts, "learn/drafts/%d", i);
        test_add(check_drafts, &halves, sizeof halves, "learn/drafts/repeated%d", i);
        test_add(check_copy_before_queries, &rows[i], sizeof *rows, "learn/copy_before_queries/%d", i);
    }
    test_add(check_overlap, &rows[1], sizeof *rows, "learn/overlap");
    learn_row non_causal = rows[1];
    non_causal.non_causal = true;
    test_add(check_non_causal, &non_causal, sizeof *rows, "learn/non_causal");
}
