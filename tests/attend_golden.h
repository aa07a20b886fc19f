/* The golden cases of attention: formats, sizes and options, and the hashes of the outputs. */
#ifndef TQKV_TESTS_ATTEND_GOLDEN_H
#define TQKV_TESTS_ATTEND_GOLDEN_H

#include "attend_checks.h"
#include "golden.h"

typedef enum attend_golden_option {
    ATTEND_PLAIN,
    ATTEND_WINDOW,
    ATTEND_RING,     /* wraps inside a tile */
    ATTEND_PAGES,    /* in a mixed order */
    ATTEND_TREE,     /* drafts with three branches */
    ATTEND_SOFTCAP,  /* and sinks */
    ATTEND_CENTERS,  /* and sinks */
    ATTEND_SLICED,   /* three, merged */
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

/* The shape and the options that the fixture knows. */
static inline attend_row attend_golden_row(const attend_golden_case *c)
{
    const int option = c->option, narrow = c->head_dim > 64 ? 64 : 96;
    const bool centers = option == ATTEND_CENTERS || option == ATTEND_SCALED;
    attend_row row = attend_default_row(c->keys, c->values, c->head_dim);
    row.bits_alone = true;
    row.end = option == ATTEND_LONG ? 2100 : option == ATTEND_RING ? 150 : 133;
    row.key_capacity = row.value_capacity = option == ATTEND_RING ? 100 : (int)row.end;
    row.key_ring = row.value_ring = option == ATTEND_RING;
    row.n_queries = option == ATTEND_TREE                           ? 7
                    : option == ATTEND_MANY                         ? 70
                    : option == ATTEND_LONG || option == ATTEND_ONE ? 1
                                                                    : 3;
    row.group = option == ATTEND_ONE ? 1 : option == ATTEND_INDEX ? 4 : 2;
    row.n_kv_heads = option == ATTEND_INDEX ? 1 : 2;
    row.window = option == ATTEND_WINDOW ? 37 : 0;
    row.tree = option == ATTEND_TREE;
    row.softcap = option == ATTEND_SOFTCAP ? 2.5f : 0.0f;
    row.sinks = centers || option == ATTEND_SOFTCAP ? SINKS_SOME : SINKS_NONE;
    row.key_center = row.value_center = centers ? 1.0f : 0.0f;
    row.key_spread = row.value_spread = option == ATTEND_SCALED ? 8.0f : 0.0f;
    row.value_dim = option == ATTEND_NARROW ? narrow : 0;
    row.shared = option == ATTEND_LATENT;
    row.tail_dim = option == ATTEND_LATENT ? narrow : 0;
    row.tail_format = c->values;
    row.query_basis = row.output_basis = option == ATTEND_ROTATED ? TQKV_ROTATED : TQKV_ORIGINAL;
    row.exact_first = option == ATTEND_ENDS ? 5 : 0;
    row.exact_last = option == ATTEND_ENDS ? 20 : 0;
    row.list_block = option == ATTEND_LIST ? 4 : 0;
    row.list_newest = 6;
    row.list_share = 0.3f;
    row.keys_turned = option == ATTEND_TURNED && (c->keys == TQKV_F16 || reference_can_be_unrotated(c->keys));
    row.values_turned = option == ATTEND_TURNED && (c->values == TQKV_F16 || reference_can_be_unrotated(c->values));
    return row;
}

/* The same attention over pages in another order. */
static inline bool attend_golden_in_pages(attend_problem *p)
{
    enum { PAGE = 64 };
    tqkv_store pools[2];
    int32_t pages[2][8];
    data_random random = {1};
    tqkv_attention a = p->attention;
    for (int i = 0; i < 2; i++) pools[i] = attend_paged(&a, i ? a.values : a.keys, 0, &random, PAGE, pages[i]);
    a.keys = &pools[0];
    a.values = &pools[1];
    const bool ok = tqkv_attend(&a, p->q, p->out) == TQKV_OK;
    test_store_free(&pools[0]);
    test_store_free(&pools[1]);
    return ok;
}

/* The scores of an index, with the queries of the attention. */
static inline bool attend_golden_score(const attend_problem *p, float *scores, size_t *n)
{
    static const float weights[12] = {0.3f, -1.0f, 2.0f, 0.01f, 1.0f, 0.7f, -0.2f, 5.0f, 0.0f, 1.5f, -3.0f, 0.9f};
    tqkv_index x;
    memset(&x, 0, sizeof x);
    x.keys = &p->keys;
    x.n_heads = p->attention.n_heads;
    x.n_queries = p->attention.n_queries;
    x.end = p->attention.end;
    x.weights = weights;
    x.relu = p->head_dim != 64;
    x.block = p->head_dim == 128 ? 1 : 4;
    x.pool = p->head_dim == 80 ? TQKV_POOL_MAX : TQKV_POOL_MEAN;
    *n = (size_t)x.n_queries * (size_t)((x.end + x.block - 1) / x.block);
    return tqkv_index_scores(&x, p->q, scores) == TQKV_OK;
}

/* bfloat16 queries, the upper halves of the floats, and outputs that are halves. */
static inline bool attend_golden_narrow(const attend_problem *p)
{
    tqkv_attention a = p->attention;
    uint8_t *bytes = (uint8_t *)p->out;
    uint16_t *q = (uint16_t *)(void *)p->q;
    for (size_t i = 0; i < p->n_rows * p->head_dim; i++) {
        uint32_t bits;
        memcpy(&bits, &p->q[i], sizeof bits);
        q[i] = (uint16_t)(bits >> 16);
    }
    a.query_type = TQKV_TYPE_BF16;
    a.output_type = TQKV_TYPE_F16;
    const bool ok = tqkv_attend(&a, q, p->out) == TQKV_OK;
    for (size_t i = 0; i < p->n_rows * p->value_dim; i++) {
        uint16_t half;
        memcpy(&half, bytes + 2 * i, sizeof half);
        bytes[2 * i] = (uint8_t)half;
        bytes[2 * i + 1] = (uint8_t)(half >> 8);
    }
    return ok;
}

/* Attends; the upper half of XXH3-64 of the output, as little-endian bytes. 0 on failure. */
static inline int attend_golden_make(const attend_golden_case *c, uint32_t *word)
{
    enum { MOST_SCORES = 3 * 133 };
    const attend_row row = attend_golden_row(c);
    attend_problem p;
    data_random random = {2};
    float scores[MOST_SCORES];
    bool ok = true;
    attend_set_up(&p, &row);
    const float *out = c->option == ATTEND_INDEX ? scores : p.out;
    size_t n = p.n_rows * p.value_dim, size = c->option == ATTEND_BFLOAT16 ? 2 : sizeof(float);
    if (c->option == ATTEND_SLICED)
        attend_by_slices(&p, &random, p.out);
    else
        ok = c->option == ATTEND_INDEX      ? attend_golden_score(&p, scores, &n)
             : c->option == ATTEND_PAGES    ? attend_golden_in_pages(&p)
             : c->option == ATTEND_BFLOAT16 ? attend_golden_narrow(&p)
                                            : tqkv_attend(&p.attention, p.q, p.out) == TQKV_OK;
    if (size == sizeof(float)) data_to_little_endian((void *)(uintptr_t)out, n);
    *word = golden_word(XXH3_64bits(out, n * size));
    attend_tear_down(&p);
    return ok;
}

#endif
