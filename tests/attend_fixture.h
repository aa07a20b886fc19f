/* One attention problem: stores, queries and sinks, and the comparison with the double-precision reference. Slots that
 * no query may read hold NaN. */
#ifndef TQKV_TESTS_ATTEND_FIXTURE_H
#define TQKV_TESTS_ATTEND_FIXTURE_H

#include "data.h"
#include "reference.h"
#include "runner.h"

#define ATTEND_TOLERANCE 2e-5 /* of what multiplies floats: relative L2 against double on the same codes */

typedef enum attend_sinks { SINKS_NONE, SINKS_SOME, SINKS_DOMINATING, SINKS_MINUS_INFINITY } attend_sinks;
typedef enum attend_poison { POISON_NONE, POISON_NEWEST, POISON_OLDEST, POISON_BRANCH } attend_poison;

typedef struct attend_row {
    tqkv_format key_format, value_format;
    int head_dim, value_dim, n_kv_heads, group, n_queries; /* value_dim: 0 = head_dim */
    int64_t end;
    int kv_len, window, key_capacity, value_capacity;
    bool key_ring, value_ring, keys_turned, values_turned; /* turned: F16 is rotated, other formats are not */
    float block_scale, scale, softcap, query_size;
    float key_center, value_center; /* size of the stores' centres, in rows' standard deviations; 0: none */
    float key_spread, value_spread,
        tail_spread; /* of the stores' scales: log2 of the largest by the smallest; 0: none */
    attend_sinks sinks;
    bool tree; /* random branches */
    tqkv_basis query_basis, output_basis;
    bool bits_alone;      /* expected is not computed: that takes longest */
    attend_poison poison; /* NaN in a resident position that only some queries see: the others must not change */
    bool non_causal;
    bool shared;  /* the keys are the values: value_format, value_dim and value_center do not count */
    int tail_dim; /* 0: no tail */
    tqkv_format tail_format;
    float tail_center;
    int list_block, list_newest; /* list_block 0: no list */
    float list_share;            /* of the blocks, named at random */
    bool list_by_head;           /* a row for each KV head */
    int exact_first, exact_last; /* positions as halves */
    int exact_held;              /* after an edit so many of the last ones of exact_last alone; 0: all */
    int codes_of_ends;           /* 1: the keys, 2: the values have no halves */
} attend_row;

typedef struct attend_problem {
    tqkv_attention attention;
    tqkv_store keys, values, tail, ends[2][2];   /* ends: of the first and of the last positions, of keys and values */
    float *q, *sinks, *out;                      /* [n_queries][n_heads][head_dim], [n_heads], as q, but value_dim */
    uint64_t *tree;                              /* [n_queries] or NULL */
    int32_t *list;                               /* or NULL */
    float *key_center, *value_center;            /* [n_kv_heads][head_dim], with value_dim, or NULL */
    float *tail_center;                          /* [n_kv_heads][tail_dim] or NULL */
    float *key_scale, *value_scale, *tail_scale; /* as the centres */
    double *expected;                            /* as out */
    size_t n_rows, head_dim, value_dim; /* n_rows = n_queries * n_heads; head_dim: of a query, with the tail's */
    int64_t poisoned;                   /* position, or -1 */
    double tolerance;                   /* relative L2 */
    /* NULL, or what a row whose error is above the tolerance may err, where the machine's products are not of floats */
    double (*allowed)(const struct attend_problem *problem, size_t row);
} attend_problem;

/* 40 positions of a linear store, one query of two heads. */
static inline attend_row attend_default_row(tqkv_format keys, tqkv_format values, int head_dim)
{
    attend_row row;
    memset(&row, 0, sizeof row);
    row.key_format = keys;
    row.value_format = values;
    row.head_dim = head_dim;
    row.n_kv_heads = 2;
    row.group = 2;
    row.n_queries = 1;
    row.end = 40;
    row.key_capacity = row.value_capacity = 48;
    row.query_size = 1.5f;
    return row;
}

static inline bool attend_is_seen(const tqkv_attention *a, int64_t position)
{
    reference_shape shape = reference_attention_shape(a);
    for (int i = 0; i < shape.n_queries; i++)
        for (int h = 0; reference_is_visible(a, i, position) && h < a->keys->n_kv_heads; h++)
            if (reference_is_listed(a, i, h, position)) return true;
    return false;
}

/* Fills one position of all heads with 0xff: its norms and halves become NaN. With `codes_too` the codes too. */
static inline void attend_poison_position(tqkv_store *s, int64_t position, bool codes_too)
{
    for (int head = 0; head < s->n_kv_heads; head++) {
        size_t norms = (size_t)reference_norms_per_row(s->format, s->head_dim) * sizeof(float);
        if (norms) memset((void *)(uintptr_t)reference_norms_at(s, head, position), 0xff, norms);
        if (codes_too || !norms)
            memset((void *)(uintptr_t)reference_codes_at(s, head, position), 0xff,
                   reference_row_bytes(s->format, s->head_dim));
    }
}

/* Encodes positions [first, end). Then fills those that no query sees with NaN, but not those that only the halves of
   first positions have: a ring that has wrapped shows them. */
static inline void attend_fill_positions(tqkv_store *s, const tqkv_attention *a, int64_t first, int64_t end,
                                         uint64_t seed, data_kind kind)
{
    int count = (int)(end - first);
    float *source = test_rows(seed, kind, count * s->n_kv_heads, s->head_dim);
    const int token = s->n_kv_heads * s->head_dim;
    for (int i = 0; s->channel_scale && i < count * token; i++) source[i] *= s->channel_scale[i % token];
    for (int i = 0; s->center && i < count * token; i++) source[i] += s->center[i % token];
    CHECK_RESULT(tqkv_encode(s, source, count, first), TQKV_OK);
    const bool keeps = s == a->first.keys || s == a->first.values;
    for (int64_t p = keeps ? reference_attention_shape(a).oldest : first; p < end; p++)
        if (!attend_is_seen(a, p)) attend_poison_position(s, p, true);
    free(source);
}

/* The same for the newest positions before `end` that the store can hold. */
static inline void attend_fill_store(tqkv_store *s, const tqkv_attention *a, uint64_t seed, data_kind kind)
{
    int64_t first = s->ring && a->end > s->capacity ? a->end - s->capacity : 0;
    attend_fill_positions(s, a, first, a->end, seed, kind);
}

/* Halves of the first positions in a linear store, of the last ones in a ring that holds no more or a multiple of 64.
 * They have nothing to do with the codes, which are filled with NaN where they must not be read. */
static inline void attend_fill_ends(attend_problem *problem, const attend_row *row)
{
    tqkv_attention *a = &problem->attention;
    tqkv_store *const codes[2] = {&problem->keys, row->shared ? &problem->keys : &problem->values};
    const tqkv_store **const stores[2][2] = {{&a->first.keys, &a->first.values}, {&a->last.keys, &a->last.values}};
    a->first.n = row->exact_first;
    a->last.n = row->exact_last;
    a->last.from = row->exact_held && row->end > row->exact_held ? row->end - row->exact_held : 0;
    for (int last = 0; last < 2; last++)
        for (int side = 0; side < (row->shared ? 1 : 2); side++) {
            const int before = row->n_queries > 1 ? row->n_queries - 1 : 0; /* the newest of the first query */
            const int n = last ? row->exact_last + (row->exact_last ? before : 0) : row->exact_first;
            const int64_t first = last && row->end > n ? row->end - n : 0, end = last || n > row->end ? row->end : n;
            tqkv_store *s = &problem->ends[last][side];
            if (!n || row->codes_of_ends == side + 1) continue;
            *s = test_store(TQKV_F16, codes[side]->head_dim, row->n_kv_heads, last && n % 2 ? (n + 63) / 64 * 64 : n,
                            last);
            s->rotation = reference_is_rotated(codes[side]) ? TQKV_ROTATION_ON : TQKV_ROTATION_DEFAULT;
            s->center = codes[side]->center;
            s->channel_scale = codes[side]->channel_scale;
            *stores[last][side] = s;
            attend_fill_positions(s, a, first, end, 30 + (uint64_t)(2 * last + side), DATA_GAUSSIAN);
            if (row->shared) *stores[last][1] = s;
        }
    for (int side = 0; side < 2; side++)
        for (int64_t p = reference_attention_shape(a).oldest; p < row->end; p++)
            if (reference_store_of(a, side, reference_attention_shape(a).n_queries - 1, p) != codes[side])
                attend_poison_position(codes[side], p, true);
}

static inline float *attend_make_sinks(const attend_row *row)
{
    int n_heads = row->n_kv_heads * row->group;
    if (row->sinks == SINKS_NONE) return NULL;
    float *sinks = (float *)test_alloc(sizeof(float) * (size_t)n_heads);
    for (int i = 0; i < n_heads; i++) {
        sinks[i] = row->sinks == SINKS_DOMINATING ? 20.0f + (float)i * 0.5f : -1.0f + 0.5f * (float)i;
        if (row->sinks == SINKS_MINUS_INFINITY && i % 2 == 0) sinks[i] = -(float)INFINITY;
    }
    return sinks;
}

/* In units of the store's scale: [n_kv_heads][head_dim], or NULL for size 0 */
static inline float *attend_make_center(const tqkv_store *s, uint64_t seed, float size)
{
    if (size == 0.0f) return NULL;
    float *center = test_rows(seed, DATA_GAUSSIAN, s->n_kv_heads, s->head_dim);
    for (int i = 0; i < s->n_kv_heads * s->head_dim; i++)
        center[i] *= s->channel_scale ? size * s->channel_scale[i] : size;
    return center;
}

/* [n_kv_heads][head_dim], or NULL for spread 0 */
static inline float *attend_make_scale(const tqkv_store *s, uint64_t seed, float spread)
{
    return spread == 0.0f ? NULL : test_scales(seed, s->n_kv_heads, s->head_dim, (double)spread);
}

/* [n_queries]: random bits, also above n_queries; some queries see no position of the tree, not even their own. */
static inline uint64_t *attend_make_tree(int n_queries)
{
    data_random random = {16};
    uint64_t *tree = (uint64_t *)test_alloc((size_t)n_queries * sizeof *tree);
    for (int i = 0; i < n_queries; i++) tree[i] = i % 5 == 3 ? 0 : data_bits(&random) | (uint64_t)1 << i;
    return tree;
}

/* Names blocks at random: gone ones, too, and one beyond the end. Numbers behind a row's -1 mean nothing. */
static inline void attend_make_list(attend_problem *problem, const attend_row *row)
{
    tqkv_attention *a = &problem->attention;
    data_random random = {(uint64_t)(row->list_block + row->head_dim)};
    if (!row->list_block) return;
    const int64_t resident = a->end - reference_attention_shape(a).oldest;
    const int64_t first = (a->end - resident) / row->list_block - 2,
                  last = a->end / row->list_block + (a->end < INT64_MAX);
    a->list.block = row->list_block;
    a->list.newest = row->list_newest;
    a->list.heads = row->list_by_head ? row->n_kv_heads : 0;
    a->list.length = (int)(last - first) + 3;
    const int n_rows = row->n_queries * (row->list_by_head ? row->n_kv_heads : 1);
    problem->list = (int32_t *)test_alloc((size_t)(n_rows * a->list.length) * sizeof(int32_t));
    for (int i = 0; i < n_rows; i++) {
        int32_t *to = problem->list + i * a->list.length, *end = to + a->list.length;
        for (int64_t b = first < 0 ? 0 : first; b <= last && b <= INT32_MAX; b++)
            if (data_below(&random, 1000) < (int)(row->list_share * 1000.0f)) *to++ = (int32_t)b;
        *to++ = -1;
        while (to < end) *to++ = data_below(&random, 3) - 5;
    }
    a->list.rows = problem->list;
}

/* Encodes the values, unless the keys are the values, and the tail, if there is one. */
static inline void attend_fill_others(attend_problem *problem, const attend_row *row)
{
    tqkv_attention *a = &problem->attention;
    if (!row->shared) attend_fill_store(&problem->values, a, 12, DATA_STUDENT);
    if (!row->tail_dim) return;
    problem->tail = test_store(row->tail_format, row->tail_dim, row->n_kv_heads, row->key_capacity, row->key_ring);
    problem->tail.channel_scale = problem->tail_scale = attend_make_scale(&problem->tail, 19, row->tail_spread);
    problem->tail.center = problem->tail_center = attend_make_center(&problem->tail, 17, row->tail_center);
    a->tail = &problem->tail;
    attend_fill_store(&problem->tail, a, 18, DATA_GAUSSIAN);
}

static inline tqkv_rotation attend_rotation(tqkv_format format, bool turned)
{
    return !turned ? TQKV_ROTATION_DEFAULT : format == TQKV_F16 ? TQKV_ROTATION_ON : TQKV_ROTATION_OFF;
}

/* Makes keys and values, empty, with their centres and scales. */
static inline void attend_make_stores(attend_problem *problem, const attend_row *row, int value_dim)
{
    problem->keys = test_store(row->key_format, row->head_dim, row->n_kv_heads, row->key_capacity, row->key_ring);
    if (!row->shared)
        problem->values =
            test_store(row->value_format, value_dim, row->n_kv_heads, row->value_capacity, row->value_ring);
    problem->keys.rotation = attend_rotation(row->key_format, row->keys_turned);
    problem->values.rotation = attend_rotation(row->value_format, row->values_turned);
    problem->keys.block_scale = problem->values.block_scale = row->block_scale;
    problem->keys.channel_scale = problem->key_scale = attend_make_scale(&problem->keys, 20, row->key_spread);
    problem->keys.center = problem->key_center = attend_make_center(&problem->keys, 14, row->key_center);
    if (row->shared) return;
    problem->values.channel_scale = problem->value_scale = attend_make_scale(&problem->values, 21, row->value_spread);
    problem->values.center = problem->value_center = attend_make_center(&problem->values, 15, row->value_center);
}

/* Fills the attention in, but for lists, tails and ends. */
static inline void attend_make_call(attend_problem *problem, const attend_row *row)
{
    tqkv_attention *a = &problem->attention;
    a->keys = &problem->keys;
    a->values = row->shared ? &problem->keys : &problem->values;
    a->n_heads = row->n_kv_heads * row->group;
    a->n_queries = row->n_queries;
    a->end = row->end;
    a->kv_len = row->kv_len;
    a->window = row->window;
    a->scale = row->scale;
    a->softcap = row->softcap;
    a->sinks = problem->sinks = attend_make_sinks(row);
    a->non_causal = row->non_causal;
    a->tree = problem->tree = row->tree ? attend_make_tree(row->n_queries) : NULL;
    a->query_basis = row->query_basis;
    a->output_basis = row->output_basis;
}

/* Makes the queries, and room for outputs. */
static inline void attend_make_queries(attend_problem *problem, const attend_row *row, int query_dim, int value_dim)
{
    problem->head_dim = (size_t)query_dim;
    problem->value_dim = (size_t)value_dim;
    problem->n_rows = (size_t)row->n_queries * (size_t)problem->attention.n_heads;
    const size_t count = problem->n_rows * problem->head_dim, out_count = problem->n_rows * problem->value_dim;
    problem->q = test_rows(13, DATA_GAUSSIAN, (int)problem->n_rows, query_dim);
    problem->out = (float *)test_alloc_filled(out_count * sizeof(float), 0xff);
    problem->expected = (double *)test_alloc(out_count * sizeof(double));
    for (size_t i = 0; i < count; i++) problem->q[i] *= row->query_size;
}

/* Puts NaN into all streams at a position that no query, or only some queries, may read. */
static inline void attend_poison_streams(attend_problem *problem, const attend_row *row)
{
    const tqkv_attention *a = &problem->attention;
    problem->poisoned = -1;
    if (row->poison == POISON_NONE) return;
    const reference_shape shape = reference_attention_shape(a);
    const int64_t oldest = row->window ? row->end - row->n_queries - row->window + 1 : shape.oldest;
    problem->poisoned = row->poison == POISON_NEWEST   ? row->end - 1
                        : row->poison == POISON_BRANCH ? row->end - row->n_queries + 1
                                                       : oldest;
    attend_poison_position(&problem->keys, problem->poisoned, false);
    if (!row->shared) attend_poison_position(&problem->values, problem->poisoned, false);
    if (row->tail_dim) attend_poison_position(&problem->tail, problem->poisoned, false);
    for (int side = 0; side < 2; side++) {
        const tqkv_store *s = reference_store_of(a, side, shape.n_queries - 1, problem->poisoned);
        if (s->format == TQKV_F16) attend_poison_position((tqkv_store *)(uintptr_t)s, problem->poisoned, false);
    }
}

/* What the processor may err by. */
static inline double attend_tolerance(const attend_row *row)
{
    const double dim = (double)(row->head_dim + row->tail_dim);
    const double deviation =
        (double)row->query_size * (row->scale != 0.0f ? fabs((double)row->scale) * sqrt(dim) : 1.0);
    return reference_tolerance(row->key_format, row->tail_dim ? row->tail_format : TQKV_FORMAT_DEFAULT,
                               row->shared ? row->key_format : row->value_format, deviation);
}

static inline void attend_set_up_as(reference_centroids centroids, attend_problem *problem, const attend_row *row)
{
    const int value_dim = row->value_dim && !row->shared ? row->value_dim : row->head_dim;
    const int query_dim = row->head_dim + row->tail_dim;
    tqkv_attention *a = &problem->attention;
    memset(problem, 0, sizeof *problem);
    attend_make_stores(problem, row, value_dim);
    attend_make_call(problem, row);
    problem->tolerance = centroids == REFERENCE_INTEGERS ? attend_tolerance(row) : ATTEND_TOLERANCE;
    attend_make_list(problem, row);
    attend_fill_store(&problem->keys, a, 11, DATA_GAUSSIAN);
    attend_fill_others(problem, row);
    attend_fill_ends(problem, row);
    attend_make_queries(problem, row, query_dim, value_dim);
    attend_poison_streams(problem, row);
    if (!row->bits_alone) reference_attend_as(centroids, a, problem->q, problem->expected);
}

static inline void attend_set_up(attend_problem *problem, const attend_row *row)
{
    attend_set_up_as(REFERENCE_INTEGERS, problem, row);
}

/* The same for a GPU, whose attention multiplies floats. */
static inline void attend_set_up_floats(attend_problem *problem, const attend_row *row)
{
    attend_set_up_as(REFERENCE_FLOATS, problem, row);
}

static inline void attend_tear_down(attend_problem *problem)
{
    test_store_free(&problem->keys);
    test_store_free(&problem->values);
    test_store_free(&problem->tail);
    for (int i = 0; i < 4; i++) test_store_free(&problem->ends[i / 2][i % 2]);
    free(problem->q);
    free(problem->sinks);
    free(problem->tree);
    free(problem->list);
    free(problem->key_center);
    free(problem->value_center);
    free(problem->tail_center);
    free(problem->key_scale);
    free(problem->value_scale);
    free(problem->tail_scale);
    free(problem->out);
    free(problem->expected);
}

/* Checks every row of `out` that sees no poisoned position against the tolerance. */
static inline void attend_check(const attend_problem *problem, const float *out, const char *what)
{
    size_t d = problem->value_dim, n_heads = (size_t)problem->attention.n_heads;
    size_t checked = 0;
    for (size_t i = 0; i < problem->n_rows; i++) {
        int query = (int)(i / n_heads);
        if (problem->poisoned >= 0 && reference_is_visible(&problem->attention, query, problem->poisoned)) continue;
        double error = reference_relative_error(out + i * d, problem->expected + i * d, d);
        const bool allowed = problem->allowed && error <= problem->allowed(problem, i);
        CHECK(error <= problem->tolerance || allowed, "%s: query %d head %d: relative error %.3g", what, query,
              (int)(i % n_heads), error);
        checked++;
    }
    CHECK(checked > 0, "%s: every row sees the poisoned position", what);
}

#endif
