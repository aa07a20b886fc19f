/* The golden cases of attention: formats, sizes and options, and the hashes of the outputs. */
#ifndef TQKV_TESTS_ATTEND_GOLDEN_H
#define TQKV_TESTS_ATTEND_GOLDEN_H

#include "golden.h"
#include "runner.h"

typedef enum attend_golden_option {
    ATTEND_PLAIN,
    ATTEND_WINDOW,
    ATTEND_RING,     /* wraps inside a tile */
    ATTEND_PAGES,    /* in a mixed order */
    ATTEND_TREE,     /* drafts with three branches */
    ATTEND_SOFTCAP,  /* and sinks */
    ATTEND_CENTERS,  /* and sinks */
    ATTEND_SLICES,   /* three, merged */
    ATTEND_NARROW,   /* values of another head_dim */
    ATTEND_MANY,     /* more rows than an item holds */
    ATTEND_LONG,     /* two stretches */
    ATTEND_BFLOAT16, /* queries; outputs are halves */
    ATTEND_ROTATED,  /* queries and outputs */
    ATTEND_LATENT,   /* keys that are the values, with a tail of the second format */
    ATTEND_ONE,      /* one row a KV head, other sizes */
    ATTEND_INDEX,    /* the scores of an index over the first KV head */
    ATTEND_SCALED,   /* scales of keys and values, centres and sinks */
    ATTEND_ENDS,     /* the first and the newest positions as halves */
    ATTEND_LIST,     /* blocks of 4 */
    ATTEND_TURNED,   /* F16 rotated, TQ5 and more unrotated */
    ATTEND_GOLDEN_OPTIONS
} attend_golden_option;

typedef struct attend_golden_case {
    tqkv_format keys, values;
    int head_dim, option;
} attend_golden_case;

enum { ATTEND_GOLDEN_HEADS = 2, ATTEND_GOLDEN_GROUP = 2, ATTEND_GOLDEN_PAGE = 64 };

static const tqkv_format attend_golden_formats[10] = {TQKV_F16, TQKV_TQ4, TQKV_TQ5,       TQKV_TQ6,       TQKV_TQ2,
                                                      TQKV_TQ3, TQKV_I8,  TQKV_TQ5_BYTES, TQKV_TQ6_BYTES, TQKV_TQ8};
enum { ATTEND_GOLDEN_FORMATS = 10, ATTEND_GOLDEN_PLAIN = ATTEND_GOLDEN_FORMATS * TEST_ALL_HEAD_DIMS };

/* Sets *found to case number `index`: each format with each size, pairs, and each option with each format. 0 past the
   last. */
static inline int attend_golden_find(int index, attend_golden_case *found)
{
    enum { PAIRS = 12 };
    static const tqkv_format pairs[PAIRS][2] = {{TQKV_I8, TQKV_TQ4},  {TQKV_F16, TQKV_TQ4}, {TQKV_TQ4, TQKV_F16},
                                                {TQKV_I8, TQKV_F16},  {TQKV_TQ6, TQKV_TQ2}, {TQKV_TQ3, TQKV_I8},
                                                {TQKV_TQ5, TQKV_TQ4}, {TQKV_F16, TQKV_I8},  {TQKV_TQ8, TQKV_TQ4},
                                                {TQKV_I8, TQKV_TQ8},  {TQKV_TQ8, TQKV_F16}, {TQKV_F16, TQKV_TQ8}};
    static const int sizes[6] = {128, 64, 80, 256, 512, 48}, sizes_of_one[6] = {192, 96, 112, 288, 224, 160};
    const int pair = index - ATTEND_GOLDEN_PLAIN, with_option = pair - PAIRS;
    const int option = with_option < 0 ? ATTEND_PLAIN : ATTEND_WINDOW + with_option / ATTEND_GOLDEN_FORMATS;
    const int f = (pair < 0 ? index : with_option) % ATTEND_GOLDEN_FORMATS;
    attend_golden_case c = {attend_golden_formats[f], attend_golden_formats[f], 0, option};
    if (pair < 0) {
        c.head_dim = test_all_head_dims[index / ATTEND_GOLDEN_FORMATS];
    } else if (with_option < 0) {
        c.keys = pairs[pair][0];
        c.values = pairs[pair][1];
        c.head_dim = pair % 2 ? 576 : 128;
    } else {
        c.values = attend_golden_formats[(f + option) % 9];
        c.head_dim = (option == ATTEND_ONE ? sizes_of_one : sizes)[(f + option) % 6];
    }
    *found = c;
    return option < ATTEND_GOLDEN_OPTIONS;
}

static inline const char *attend_golden_option_name(int option)
{
    static const char *const options[ATTEND_GOLDEN_OPTIONS] = {
        "plain", "window",   "ring",    "pages",  "tree", "softcap", "centers", "slices", "narrow", "many",
        "long",  "bfloat16", "rotated", "latent", "one",  "index",   "scaled",  "ends",   "list",   "turned"};
    return options[option];
}

static inline void attend_golden_name(const attend_golden_case *c, char name[GOLDEN_NAME_SIZE])
{
    snprintf(name, GOLDEN_NAME_SIZE, "attend/%s-%s/%d/%s", tqkv_format_name(c->keys), tqkv_format_name(c->values),
             c->head_dim, attend_golden_option_name(c->option));
}

/* Everything that a case needs, and its attention. */
typedef struct attend_golden_problem {
    tqkv_attention attention;
    tqkv_store keys, values, tail, ends[2]; /* ends: halves of all positions, of keys and values */
    float *q, *out, *slice;                 /* slice: out, max and sum of a slice behind each other */
    float *centers, *scales;                /* of the keys, then of the values */
    size_t n_rows, n_out;
    int n_tokens;
} attend_golden_problem;

static inline float *attend_golden_rows(uint64_t seed, data_kind kind, int n_rows, int head_dim)
{
    float *rows = (float *)malloc((size_t)n_rows * (size_t)head_dim * sizeof *rows);
    if (rows) data_rows(seed, kind, rows, n_rows, head_dim);
    return rows;
}

/* Centres and scales of the keys, then of the values; c: with the stores' head_dim and number of heads. 0 on failure */
static inline int attend_golden_channels(const attend_golden_case *c, attend_golden_problem *p)
{
    const size_t each = (size_t)(ATTEND_GOLDEN_HEADS * c->head_dim);
    const golden_case shape = {(int)c->keys, c->head_dim, GOLDEN_SCALE};
    if (c->option != ATTEND_CENTERS && c->option != ATTEND_SCALED) return 1;
    p->centers = attend_golden_rows(3, DATA_GAUSSIAN, 2 * ATTEND_GOLDEN_HEADS, c->head_dim);
    p->scales = (float *)malloc(2 * each * sizeof(float));
    if (!p->centers || !p->scales) return 0;
    golden_scale(&shape, p->scales);
    for (size_t i = 0; i < each; i++) p->scales[each + i] = p->scales[each - 1 - i];
    p->keys.center = p->centers;
    p->values.center = p->centers + each;
    if (c->option == ATTEND_CENTERS) return 1;
    p->keys.channel_scale = p->scales;
    p->values.channel_scale = p->scales + each;
    return 1;
}

/* Makes and fills one store of n_tokens positions. 0 on failure. */
static inline int attend_golden_fill(const attend_golden_case *c, int n_tokens, uint64_t seed, tqkv_store *s)
{
    static const int32_t pages[3] = {2, 0, 1};
    const int n = ATTEND_GOLDEN_HEADS * n_tokens;
    s->n_kv_heads = ATTEND_GOLDEN_HEADS;
    s->capacity = c->option == ATTEND_RING ? 100 : c->option == ATTEND_PAGES ? 3 * ATTEND_GOLDEN_PAGE : n_tokens;
    s->ring = c->option == ATTEND_RING;
    if (c->option == ATTEND_PAGES) {
        s->pages = pages;
        s->n_pages = 3;
        s->page_size = ATTEND_GOLDEN_PAGE;
    }
    s->codes_size = tqkv_codes_size(s);
    s->norms_size = tqkv_norms_size(s);
    s->codes = malloc(s->codes_size + 1);
    s->norms = (float *)malloc(s->norms_size + 1);
    float *rows = attend_golden_rows(seed, seed == 1 ? DATA_GAUSSIAN : DATA_STUDENT, n, s->head_dim);
    const int ok = s->codes && s->norms && rows && tqkv_encode(s, rows, n_tokens, 0) == TQKV_OK;
    free(rows);
    return ok;
}

/* Keeps all positions as halves beside the codes. 0 on failure */
static inline int attend_golden_keep(const attend_golden_case *c, attend_golden_problem *p)
{
    tqkv_attention *a = &p->attention;
    int ok = 1;
    if (c->option != ATTEND_ENDS) return 1;
    for (int side = 0; side < 2; side++) {
        p->ends[side].format = TQKV_F16;
        p->ends[side].rotation = (side ? c->values : c->keys) != TQKV_F16 ? TQKV_ROTATION_ON : TQKV_ROTATION_DEFAULT;
        p->ends[side].head_dim = c->head_dim;
        ok = attend_golden_fill(c, p->n_tokens, 5 + (uint64_t)side, &p->ends[side]) && ok;
    }
    a->first.keys = a->last.keys = &p->ends[0];
    a->first.values = a->last.values = &p->ends[1];
    a->first.n = 5;
    a->last.n = 20;
    return ok;
}

/* Leaves out the rotation, or for F16 brings it in, where that can be. */
static inline void attend_golden_turn(const attend_golden_case *c, tqkv_store *s)
{
    const tqkv_format f = s->format;
    if (c->option != ATTEND_TURNED) return;
    if (f == TQKV_F16) s->rotation = TQKV_ROTATION_ON;
    if (f == TQKV_TQ5 || f == TQKV_TQ6 || f == TQKV_TQ8 || f == TQKV_TQ5_BYTES || f == TQKV_TQ6_BYTES)
        s->rotation = TQKV_ROTATION_OFF;
}

/* Sets the options that are not the stores'. */
static inline void attend_golden_set(const attend_golden_case *c, tqkv_attention *a)
{
    static const float sinks[ATTEND_GOLDEN_HEADS * ATTEND_GOLDEN_GROUP] = {-1.0f, 0.5f, 3.0f, 0.0f};
    static const uint64_t tree[7] = {0x1, 0x3, 0x5, 0xb, 0x13, 0x25, 0x41};
    if (c->option == ATTEND_WINDOW) a->window = 37;
    if (c->option == ATTEND_SOFTCAP) a->softcap = 2.5f;
    if (c->option == ATTEND_SOFTCAP || c->option == ATTEND_CENTERS || c->option == ATTEND_SCALED) a->sinks = sinks;
    if (c->option == ATTEND_MANY) a->n_queries = 70;
    if (c->option == ATTEND_LONG || c->option == ATTEND_ONE) a->n_queries = 1;
    if (c->option == ATTEND_ONE) a->n_heads = ATTEND_GOLDEN_HEADS;
    if (c->option == ATTEND_TREE) {
        a->n_queries = 7;
        a->tree = tree;
    }
    if (c->option == ATTEND_BFLOAT16) {
        a->query_type = TQKV_TYPE_BF16;
        a->output_type = TQKV_TYPE_F16;
    }
    if (c->option == ATTEND_LIST) {
        static const int32_t list[3][8] = {
            {0, 3, 4, 17, 30, -1}, {-1}, {1, 2, 3, 4, 15, 16, 31, 32}}; /* of blocks, a row for each query */
        a->list.rows = list[0];
        a->list.length = 8;
        a->list.block = 4;
        a->list.newest = 6;
    }
    if (c->option == ATTEND_ROTATED) a->query_basis = a->output_basis = TQKV_ROTATED;
}

/* Keeps the upper halves of the queries, as bfloat16. */
static inline void attend_golden_narrow(float *q, size_t n)
{
    uint16_t *narrow = (uint16_t *)malloc(n * sizeof *narrow);
    for (size_t i = 0; narrow && i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &q[i], sizeof bits);
        narrow[i] = (uint16_t)(bits >> 16);
    }
    if (narrow) memcpy(q, narrow, n * sizeof *narrow);
    free(narrow);
}

/* Makes the second stream a tail, and the keys the values. */
static inline void attend_golden_share(const attend_golden_case *c, attend_golden_problem *p)
{
    if (c->option != ATTEND_LATENT) return;
    p->tail = p->values;
    memset(&p->values, 0, sizeof p->values);
    p->attention.values = &p->keys;
    p->attention.tail = &p->tail;
}

/* 0 on failure; attend_golden_close in any case. */
static inline int attend_golden_open(const attend_golden_case *c, attend_golden_problem *p)
{
    tqkv_attention *a = &p->attention;
    memset(p, 0, sizeof *p);
    p->n_tokens = c->option == ATTEND_LONG ? 2100 : c->option == ATTEND_RING ? 150 : 133;
    p->keys.format = c->keys;
    p->values.format = c->values;
    p->keys.head_dim = p->values.head_dim = c->head_dim;
    if (c->option == ATTEND_NARROW || c->option == ATTEND_LATENT) p->values.head_dim = c->head_dim > 64 ? 64 : 96;
    attend_golden_turn(c, &p->keys);
    attend_golden_turn(c, &p->values);
    int ok = attend_golden_channels(c, p);
    ok = attend_golden_fill(c, p->n_tokens, 1, &p->keys) && ok;
    ok = attend_golden_fill(c, p->n_tokens, 2, &p->values) && ok;
    a->keys = &p->keys;
    a->values = &p->values;
    attend_golden_share(c, p);
    a->n_heads = ATTEND_GOLDEN_HEADS * ATTEND_GOLDEN_GROUP;
    a->n_queries = 3;
    a->end = p->n_tokens;
    attend_golden_set(c, a);
    ok = attend_golden_keep(c, p) && ok;
    p->n_rows = (size_t)a->n_queries * (size_t)a->n_heads;
    p->n_out = p->n_rows * (size_t)a->values->head_dim;
    p->q = attend_golden_rows(4, DATA_GAUSSIAN, (int)p->n_rows, c->head_dim + p->tail.head_dim);
    p->out = (float *)calloc(p->n_out + 2 * p->n_rows, sizeof(float));
    p->slice = (float *)calloc(p->n_out + 2 * p->n_rows, sizeof(float));
    if (p->q && c->option == ATTEND_BFLOAT16) attend_golden_narrow(p->q, p->n_rows * (size_t)c->head_dim);
    return ok && p->q && p->out && p->slice;
}

static inline void attend_golden_close(attend_golden_problem *p)
{
    free(p->keys.codes);
    free(p->keys.norms);
    free(p->values.codes);
    free(p->values.norms);
    free(p->tail.codes);
    free(p->tail.norms);
    for (int side = 0; side < 2; side++) {
        free(p->ends[side].codes);
        free(p->ends[side].norms);
    }
    free(p->q);
    free(p->out);
    free(p->slice);
    free(p->centers);
    free(p->scales);
}

static inline int attend_golden_in_slices(attend_golden_problem *p)
{
    const int cuts[4] = {0, 50, 51, p->n_tokens};
    const tqkv_attention *a = &p->attention;
    float *max = p->out + p->n_out, *slice_max = p->slice + p->n_out;
    int ok = tqkv_attend_partial(a, p->q, 0, cuts[1], p->out, max, max + p->n_rows) == TQKV_OK;
    for (int i = 1; ok && i < 3; i++)
        ok = tqkv_attend_partial(a, p->q, cuts[i], cuts[i + 1] - cuts[i], p->slice, slice_max, slice_max + p->n_rows) ==
                 TQKV_OK &&
             tqkv_attend_merge(a, p->out, max, max + p->n_rows, a, p->slice, slice_max, slice_max + p->n_rows) ==
                 TQKV_OK;
    return ok && tqkv_attend_finish(a, p->out, max, max + p->n_rows) == TQKV_OK;
}

/* The scores of an index, with the queries of the attention. Becomes n_out. */
static inline int attend_golden_score(attend_golden_problem *p)
{
    static const float weights[12] = {0.3f, -1.0f, 2.0f, 0.01f, 1.0f, 0.7f, -0.2f, 5.0f, 0.0f, 1.5f, -3.0f, 0.9f};
    tqkv_index x;
    memset(&x, 0, sizeof x);
    p->keys.n_kv_heads = 1;
    x.keys = &p->keys;
    x.n_heads = p->attention.n_heads;
    x.n_queries = p->attention.n_queries;
    x.end = p->n_tokens;
    x.weights = weights;
    x.relu = p->keys.head_dim != 64;
    x.block = p->keys.head_dim == 128 ? 1 : 4;
    x.pool = p->keys.head_dim == 80 ? TQKV_POOL_MAX : TQKV_POOL_MEAN;
    p->n_out = (size_t)(x.n_queries * ((p->n_tokens + x.block - 1) / x.block));
    return tqkv_index_scores(&x, p->q, p->out) == TQKV_OK;
}

/* Attends; the upper half of XXH3-64 of the output, of floats as little-endian bytes. 0 on failure. */
static inline int attend_golden_make(const attend_golden_case *c, uint32_t *hash)
{
    attend_golden_problem p;
    int ok = attend_golden_open(c, &p);
    if (ok)
        ok = c->option == ATTEND_SLICES  ? attend_golden_in_slices(&p)
             : c->option == ATTEND_INDEX ? attend_golden_score(&p)
                                         : tqkv_attend(&p.attention, p.q, p.out) == TQKV_OK;
    if (ok && c->option == ATTEND_BFLOAT16) {
        uint8_t *bytes = (uint8_t *)p.out;
        for (size_t i = 0; i < p.n_out; i++) {
            uint16_t half;
            memcpy(&half, bytes + 2 * i, sizeof half);
            bytes[2 * i] = (uint8_t)half;
            bytes[2 * i + 1] = (uint8_t)(half >> 8);
        }
    } else if (ok) {
        data_to_little_endian(p.out, p.n_out);
    }
    *hash = ok ? (uint32_t)(XXH3_64bits(p.out, p.n_out * (c->option == ATTEND_BFLOAT16 ? 2 : sizeof(float))) >> 32) : 0;
    attend_golden_close(&p);
    return ok;
}

#endif
