/* The golden cases: the rows, how they are encoded, and the hashes of codes and norms. */
#ifndef TQKV_TESTS_GOLDEN_H
#define TQKV_TESTS_GOLDEN_H

#include "data.h"
#include "shape.h"
#include "tqkv.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GOLDEN_TOKENS = 7, GOLDEN_HEADS = 2, GOLDEN_CAPACITY = 9, GOLDEN_POSITION = 1, GOLDEN_NAME_SIZE = 64 };

typedef enum golden_option {
    GOLDEN_PLAIN,
    GOLDEN_UNROTATED,
    GOLDEN_BLOCK_SCALE,
    GOLDEN_CENTER,
    GOLDEN_ROTATED, /* F16 */
    GOLDEN_SCALE,   /* with a centre, too */
    GOLDEN_OPTIONS
} golden_option;

/* A case has all kinds of rows that golden_has allows. */
typedef struct golden_case {
    int format, head_dim, option;
} golden_case;

/* A few kinds of rows are enough for sizes that are no power of two: the steps after the rotation are the same. */
static inline int golden_has(const golden_case *c, int kind)
{
    int codebook = c->format != TQKV_F16 && c->format != TQKV_I8;
    int power = (c->head_dim & (c->head_dim - 1)) == 0;
    if (test_row_bytes((tqkv_format)c->format, c->head_dim) == 0) return 0; /* no head_dim */
    if (!power && kind != DATA_EXTREMES && (kind != DATA_OUTLIERS || c->option != GOLDEN_PLAIN)) return 0;
    if (c->option == GOLDEN_UNROTATED)
        return codebook && c->format != TQKV_TQ4 && c->format != TQKV_TQ3 && c->format != TQKV_TQ2;
    if (c->option == GOLDEN_BLOCK_SCALE) return codebook && power && c->head_dim >= 512;
    if ((c->option == GOLDEN_CENTER || c->option == GOLDEN_SCALE) && c->head_dim == 80) return 1;
    if (c->option == GOLDEN_ROTATED) return c->format == TQKV_F16 && kind <= DATA_OUTLIERS;
    if (c->option == GOLDEN_CENTER) return (c->head_dim == 64 || c->head_dim == 512) && kind <= DATA_OUTLIERS;
    if (c->option == GOLDEN_SCALE) return c->head_dim <= 128 || c->head_dim == 512 ? kind <= DATA_OUTLIERS : 0;
    return 1;
}

/* The centre of the cases that have one; center: [GOLDEN_HEADS][head_dim] */
static inline void golden_center(const golden_case *c, float *center)
{
    data_rows(77, DATA_GAUSSIAN, center, GOLDEN_HEADS, c->head_dim);
}

/* The scale of the cases that have one: from 2^-7 to 2^8, no powers of two; scale: as center */
static inline void golden_scale(const golden_case *c, float *scale)
{
    data_random random = {(uint64_t)(99 + c->head_dim)};
    for (int i = 0; i < GOLDEN_HEADS * c->head_dim; i++)
        scale[i] = (float)(1 << data_below(&random, 15)) * (1.0f + (float)data_below(&random, 1024) / 1024.0f) / 128.0f;
}

/* Sets *found to case number `index`. 0 past the last. */
static inline int golden_find(int index, golden_case *found)
{
    for (int option = 0; option < GOLDEN_OPTIONS; option++)
        for (int format = TQKV_F16; format <= TQKV_TQ2; format++)
            for (int head_dim = 32; head_dim <= 1024; head_dim += 16) {
                const golden_case c = {format, head_dim, option};
                if (!golden_has(&c, DATA_OUTLIERS) && !golden_has(&c, DATA_EXTREMES)) continue;
                *found = c;
                if (index-- == 0) return 1;
            }
    return 0;
}

static inline const char *golden_option_name(int option)
{
    static const char *const names[GOLDEN_OPTIONS] = {"plain",  "unrotated", "block_scale",
                                                      "center", "rotated",   "scale"};
    return names[option];
}

static inline void golden_name(const golden_case *c, char name[GOLDEN_NAME_SIZE])
{
    snprintf(name, GOLDEN_NAME_SIZE, "%s/%d/%s", tqkv_format_name((tqkv_format)c->format), c->head_dim,
             golden_option_name(c->option));
}

static inline tqkv_store golden_store(const golden_case *c)
{
    tqkv_store store;
    memset(&store, 0, sizeof store);
    store.format = (tqkv_format)c->format;
    store.head_dim = c->head_dim;
    store.n_kv_heads = GOLDEN_HEADS;
    store.capacity = GOLDEN_CAPACITY;
    store.rotation = c->option == GOLDEN_UNROTATED ? TQKV_ROTATION_OFF
                     : c->option == GOLDEN_ROTATED ? TQKV_ROTATION_ON
                                                   : TQKV_ROTATION_DEFAULT;
    store.block_scale = c->option == GOLDEN_BLOCK_SCALE ? 0.8125f : 0.0f;
    store.codes_size = tqkv_codes_size(&store);
    store.norms_size = tqkv_norms_size(&store);
    return store;
}

/* The hash of a store's codes and norms, with that of what came before. */
static inline uint64_t golden_hash(const tqkv_store *s, uint64_t before)
{
    data_to_little_endian(s->norms, s->norms_size / sizeof(float));
    return XXH3_64bits_withSeed(s->norms, s->norms_size, XXH3_64bits_withSeed(s->codes, s->codes_size, before));
}

/* What goldens.h keeps of it. */
static inline uint32_t golden_word(uint64_t hash) { return (uint32_t)(hash >> 32); }

/* Encodes the rows of each kind into a store filled with 0xa5 and hashes the whole store. 0 on failure. */
static inline int golden_make(const golden_case *c, uint32_t *word)
{
    tqkv_store store = golden_store(c);
    uint64_t hash = 0;
    float center[GOLDEN_HEADS * TQKV_MAX_HEAD_DIM], scale[GOLDEN_HEADS * TQKV_MAX_HEAD_DIM];
    float *source = (float *)malloc(sizeof(float) * GOLDEN_TOKENS * GOLDEN_HEADS * (size_t)c->head_dim);
    store.codes = malloc(store.codes_size + 1);
    store.norms = (float *)malloc(store.norms_size + 1);
    int ok = source && store.codes && store.norms;
    golden_center(c, center);
    golden_scale(c, scale);
    if (c->option == GOLDEN_CENTER || c->option == GOLDEN_SCALE) store.center = center;
    if (c->option == GOLDEN_SCALE) store.channel_scale = scale;
    for (int kind = 0; ok && kind < DATA_KINDS; kind++) {
        if (!golden_has(c, kind)) continue;
        memset(store.codes, 0xa5, store.codes_size);
        memset(store.norms, 0xa5, store.norms_size);
        data_rows((uint64_t)c->head_dim, (data_kind)kind, source, GOLDEN_TOKENS * GOLDEN_HEADS, c->head_dim);
        ok = tqkv_encode(&store, source, GOLDEN_TOKENS, GOLDEN_POSITION) == TQKV_OK;
        hash = golden_hash(&store, hash);
    }
    *word = golden_word(hash);
    free(source);
    free(store.codes);
    free(store.norms);
    return ok;
}

/* ---- Conversions, from each format to each other one ---- */

typedef struct golden_pair {
    tqkv_format from, to;
    int head_dim;
} golden_pair;

/* Sets *found to pair number `index`. 0 past the last. The _BYTES formats have the codes of TQ5 and TQ6. */
static inline int golden_pair_find(int index, golden_pair *found)
{
    static const tqkv_format formats[8] = {TQKV_F16, TQKV_TQ4, TQKV_TQ5, TQKV_TQ6,
                                           TQKV_TQ8, TQKV_I8,  TQKV_TQ3, TQKV_TQ2};
    if (index >= 2 * 8 * 7) return 0;
    found->head_dim = index < 8 * 7 ? 80 : 512;
    found->from = formats[index % (8 * 7) / 7];
    found->to = formats[(index % (8 * 7) / 7 + 1 + index % 7) % 8];
    return 1;
}

static inline void golden_pair_name(const golden_pair *p, char name[GOLDEN_NAME_SIZE])
{
    snprintf(name, GOLDEN_NAME_SIZE, "%s-%s/%d/converted", tqkv_format_name(p->from), tqkv_format_name(p->to),
             p->head_dim);
}

/* Encodes rows, converts them and hashes what they became. 0 on failure. */
static inline int golden_pair_make(const golden_pair *p, uint32_t *word)
{
    static uint8_t codes[2][GOLDEN_CAPACITY * GOLDEN_HEADS * 1024];
    static float norms[2][GOLDEN_CAPACITY * GOLDEN_HEADS * 4], source[GOLDEN_TOKENS * GOLDEN_HEADS * 512];
    tqkv_store stores[2];
    for (int i = 0; i < 2; i++) {
        const golden_case shape = {i ? (int)p->to : (int)p->from, p->head_dim, GOLDEN_PLAIN};
        stores[i] = golden_store(&shape);
        stores[i].codes = codes[i];
        stores[i].norms = norms[i];
    }
    memset(codes[1], 0xa5, sizeof codes[1]);
    memset(norms[1], 0xa5, sizeof norms[1]);
    data_rows((uint64_t)p->head_dim, DATA_STUDENT, source, GOLDEN_TOKENS * GOLDEN_HEADS, p->head_dim);
    if (tqkv_encode(&stores[0], source, GOLDEN_TOKENS, GOLDEN_POSITION) != TQKV_OK) return 0;
    if (tqkv_store_convert(&stores[1], &stores[0], GOLDEN_POSITION, GOLDEN_TOKENS) != TQKV_OK) return 0;
    *word = golden_word(golden_hash(&stores[1], 0));
    return 1;
}

#endif
