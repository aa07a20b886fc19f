/* Attentions at random, from a seed: those of the tests of the shaders and of tqkv_metal.m. */
#ifndef TQKV_TESTS_METAL_RANDOM_ATTEND_H
#define TQKV_TESTS_METAL_RANDOM_ATTEND_H
#include "../attend_fixture.h"

/* Keys of 448 and 512 that are the values, most often, and have a tail. */
static inline void random_latent(attend_row *p, data_random *random)
{
    p->shared = data_below(random, 4) != 0;
    p->block_scale = p->head_dim == 512 && data_below(random, 6) == 0 ? 1.25f : 0.0f;
    if (data_below(random, 4) == 0) return;
    p->tail_dim = 64;
    p->tail_format = test_formats[data_below(random, TEST_FORMATS)];
    p->tail_center = data_below(random, 3) ? 0.0f : 3.0f;
    p->tail_spread = data_below(random, 3) ? 0.0f : 6.0f;
}

/* What decides the kernels. Successive seeds go through all pairs of formats, and each with every head_dim. */
static inline attend_row random_kernel(int seed, int head_dim, data_random *random)
{
    static const int groups[] = {2, 1, 3, 8, 5, 4, 9, 2, 16};
    attend_row p = attend_default_row(test_formats[seed % TEST_FORMATS],
                                      test_formats[seed / TEST_FORMATS % TEST_FORMATS], head_dim);
    p.group = groups[data_below(random, 9)];
    p.value_dim = head_dim == 192 && data_below(random, 2) ? 128 : 0;
    p.block_scale = head_dim >= 512 && data_below(random, 2) ? 1.25f : 0.0f;
    p.keys_turned = data_below(random, 4) == 0 && reference_can_be_unrotated(p.key_format);
    p.values_turned = data_below(random, 4) == 0 && reference_can_be_unrotated(p.value_format);
    p.softcap = data_below(random, 4) ? 0.0f : 4.0f;
    p.query_size = data_below(random, 4) ? 1.5f : 10.0f; /* the bound holds to that size of scores */
    p.sinks = data_below(random, 2) ? SINKS_NONE : (attend_sinks)(1 + data_below(random, 3));
    p.query_basis = data_below(random, 3) ? TQKV_ORIGINAL : TQKV_ROTATED;
    p.output_basis = data_below(random, 3) ? TQKV_ORIGINAL : TQKV_ROTATED;
    const bool shifts = p.softcap > 0.0f || p.sinks; /* then scores have the centre's part, and its rounding */
    p.key_center = data_below(random, 3) ? 0.0f : shifts || data_below(random, 4) ? 0.5f : 1000.0f;
    p.value_center = data_below(random, 3) ? 0.0f : data_below(random, 4) ? 4.0f : 1000.0f;
    p.key_spread = data_below(random, 3) ? 0.0f : 10.0f;
    p.value_spread = data_below(random, 3) ? 0.0f : 10.0f;
    if (head_dim == 448 || head_dim == 512) random_latent(&p, random);
    return p;
}

/* Stores of up to `most` positions, and which of them there are. */
static inline void random_positions(attend_row *p, int most, data_random *random)
{
    p->key_ring = p->value_ring = data_below(random, 2) != 0;
    p->key_capacity = 1 + data_below(random, most);
    p->value_capacity = p->shared || data_below(random, 3) ? p->key_capacity : 1 + data_below(random, most);
    const int capacity = p->key_capacity < p->value_capacity ? p->key_capacity : p->value_capacity;
    p->end = 1 + data_below(random, p->key_ring ? 3 * most : capacity);
    if (p->key_ring && data_below(random, 8) == 0) p->end = INT64_MAX - data_below(random, 2);
    if (data_below(random, 16) == 0) p->end = data_below(random, 2);
    const int resident = p->end < capacity ? (int)p->end : capacity;
    p->kv_len = data_below(random, 3) || !resident ? 0 : 1 + data_below(random, resident);
    p->window = data_below(random, 2) ? 0 : 1 + data_below(random, most);
}

/* A list of blocks, or halves of first and newest positions, or both. */
static inline void random_parts(attend_row *p, int most, data_random *random)
{
    const int parts = data_below(random, 8), blocks[] = {1, 4, 16, 64, 128};
    if (parts < 2 && p->end < INT32_MAX && p->key_format != TQKV_F16) { /* halves begin with position 0 */
        p->value_capacity = p->key_capacity;
        p->value_ring = p->key_ring;
        p->exact_first = data_below(random, 3) ? data_below(random, 1 + most / 4) : 0;
        p->exact_last = data_below(random, 4) ? 1 + data_below(random, most / 2) : 0;
        p->exact_held = p->exact_last % 4 == 3 ? p->exact_last / 2 : 0;
        p->codes_of_ends = !p->shared && data_below(random, 4) == 0 ? 1 + data_below(random, 2) : 0;
    }
    if (parts != 1 && parts != 2) return;
    p->list_block = blocks[data_below(random, 5)];
    p->list_share = 0.6f;
    p->list_newest = data_below(random, 2) ? data_below(random, 60) : 0;
    p->list_by_head = data_below(random, 2) != 0;
}

/* What the calls of a batch may differ in. */
static inline void random_context(attend_row *p, int most, data_random *random)
{
    random_positions(p, most, random);
    p->n_queries = data_below(random, 2) ? 1 : 1 + data_below(random, data_below(random, 6) ? 12 : 64);
    p->scale = data_below(random, 4) ? 0.0f : 0.05f;
    p->tree = p->n_queries > 1 && data_below(random, 3) == 0;
    p->non_causal = !p->tree && data_below(random, 4) == 0;
    random_parts(p, most, random);
}

/* NaN where only some of the queries see it: in no list, and in codes alone. */
static inline void random_poison(attend_row *p, data_random *random)
{
    const bool plain = p->n_queries > 1 && !p->list_block && !p->exact_first && !p->exact_last && !p->kv_len &&
                       !p->non_causal && p->end > 2 * p->n_queries && p->end < 1 << 20;
    const int capacity = p->key_capacity < p->value_capacity ? p->key_capacity : p->value_capacity;
    if (!plain || data_below(random, 2)) return;
    if (p->tree) {
        p->poison = POISON_BRANCH;
    } else if (p->window && p->window + p->n_queries < capacity && p->end > p->window + p->n_queries) {
        p->poison = POISON_OLDEST;
    } else if (!p->window && p->n_queries < capacity) {
        p->poison = POISON_NEWEST;
    }
}

static inline attend_row random_attend(int seed, int head_dim, int most)
{
    data_random random = {(uint64_t)seed * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t)head_dim};
    attend_row p = random_kernel(seed, head_dim, &random);
    p.n_kv_heads = 1 + data_below(&random, 3);
    random_context(&p, most, &random);
    random_poison(&p, &random);
    return p;
}

#endif
