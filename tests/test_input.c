/* Bad input: every call with every bad argument gives its result code and changes nothing. */
#include "counting.h"
#include "data.h"
#include "runner.h"

#include <limits.h>
#include <math.h>

enum { D = 64, HEADS = 2, N_HEADS = 4, CAPACITY = 8, TOKENS = 3, QUERIES = 2, ROWS = QUERIES * N_HEADS, SPARE = 16 };

/* All memory that the calls see, in one block, so that one comparison shows any change. */
typedef struct memory {
    unsigned char key_codes[2 * HEADS * CAPACITY * D], value_codes[2 * HEADS * CAPACITY * D];
    float key_norms[HEADS * CAPACITY * 8], value_norms[HEADS * CAPACITY * 8];
    float src[TOKENS * HEADS * D], src2[TOKENS * HEADS * D], q[ROWS * D], sinks[N_HEADS];
    float out[ROWS * D + SPARE], max[ROWS], sum[ROWS], other_out[ROWS * D], other_max[ROWS], other_sum[ROWS];
} memory;

/* The arguments of all calls, good until one of them is broken. */
typedef struct world {
    memory *m;
    tqkv_store keys, values;
    const tqkv_store *store;
    tqkv_attention attention;
    const tqkv_attention *a;
    tqkv_cache_desc desc;
    const tqkv_cache_desc *d;
    tqkv_cache *cache, *made;
    tqkv_cache **result; /* where create and load put the cache */
    float *src, *src2, *q, *out, *max, *sum;
    const float *other_out, *other_max, *other_sum;
    int n_tokens, n_positions, n_rows, head_dim, count, n_queries;
    int64_t position, first, end;
    tqkv_basis basis;
    counting counter;
    stream snapshot;
    tqkv_read read;
    tqkv_write write;
} world;

typedef struct input_row {
    const char *call_name, *what;
    tqkv_result (*call)(world *w);
    void (*change)(world *w);
    tqkv_result expected;
} input_row;

/* ---- A good world ---- */

static tqkv_store make_store(tqkv_format format, void *codes, float *norms)
{
    tqkv_store s;
    memset(&s, 0, sizeof s);
    s.format = format;
    s.head_dim = D;
    s.n_kv_heads = HEADS;
    s.capacity = CAPACITY;
    s.codes = codes;
    s.codes_size = tqkv_codes_size(&s);
    s.norms = norms;
    s.norms_size = tqkv_norms_size(&s);
    return s;
}

static void make_attention(world *w)
{
    w->attention.keys = &w->keys;
    w->attention.values = &w->values;
    w->attention.n_heads = N_HEADS;
    w->attention.n_queries = QUERIES;
    w->attention.end = 5;
    w->attention.sinks = w->m->sinks;
    w->attention.allocator = counting_allocator(&w->counter);
    w->a = &w->attention;
}

static void make_cache(world *w)
{
    w->desc.head_dim = D;
    w->desc.n_kv_heads = HEADS;
    w->desc.n_heads = N_HEADS;
    w->desc.capacity = CAPACITY;
    w->desc.sinks = w->m->sinks;
    w->desc.allocator = counting_allocator(&w->counter);
    w->d = &w->desc;
    CHECK_RESULT(tqkv_cache_create(&w->desc, &w->cache), TQKV_OK);
    CHECK_RESULT(tqkv_cache_append(w->cache, w->src, w->src2, TOKENS), TQKV_OK);
    w->snapshot = stream_of_cache(w->cache);
    w->result = &w->made;
    w->read = stream_read;
    w->write = stream_write;
}

static void fill_memory(memory *m)
{
    memset(m, 0xff, sizeof *m);
    data_rows(1, DATA_GAUSSIAN, m->src, TOKENS * HEADS, D);
    data_rows(2, DATA_GAUSSIAN, m->src2, TOKENS * HEADS, D);
    data_rows(3, DATA_GAUSSIAN, m->q, ROWS, D);
    data_rows(4, DATA_GAUSSIAN, m->other_out, ROWS, D);
    for (int i = 0; i < ROWS; i++) {
        m->max[i] = m->other_max[i] = 0.5f;
        m->sum[i] = m->other_sum[i] = 2.0f;
    }
    for (int i = 0; i < N_HEADS; i++) m->sinks[i] = 0.25f;
}

static void make_world(world *w, memory *m)
{
    memset(w, 0, sizeof *w);
    fill_memory(m);
    w->m = m;
    w->keys = make_store(TQKV_TQ8, m->key_codes, m->key_norms);
    w->values = make_store(TQKV_TQ5, m->value_codes, m->value_norms);
    w->store = &w->keys;
    w->src = m->src;
    w->src2 = m->src2;
    w->q = m->q;
    w->out = m->out;
    w->max = m->max;
    w->sum = m->sum;
    w->other_out = m->other_out;
    w->other_max = m->other_max;
    w->other_sum = m->other_sum;
    w->n_tokens = w->n_positions = w->n_rows = TOKENS;
    w->head_dim = D;
    w->n_queries = QUERIES;
    w->first = 1;
    w->count = 3;
    w->position = 2;
    w->end = 2;
    CHECK_RESULT(tqkv_encode(&w->keys, m->src, TOKENS, 0), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&w->keys, m->src2, TOKENS, 3), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&w->values, m->src, TOKENS, 0), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&w->values, m->src2, TOKENS, 3), TQKV_OK);
    make_attention(w);
    make_cache(w);
}

/* ---- The calls ---- */

static tqkv_result encode(world *w) { return tqkv_encode(w->store, w->src, w->n_tokens, w->position); }
static tqkv_result probe(world *w) { return tqkv_probe(w->store, w->src, w->n_tokens, w->out); }
static tqkv_result decode(world *w) { return tqkv_decode(w->store, w->position, w->n_positions, w->basis, w->out); }
static tqkv_result rotate(world *w) { return tqkv_rotate(w->src, w->n_rows, w->head_dim); }
static tqkv_result unrotate(world *w) { return tqkv_unrotate(w->src, w->n_rows, w->head_dim); }
static tqkv_result attend(world *w) { return tqkv_attend(w->a, w->q, w->out); }
static tqkv_result partial(world *w)
{
    return tqkv_attend_partial(w->a, w->q, w->first, w->count, w->out, w->max, w->sum);
}
static tqkv_result merge(world *w)
{
    return tqkv_attend_merge(w->a, w->out, w->max, w->sum, w->other_out, w->other_max, w->other_sum);
}
static tqkv_result finish(world *w) { return tqkv_attend_finish(w->a, w->out, w->max, w->sum); }
static tqkv_result create(world *w) { return tqkv_cache_create(w->d, w->result); }
static tqkv_result append(world *w) { return tqkv_cache_append(w->cache, w->src, w->src2, w->n_tokens); }
static tqkv_result cache_attend(world *w) { return tqkv_cache_attend(w->cache, w->q, w->n_queries, w->out); }
static tqkv_result cut_back(world *w) { return tqkv_cache_truncate(w->cache, w->end); }
static tqkv_result save(world *w)
{
    stream s = stream_empty();
    tqkv_result result = tqkv_cache_save(w->cache, w->write, &s);
    CHECK(result == TQKV_OK || s.calls == 0, "a refused save has written");
    stream_free(&s);
    return result;
}
static tqkv_result load(world *w) { return tqkv_cache_load(w->d, w->read, &w->snapshot, w->result); }

/* ---- What is broken ---- */

#define CHANGE(name, statement)                                                                                        \
    static void name(world *w) { statement; }

CHANGE(good, (void)w)
/* stores */
CHANGE(null_store, w->store = NULL)
CHANGE(default_format, w->keys.format = TQKV_FORMAT_DEFAULT)
CHANGE(unknown_format, w->keys.format = test_no_format(9))
CHANGE(zero_head_dim, w->keys.head_dim = 0)
CHANGE(odd_head_dim, w->keys.head_dim = 96)
CHANGE(small_head_dim, w->keys.head_dim = 16)
CHANGE(large_head_dim, w->keys.head_dim = 2048)
CHANGE(negative_head_dim, w->keys.head_dim = -64)
CHANGE(zero_kv_heads, w->keys.n_kv_heads = 0)
CHANGE(negative_kv_heads, w->keys.n_kv_heads = -1)
CHANGE(zero_capacity, w->keys.capacity = 0)
CHANGE(negative_capacity, w->keys.capacity = -8)
CHANGE(huge_capacity, w->keys.capacity = INT_MAX)
CHANGE(huge_store, w->keys.capacity = w->keys.n_kv_heads = INT_MAX)
CHANGE(null_codes, w->keys.codes = NULL)
CHANGE(null_norms, w->keys.norms = NULL)
CHANGE(small_codes, w->keys.codes_size--)
CHANGE(small_norms, w->keys.norms_size--)
CHANGE(no_codes_size, w->keys.codes_size = 0)
CHANGE(overlapping_store, w->keys.norms = (float *)(void *)w->m->key_codes)
CHANGE(misaligned_norms, w->keys.norms = (float *)((uintptr_t)w->m->key_norms + 1); w->keys.norms_size = 1000)
CHANGE(unrotated_tq4, w->keys.format = TQKV_TQ4; w->keys.unrotated = true)
CHANGE(unrotated_i8, w->keys.format = TQKV_I8; w->keys.unrotated = true)
CHANGE(unrotated_f16, w->keys.format = TQKV_F16; w->keys.unrotated = true; w->keys.codes_size *= 2)
CHANGE(negative_block_scale, w->keys.block_scale = -1.0f)
CHANGE(nan_block_scale, w->keys.block_scale = (float)NAN)
CHANGE(infinite_block_scale, w->keys.block_scale = (float)INFINITY)
/* sources and positions */
CHANGE(null_src, w->src = NULL)
CHANGE(null_src2, w->src2 = NULL)
CHANGE(negative_tokens, w->n_tokens = -1)
CHANGE(most_negative_tokens, w->n_tokens = INT_MIN)
CHANGE(negative_position, w->position = -1)
CHANGE(position_beyond, w->position = CAPACITY)
CHANGE(run_beyond, w->position = CAPACITY - TOKENS + 1)
CHANGE(last_position, w->position = INT64_MAX)
CHANGE(last_position_on_ring, w->position = INT64_MAX - 1; w->keys.ring = true)
CHANGE(negative_position_on_ring, w->position = -1; w->keys.ring = true)
CHANGE(first_is_nan, w->m->src[0] = (float)NAN)
CHANGE(last_is_nan, w->m->src[TOKENS * HEADS * D - 1] = (float)NAN)
CHANGE(last_is_infinite, w->m->src[TOKENS * HEADS * D - 1] = (float)INFINITY)
CHANGE(first_is_minus_infinite, w->m->src[0] = -(float)INFINITY)
CHANGE(last_of_src2_is_nan, w->m->src2[TOKENS * HEADS * D - 1] = (float)NAN)
CHANGE(nan_that_a_ring_drops, w->m->src[0] = (float)NAN; w->keys.ring = true; w->keys.capacity = 1)
CHANGE(src_in_codes, w->src = (float *)(void *)w->m->key_codes)
CHANGE(src_in_norms, w->src = w->m->key_norms + 1)
CHANGE(src_is_out, w->src = w->m->out + SPARE)
CHANGE(null_out, w->out = NULL)
CHANGE(out_in_codes, w->out = (float *)(void *)(w->m->key_codes + sizeof w->m->key_codes / 4))
CHANGE(out_in_norms, w->out = w->m->key_norms)
CHANGE(negative_positions, w->n_positions = -1)
CHANGE(more_than_the_ring, w->n_positions = CAPACITY + 1; w->keys.ring = true)
CHANGE(unknown_basis, w->basis = test_no_basis(2))
CHANGE(negative_rows, w->n_rows = -1)
CHANGE(zero_rotate_dim, w->head_dim = 0)
CHANGE(odd_rotate_dim, w->head_dim = 65)
CHANGE(large_rotate_dim, w->head_dim = 2048)
/* attention */
CHANGE(null_attention, w->a = NULL)
CHANGE(null_keys, w->attention.keys = NULL)
CHANGE(null_values, w->attention.values = NULL)
CHANGE(null_q, w->q = NULL)
CHANGE(null_max, w->max = NULL)
CHANGE(null_sum, w->sum = NULL)
CHANGE(null_other_out, w->other_out = NULL)
CHANGE(null_other_max, w->other_max = NULL)
CHANGE(null_other_sum, w->other_sum = NULL)
CHANGE(values_head_dim, w->values.head_dim = 32)
CHANGE(values_kv_heads, w->values.n_kv_heads = 1)
CHANGE(values_format, w->values.format = TQKV_FORMAT_DEFAULT)
CHANGE(values_codes, w->values.codes = NULL)
CHANGE(no_multiple, w->attention.n_heads = 3)
CHANGE(fewer_heads, w->attention.n_heads = 1)
CHANGE(negative_heads, w->attention.n_heads = -2)
CHANGE(negative_queries, w->attention.n_queries = -1)
CHANGE(negative_end, w->attention.end = -1)
CHANGE(negative_kv_len, w->attention.kv_len = -1)
CHANGE(negative_window, w->attention.window = -1)
CHANGE(kv_len_beyond_end, w->attention.kv_len = 6)
CHANGE(kv_len_beyond_ring, w->keys.ring = w->values.ring = true; w->attention.end = 20; w->attention.kv_len = 9)
CHANGE(end_beyond_linear, w->attention.end = CAPACITY + 1)
CHANGE(end_beyond_values, w->keys.ring = true; w->attention.end = CAPACITY + 1)
CHANGE(huge_end, w->attention.end = INT64_MAX)
CHANGE(nan_scale, w->attention.scale = (float)NAN)
CHANGE(infinite_scale, w->attention.scale = (float)INFINITY)
CHANGE(nan_softcap, w->attention.softcap = (float)NAN)
CHANGE(negative_softcap, w->attention.softcap = -1.0f) /* off, as 0 */
CHANGE(infinite_softcap, w->attention.softcap = (float)INFINITY)
CHANGE(nan_sink, w->m->sinks[N_HEADS - 1] = (float)NAN)
CHANGE(infinite_sink, w->m->sinks[N_HEADS - 1] = (float)INFINITY)
CHANGE(nan_q, w->m->q[ROWS * D - 1] = (float)NAN)
CHANGE(infinite_q, w->m->q[0] = -(float)INFINITY)
CHANGE(query_basis, w->attention.query_basis = test_no_basis(5))
CHANGE(output_basis, w->attention.output_basis = test_no_basis(-1))
CHANGE(alloc_alone, w->attention.allocator.free = NULL)
CHANGE(free_alone, w->attention.allocator.alloc = NULL)
CHANGE(out_is_q, w->out = w->m->q)
CHANGE(out_touches_q, w->q = w->m->out + SPARE)
CHANGE(max_is_sum, w->max = w->sum)
CHANGE(max_in_out, w->max = w->m->out + 1)
CHANGE(sum_in_q, w->sum = w->m->q)
CHANGE(sum_in_codes, w->sum = (float *)(void *)w->m->key_codes)
CHANGE(first_before, w->attention.kv_len = 3; w->first = 1)
CHANGE(first_negative, w->first = -1)
CHANGE(first_beyond, w->first = 6; w->count = 0)
CHANGE(slice_beyond, w->count = 5)
CHANGE(huge_count, w->count = INT_MAX)
CHANGE(negative_count, w->count = -1)
CHANGE(merge_with_itself, w->other_out = w->out)
CHANGE(merge_max_with_itself, w->other_max = w->max)
CHANGE(merge_sum_with_itself, w->other_sum = w->sum)
CHANGE(other_max_in_out, w->other_max = w->m->out)
CHANGE(huge_queries, w->attention.n_queries = INT_MAX; w->attention.n_heads = INT_MAX - 1)
/* cache */
CHANGE(null_desc, w->d = NULL)
CHANGE(null_result, w->result = NULL)
CHANGE(null_cache, tqkv_cache_destroy(w->cache); w->cache = NULL)
CHANGE(desc_head_dim, w->desc.head_dim = 100)
CHANGE(desc_zero_head_dim, w->desc.head_dim = 0)
CHANGE(desc_kv_heads, w->desc.n_kv_heads = 0)
CHANGE(desc_negative_kv_heads, w->desc.n_kv_heads = -2)
CHANGE(desc_heads, w->desc.n_heads = 3)
CHANGE(desc_negative_heads, w->desc.n_heads = -2)
CHANGE(desc_capacity, w->desc.capacity = 0)
CHANGE(desc_negative_capacity, w->desc.capacity = INT_MIN)
CHANGE(desc_overflow, w->desc.capacity = INT_MAX; w->desc.n_kv_heads = w->desc.n_heads = INT_MAX)
CHANGE(desc_key_format, w->desc.key_format = test_no_format(9))
CHANGE(desc_value_format, w->desc.value_format = test_no_format(-1))
CHANGE(desc_window, w->desc.window = -1)
CHANGE(desc_scale, w->desc.scale = (float)NAN)
CHANGE(desc_softcap, w->desc.softcap = (float)NAN)
CHANGE(desc_sinks, w->m->sinks[0] = (float)NAN)
CHANGE(desc_alloc_alone, w->desc.allocator.free = NULL)
CHANGE(append_too_many, w->n_tokens = CAPACITY + 1)
CHANGE(negative_cache_queries, w->n_queries = -1)
CHANGE(truncate_negative, w->end = -1)
CHANGE(truncate_beyond, w->end = 4)
CHANGE(truncate_far, w->end = INT64_MAX)
CHANGE(null_read, w->read = NULL)
CHANGE(null_write, w->write = NULL)
CHANGE(foreign_bytes, memset(w->snapshot.bytes, 'x', w->snapshot.size))
CHANGE(no_bytes, w->snapshot.size = 0)

/* ---- The table ---- */

#define ROW(call, change, expected)                                                                                    \
    {                                                                                                                  \
#call, #change, call, change, expected                                                                         \
    }
#define STORE_ROWS(call)                                                                                               \
    ROW(call, default_format, TQKV_UNSUPPORTED), ROW(call, unknown_format, TQKV_UNSUPPORTED),                          \
        ROW(call, zero_head_dim, TQKV_UNSUPPORTED), ROW(call, odd_head_dim, TQKV_UNSUPPORTED),                         \
        ROW(call, small_head_dim, TQKV_UNSUPPORTED), ROW(call, large_head_dim, TQKV_UNSUPPORTED),                      \
        ROW(call, negative_head_dim, TQKV_UNSUPPORTED), ROW(call, zero_kv_heads, TQKV_INVALID_ARGUMENT),               \
        ROW(call, negative_kv_heads, TQKV_INVALID_ARGUMENT), ROW(call, zero_capacity, TQKV_INVALID_ARGUMENT),          \
        ROW(call, negative_capacity, TQKV_INVALID_ARGUMENT), ROW(call, huge_store, TQKV_INVALID_ARGUMENT),             \
        ROW(call, unrotated_tq4, TQKV_UNSUPPORTED), ROW(call, unrotated_i8, TQKV_UNSUPPORTED),                         \
        ROW(call, unrotated_f16, TQKV_UNSUPPORTED), ROW(call, negative_block_scale, TQKV_INVALID_ARGUMENT),            \
        ROW(call, nan_block_scale, TQKV_INVALID_ARGUMENT), ROW(call, infinite_block_scale, TQKV_INVALID_ARGUMENT)
#define BUFFER_ROWS(call)                                                                                              \
    ROW(call, huge_capacity, TQKV_INVALID_ARGUMENT), ROW(call, null_codes, TQKV_INVALID_ARGUMENT),                     \
        ROW(call, null_norms, TQKV_INVALID_ARGUMENT), ROW(call, small_codes, TQKV_INVALID_ARGUMENT),                   \
        ROW(call, small_norms, TQKV_INVALID_ARGUMENT), ROW(call, no_codes_size, TQKV_INVALID_ARGUMENT),                \
        ROW(call, overlapping_store, TQKV_INVALID_ARGUMENT), ROW(call, misaligned_norms, TQKV_INVALID_ARGUMENT)
#define SOURCE_ROWS(call)                                                                                              \
    ROW(call, null_src, TQKV_INVALID_ARGUMENT), ROW(call, negative_tokens, TQKV_INVALID_ARGUMENT),                     \
        ROW(call, most_negative_tokens, TQKV_INVALID_ARGUMENT), ROW(call, first_is_nan, TQKV_NOT_FINITE),              \
        ROW(call, last_is_nan, TQKV_NOT_FINITE), ROW(call, last_is_infinite, TQKV_NOT_FINITE),                         \
        ROW(call, first_is_minus_infinite, TQKV_NOT_FINITE)
#define ATTENTION_ROWS(call)                                                                                           \
    ROW(call, good, TQKV_OK), ROW(call, null_attention, TQKV_INVALID_ARGUMENT),                                        \
        ROW(call, null_keys, TQKV_INVALID_ARGUMENT), ROW(call, null_values, TQKV_INVALID_ARGUMENT),                    \
        ROW(call, values_head_dim, TQKV_INVALID_ARGUMENT), ROW(call, values_kv_heads, TQKV_INVALID_ARGUMENT),          \
        ROW(call, values_format, TQKV_UNSUPPORTED), ROW(call, no_multiple, TQKV_INVALID_ARGUMENT),                     \
        ROW(call, fewer_heads, TQKV_INVALID_ARGUMENT), ROW(call, negative_heads, TQKV_INVALID_ARGUMENT),               \
        ROW(call, negative_queries, TQKV_INVALID_ARGUMENT), ROW(call, negative_window, TQKV_INVALID_ARGUMENT),         \
        ROW(call, nan_scale, TQKV_INVALID_ARGUMENT), ROW(call, infinite_scale, TQKV_INVALID_ARGUMENT),                 \
        ROW(call, nan_softcap, TQKV_INVALID_ARGUMENT), ROW(call, negative_softcap, TQKV_OK),                           \
        ROW(call, infinite_softcap, TQKV_INVALID_ARGUMENT), ROW(call, nan_sink, TQKV_NOT_FINITE),                      \
        ROW(call, infinite_sink, TQKV_NOT_FINITE), ROW(call, query_basis, TQKV_INVALID_ARGUMENT),                      \
        ROW(call, output_basis, TQKV_INVALID_ARGUMENT), ROW(call, alloc_alone, TQKV_INVALID_ARGUMENT),                 \
        ROW(call, free_alone, TQKV_INVALID_ARGUMENT), ROW(call, null_out, TQKV_INVALID_ARGUMENT),                      \
        ROW(call, huge_queries, TQKV_INVALID_ARGUMENT)
#define RESIDENT_ROWS(call)                                                                                            \
    ROW(call, values_codes, TQKV_INVALID_ARGUMENT), ROW(call, negative_end, TQKV_INVALID_ARGUMENT),                    \
        ROW(call, negative_kv_len, TQKV_INVALID_ARGUMENT), ROW(call, kv_len_beyond_end, TQKV_OUT_OF_RANGE),            \
        ROW(call, kv_len_beyond_ring, TQKV_OUT_OF_RANGE), ROW(call, end_beyond_linear, TQKV_OUT_OF_RANGE),             \
        ROW(call, end_beyond_values, TQKV_OUT_OF_RANGE), ROW(call, huge_end, TQKV_OUT_OF_RANGE),                       \
        ROW(call, null_q, TQKV_INVALID_ARGUMENT), ROW(call, nan_q, TQKV_NOT_FINITE),                                   \
        ROW(call, infinite_q, TQKV_NOT_FINITE), ROW(call, out_is_q, TQKV_INVALID_ARGUMENT),                            \
        ROW(call, out_touches_q, TQKV_INVALID_ARGUMENT), ROW(call, out_in_codes, TQKV_INVALID_ARGUMENT),               \
        ROW(call, out_in_norms, TQKV_INVALID_ARGUMENT)
#define PART_ROWS(call)                                                                                                \
    ROW(call, null_max, TQKV_INVALID_ARGUMENT), ROW(call, null_sum, TQKV_INVALID_ARGUMENT),                            \
        ROW(call, max_is_sum, TQKV_INVALID_ARGUMENT), ROW(call, max_in_out, TQKV_INVALID_ARGUMENT)

static const input_row encode_rows[] = {
    ROW(encode, good, TQKV_OK),
    ROW(encode, null_store, TQKV_INVALID_ARGUMENT),
    STORE_ROWS(encode),
    BUFFER_ROWS(encode),
    SOURCE_ROWS(encode),
    ROW(encode, negative_position, TQKV_OUT_OF_RANGE),
    ROW(encode, position_beyond, TQKV_OUT_OF_RANGE),
    ROW(encode, run_beyond, TQKV_OUT_OF_RANGE),
    ROW(encode, last_position, TQKV_OUT_OF_RANGE),
    ROW(encode, last_position_on_ring, TQKV_OUT_OF_RANGE),
    ROW(encode, negative_position_on_ring, TQKV_OUT_OF_RANGE),
    ROW(encode, nan_that_a_ring_drops, TQKV_NOT_FINITE),
    ROW(encode, src_in_codes, TQKV_INVALID_ARGUMENT),
    ROW(encode, src_in_norms, TQKV_INVALID_ARGUMENT),
};

static const input_row codec_rows[] = {
    ROW(probe, good, TQKV_OK),
    ROW(probe, null_store, TQKV_INVALID_ARGUMENT),
    STORE_ROWS(probe),
    SOURCE_ROWS(probe),
    ROW(probe, null_codes, TQKV_OK),
    ROW(probe, null_norms, TQKV_OK),
    ROW(probe, null_out, TQKV_INVALID_ARGUMENT),
    ROW(probe, src_is_out, TQKV_INVALID_ARGUMENT),
    ROW(decode, good, TQKV_OK),
    ROW(decode, null_store, TQKV_INVALID_ARGUMENT),
    STORE_ROWS(decode),
    BUFFER_ROWS(decode),
    ROW(decode, null_out, TQKV_INVALID_ARGUMENT),
    ROW(decode, out_in_codes, TQKV_INVALID_ARGUMENT),
    ROW(decode, out_in_norms, TQKV_INVALID_ARGUMENT),
    ROW(decode, negative_positions, TQKV_INVALID_ARGUMENT),
    ROW(decode, negative_position, TQKV_OUT_OF_RANGE),
    ROW(decode, position_beyond, TQKV_OUT_OF_RANGE),
    ROW(decode, run_beyond, TQKV_OUT_OF_RANGE),
    ROW(decode, last_position, TQKV_OUT_OF_RANGE),
    ROW(decode, last_position_on_ring, TQKV_OUT_OF_RANGE),
    ROW(decode, more_than_the_ring, TQKV_OUT_OF_RANGE),
    ROW(decode, unknown_basis, TQKV_INVALID_ARGUMENT),
    ROW(rotate, good, TQKV_OK),
    ROW(rotate, null_src, TQKV_INVALID_ARGUMENT),
    ROW(rotate, negative_rows, TQKV_INVALID_ARGUMENT),
    ROW(rotate, zero_rotate_dim, TQKV_UNSUPPORTED),
    ROW(rotate, odd_rotate_dim, TQKV_UNSUPPORTED),
    ROW(rotate, large_rotate_dim, TQKV_UNSUPPORTED),
    ROW(unrotate, good, TQKV_OK),
    ROW(unrotate, null_src, TQKV_INVALID_ARGUMENT),
    ROW(unrotate, negative_rows, TQKV_INVALID_ARGUMENT),
    ROW(unrotate, odd_rotate_dim, TQKV_UNSUPPORTED),
};

static const input_row attention_rows[] = {
    ATTENTION_ROWS(attend),
    STORE_ROWS(attend),
    BUFFER_ROWS(attend),
    RESIDENT_ROWS(attend),
    ATTENTION_ROWS(partial),
    STORE_ROWS(partial),
    BUFFER_ROWS(partial),
    RESIDENT_ROWS(partial),
    PART_ROWS(partial),
    ROW(partial, sum_in_q, TQKV_INVALID_ARGUMENT),
    ROW(partial, sum_in_codes, TQKV_INVALID_ARGUMENT),
    ROW(partial, first_before, TQKV_OUT_OF_RANGE),
    ROW(partial, first_negative, TQKV_OUT_OF_RANGE),
    ROW(partial, first_beyond, TQKV_OUT_OF_RANGE),
    ROW(partial, slice_beyond, TQKV_OUT_OF_RANGE),
    ROW(partial, huge_count, TQKV_OUT_OF_RANGE),
    ROW(partial, negative_count, TQKV_INVALID_ARGUMENT),
    ATTENTION_ROWS(merge),
    PART_ROWS(merge),
    ROW(merge, null_codes, TQKV_OK),
    ROW(merge, null_other_out, TQKV_INVALID_ARGUMENT),
    ROW(merge, null_other_max, TQKV_INVALID_ARGUMENT),
    ROW(merge, null_other_sum, TQKV_INVALID_ARGUMENT),
    ROW(merge, merge_with_itself, TQKV_INVALID_ARGUMENT),
    ROW(merge, merge_max_with_itself, TQKV_INVALID_ARGUMENT),
    ROW(merge, merge_sum_with_itself, TQKV_INVALID_ARGUMENT),
    ROW(merge, other_max_in_out, TQKV_INVALID_ARGUMENT),
    ATTENTION_ROWS(finish),
    ROW(finish, null_max, TQKV_INVALID_ARGUMENT),
    ROW(finish, null_sum, TQKV_INVALID_ARGUMENT),
    ROW(finish, max_in_out, TQKV_INVALID_ARGUMENT),
    ROW(finish, null_codes, TQKV_OK),
};

static const input_row cache_rows[] = {
    ROW(create, good, TQKV_OK),
    ROW(create, null_desc, TQKV_INVALID_ARGUMENT),
    ROW(create, null_result, TQKV_INVALID_ARGUMENT),
    ROW(create, desc_head_dim, TQKV_UNSUPPORTED),
    ROW(create, desc_zero_head_dim, TQKV_UNSUPPORTED),
    ROW(create, desc_kv_heads, TQKV_INVALID_ARGUMENT),
    ROW(create, desc_negative_kv_heads, TQKV_INVALID_ARGUMENT),
    ROW(create, desc_heads, TQKV_INVALID_ARGUMENT),
    ROW(create, desc_negative_heads, TQKV_INVALID_ARGUMENT),
    ROW(create, desc_capacity, TQKV_INVALID_ARGUMENT),
    ROW(create, desc_negative_capacity, TQKV_INVALID_ARGUMENT),
    ROW(create, desc_overflow, TQKV_INVALID_ARGUMENT),
    ROW(create, desc_key_format, TQKV_UNSUPPORTED),
    ROW(create, desc_value_format, TQKV_UNSUPPORTED),
    ROW(create, desc_window, TQKV_INVALID_ARGUMENT),
    ROW(create, desc_scale, TQKV_INVALID_ARGUMENT),
    ROW(create, desc_softcap, TQKV_INVALID_ARGUMENT),
    ROW(create, desc_sinks, TQKV_NOT_FINITE),
    ROW(create, desc_alloc_alone, TQKV_INVALID_ARGUMENT),
    ROW(append, good, TQKV_OK),
    ROW(append, null_cache, TQKV_INVALID_ARGUMENT),
    ROW(append, null_src, TQKV_INVALID_ARGUMENT),
    ROW(append, null_src2, TQKV_INVALID_ARGUMENT),
    ROW(append, negative_tokens, TQKV_INVALID_ARGUMENT),
    ROW(append, append_too_many, TQKV_OUT_OF_RANGE),
    ROW(append, last_is_nan, TQKV_NOT_FINITE),
    ROW(append, last_of_src2_is_nan, TQKV_NOT_FINITE),
    ROW(cache_attend, good, TQKV_OK),
    ROW(cache_attend, null_cache, TQKV_INVALID_ARGUMENT),
    ROW(cache_attend, null_q, TQKV_INVALID_ARGUMENT),
    ROW(cache_attend, null_out, TQKV_INVALID_ARGUMENT),
    ROW(cache_attend, negative_cache_queries, TQKV_INVALID_ARGUMENT),
    ROW(cache_attend, nan_q, TQKV_NOT_FINITE),
    ROW(cache_attend, out_is_q, TQKV_INVALID_ARGUMENT),
    ROW(cut_back, good, TQKV_OK),
    ROW(cut_back, null_cache, TQKV_INVALID_ARGUMENT),
    ROW(cut_back, truncate_negative, TQKV_OUT_OF_RANGE),
    ROW(cut_back, truncate_beyond, TQKV_OUT_OF_RANGE),
    ROW(cut_back, truncate_far, TQKV_OUT_OF_RANGE),
    ROW(save, good, TQKV_OK),
    ROW(save, null_cache, TQKV_INVALID_ARGUMENT),
    ROW(save, null_write, TQKV_INVALID_ARGUMENT),
    ROW(load, good, TQKV_OK),
    ROW(load, null_desc, TQKV_INVALID_ARGUMENT),
    ROW(load, null_result, TQKV_INVALID_ARGUMENT),
    ROW(load, null_read, TQKV_INVALID_ARGUMENT),
    ROW(load, desc_alloc_alone, TQKV_INVALID_ARGUMENT),
    ROW(load, desc_heads, TQKV_INVALID_ARGUMENT),
    ROW(load, desc_sinks, TQKV_NOT_FINITE),
    ROW(load, foreign_bytes, TQKV_CORRUPT),
    ROW(load, no_bytes, TQKV_CORRUPT),
};

/* ---- Running one row ---- */

static void check_unchanged(const world *w, const memory *before)
{
    CHECK(!memcmp(w->m, before, sizeof *before), "memory was changed");
    if (w->cache) {
        stream now = stream_of_cache(w->cache);
        CHECK(now.size > 0 && tqkv_cache_end(w->cache) == TOKENS, "end is %d", (int)tqkv_cache_end(w->cache));
        CHECK(now.size == w->snapshot.size || w->snapshot.size == 0, "the cache's snapshot has another size");
        CHECK(w->snapshot.bytes[0] == 'x' || !memcmp(now.bytes, w->snapshot.bytes, now.size), "the cache was changed");
        stream_free(&now);
    }
}

static void check_row(const void *parameters)
{
    const input_row *row = (const input_row *)parameters;
    memory *m = (memory *)test_alloc(sizeof *m), *before = (memory *)test_alloc(sizeof *m);
    world w;
    make_world(&w, m);
    row->change(&w);
    memcpy(before, m, sizeof *m);
    w.made = (tqkv_cache *)(uintptr_t)1; /* create and load must replace it, also when they fail */
    tqkv_result result = row->call(&w);
    CHECK_RESULT(result, row->expected);
    if (result != TQKV_OK) check_unchanged(&w, before);
    bool makes = row->call == create || row->call == load;
    if (makes && w.result) CHECK((w.made != NULL) == (result == TQKV_OK), "the cache is %p", (void *)w.made);
    if (makes && w.result && result == TQKV_OK) tqkv_cache_destroy(w.made);
    tqkv_cache_destroy(w.cache);
    stream_free(&w.snapshot);
    CHECK_NO_LEAK(&w.counter);
    free(m);
    free(before);
}

/* ---- Corner cases that are not errors ---- */

static void check_nothing_to_do(const void *parameters)
{
    (void)parameters;
    memory *m = (memory *)test_alloc(sizeof *m), *before = (memory *)test_alloc(sizeof *m);
    world w;
    make_world(&w, m);
    memcpy(before, m, sizeof *m);
    w.n_tokens = w.n_positions = w.n_rows = 0;
    CHECK_RESULT(encode(&w), TQKV_OK);
    CHECK_RESULT(probe(&w), TQKV_OK);
    CHECK_RESULT(decode(&w), TQKV_OK);
    CHECK_RESULT(rotate(&w), TQKV_OK);
    CHECK_RESULT(unrotate(&w), TQKV_OK);
    CHECK_RESULT(append(&w), TQKV_OK);
    check_unchanged(&w, before);
    tqkv_cache_destroy(w.cache);
    stream_free(&w.snapshot);
    CHECK_NO_LEAK(&w.counter);
    free(m);
    free(before);
}

static void check_sizes_of_invalid(const void *parameters)
{
    (void)parameters;
    memory *m = (memory *)test_alloc(sizeof *m);
    static void (*const changes[])(world *) = {default_format, unknown_format, odd_head_dim,   negative_head_dim,
                                               zero_kv_heads,  zero_capacity,  huge_store,     unrotated_tq4,
                                               unrotated_i8,   unrotated_f16,  nan_block_scale};
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        world w;
        make_world(&w, m);
        changes[i](&w);
        CHECK(tqkv_codes_size(&w.keys) == 0, "change %d: size %zu", (int)i, tqkv_codes_size(&w.keys));
        CHECK(tqkv_norms_size(&w.keys) == 0, "change %d: size %zu", (int)i, tqkv_norms_size(&w.keys));
        tqkv_cache_destroy(w.cache);
        stream_free(&w.snapshot);
    }
    CHECK(tqkv_codes_size(NULL) == 0 && tqkv_norms_size(NULL) == 0, "NULL has a size");
    CHECK(tqkv_row_bytes(TQKV_FORMAT_DEFAULT, 128) == 0, "the default format has a row");
    CHECK(tqkv_row_bytes(TQKV_I8, 100) == 0 && tqkv_norms_per_row(TQKV_I8, 100) == 0, "head_dim 100 has a row");
    CHECK(tqkv_norms_per_row(test_no_format(-3), 128) == 0, "an unknown format has norms");
    CHECK(tqkv_last_boundary(TQKV_FORMAT_DEFAULT) == 0.0f, "the default format has a boundary");
    free(m);
}

/* Names of instruction sets: of another machine, of none, and the way back. */
static void check_isa_names(const void *parameters)
{
    (void)parameters;
    const char *used = tqkv_isa_name();
    CHECK_RESULT(tqkv_isa_force("sse9"), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_isa_force(""), TQKV_INVALID_ARGUMENT);
    CHECK(tqkv_isa_name() == used, "a refused name changed the set to %s", tqkv_isa_name());
    CHECK_RESULT(tqkv_isa_force("scalar"), TQKV_OK);
    CHECK(!strcmp(tqkv_isa_name(), "scalar"), "%s", tqkv_isa_name());
    CHECK_RESULT(tqkv_isa_force(NULL), TQKV_OK);
    CHECK(tqkv_isa_name() != NULL, "no set was chosen anew");
    CHECK_RESULT(tqkv_isa_force(used), TQKV_OK);
    CHECK(!strcmp(tqkv_isa_name(), used), "%s, not %s", tqkv_isa_name(), used);
}

static void add_rows(const input_row *rows, size_t n)
{
    for (size_t i = 0; i < n; i++)
        test_add(check_row, &rows[i], sizeof *rows, "input/%s/%s", rows[i].call_name, rows[i].what);
}

void test_input_cases(void)
{
    add_rows(encode_rows, sizeof encode_rows / sizeof *encode_rows);
    add_rows(codec_rows, sizeof codec_rows / sizeof *codec_rows);
    add_rows(attention_rows, sizeof attention_rows / sizeof *attention_rows);
    add_rows(cache_rows, sizeof cache_rows / sizeof *cache_rows);
    test_add(check_nothing_to_do, NULL, 0, "input/nothing_to_do");
    test_add(check_isa_names, NULL, 0, "input/isa_names");
    test_add(check_sizes_of_invalid, NULL, 0, "input/sizes_of_invalid");
}
