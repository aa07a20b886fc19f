/* Bad input: every call reports every bad argument and changes nothing. input_changes.h has the bad arguments. */
#include "counting.h"
#include "data.h"
#include "runner.h"

#include <limits.h>
#include <math.h>

enum {
    D = 64,
    TAIL = 32,
    HEADS = 2,
    N_HEADS = 4,
    CAPACITY = 8,
    TOKENS = 3,
    QUERIES = 2,
    ROWS = QUERIES * N_HEADS,
    SPARE = 16,
    POOL = 128
};

/* All memory that the calls see, in one block: one comparison shows any change. */
typedef struct memory {
    unsigned char key_codes[2 * HEADS * CAPACITY * D], value_codes[2 * HEADS * CAPACITY * D];
    float key_norms[HEADS * CAPACITY * 8], value_norms[HEADS * CAPACITY * 8];
    unsigned char pool_codes[HEADS * POOL * D];
    float pool_norms[HEADS * POOL];
    unsigned char tail_codes[2 * HEADS * CAPACITY * TAIL];
    int32_t pages[2], slots[TOKENS + 1]; /* an even number: tqkv_quality lies in out */
    float src[TOKENS * HEADS * D], src2[TOKENS * HEADS * D], q[ROWS * (D + TAIL)], sinks[N_HEADS];
    float out[ROWS * D + SPARE], center[HEADS * D], scale[HEADS * D], max[ROWS], sum[ROWS], other_out[ROWS * D],
        other_max[ROWS], other_sum[ROWS];
} memory;

/* The arguments of all calls. They are valid until a change is applied. */
typedef struct world {
    memory *m;
    tqkv_store keys, values, ends, tail, kept_tail, index_keys;
    const tqkv_store *store;
    tqkv_attention attention;
    const tqkv_attention *a;
    tqkv_cache_desc desc;
    const tqkv_cache_desc *d;
    tqkv_cache *cache, *made;
    tqkv_cache **result; /* create and load put the cache here */
    float *src, *src2, *q, *out, *max, *sum;
    float *scale; /* of calibrate */
    tqkv_index index;
    const tqkv_index *x;
    uint64_t tree[65];
    int32_t list[16];
    int n_heads; /* of calibrate and noise */
    tqkv_pairs pairs;
    const float *other_out, *other_max, *other_sum;
    int n_tokens, n_positions, n_rows, head_dim, count, n_queries;
    int64_t position, first, end;
    int kept[2], n_newest, n_kept;
    const int32_t *slots;
    const int *k;
    tqkv_basis basis;
    counting counter;
    stream snapshot, store_snapshot;
    tqkv_read read;
    tqkv_write write;
} world;

/* ---- Valid arguments ---- */

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
    w->desc = test_cache_desc(D, HEADS, N_HEADS, CAPACITY);
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

static void make_index(world *w)
{
    w->index_keys = make_store(TQKV_I8, w->m->pool_codes, w->m->pool_norms);
    w->index_keys.n_kv_heads = 1;
    CHECK_RESULT(tqkv_encode(&w->index_keys, w->m->src, 5, 0), TQKV_OK);
    w->index.keys = &w->index_keys;
    w->index.n_heads = N_HEADS;
    w->index.n_queries = QUERIES;
    w->index.end = 5;
    w->index.weights = w->m->max;
    w->index.allocator = counting_allocator(&w->counter);
    w->x = &w->index;
}

static void fill_memory(memory *m)
{
    memset(m, 0xff, sizeof *m);
    data_rows(1, DATA_GAUSSIAN, m->src, TOKENS * HEADS, D);
    data_rows(2, DATA_GAUSSIAN, m->src2, TOKENS * HEADS, D);
    data_rows(3, DATA_GAUSSIAN, m->q, ROWS, D + TAIL);
    data_rows(4, DATA_GAUSSIAN, m->other_out, ROWS, D);
    data_rows(5, DATA_GAUSSIAN, m->center, HEADS, D);
    for (int i = 0; i < HEADS * D; i++) m->scale[i] = i % 2 ? 0.375f : 1.0f / 4294967296.0f;
    for (int i = 0; i < ROWS; i++) {
        m->max[i] = m->other_max[i] = 0.5f;
        m->sum[i] = m->other_sum[i] = 2.0f;
    }
    for (int i = 0; i < N_HEADS; i++) m->sinks[i] = 0.25f;
    m->pages[0] = 1;
    m->pages[1] = 0;
    m->slots[0] = CAPACITY - 1;
    m->slots[1] = -1;
    m->slots[2] = 0;
}

static void make_world(world *w, memory *m)
{
    memset(w, 0, sizeof *w);
    fill_memory(m);
    w->m = m;
    w->keys = make_store(TQKV_TQ8, m->key_codes, m->key_norms);
    w->values = make_store(TQKV_TQ5, m->value_codes, m->value_norms);
    w->tail = make_store(TQKV_F16, m->tail_codes, NULL);
    w->tail.head_dim = TAIL;
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
    w->n_heads = N_HEADS;
    w->scale = m->other_out;
    w->first = 1;
    w->count = 3;
    w->position = 2;
    w->slots = m->slots;
    w->kept[1] = 2;
    w->n_newest = TOKENS;
    w->n_kept = 2;
    w->k = w->kept;
    w->end = 2;
    CHECK_RESULT(tqkv_encode(&w->keys, m->src, TOKENS, 0), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&w->keys, m->src2, TOKENS, 3), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&w->values, m->src, TOKENS, 0), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&w->values, m->src2, TOKENS, 3), TQKV_OK);
    CHECK_RESULT(tqkv_store_save(&w->keys, w->position, w->n_positions, stream_write, &w->store_snapshot), TQKV_OK);
    make_attention(w);
    make_index(w);
    make_cache(w);
}

/* A place some bytes behind p, for arrays that overlap or are not aligned. */
static float *behind(const void *p, size_t bytes) { return (float *)((uintptr_t)p + bytes); }

/* Fills memory that is to be a centre (0), scales (0x40) or pages. */
static float *filled(void *p, int byte) { return (float *)memset(p, byte, HEADS * D * sizeof(float)); }

/* Gives the keys a pool of two pages. */
static void use_pages(world *w)
{
    w->keys.capacity = POOL;
    w->keys.codes = w->m->pool_codes;
    w->keys.codes_size = sizeof w->m->pool_codes;
    w->keys.norms = w->m->pool_norms;
    w->keys.norms_size = sizeof w->m->pool_norms;
    w->keys.pages = w->m->pages;
    w->keys.n_pages = 2;
    w->keys.page_size = POOL / 2;
    CHECK_RESULT(tqkv_encode(&w->keys, w->m->src, TOKENS, 0), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&w->keys, w->m->src2, TOKENS, 3), TQKV_OK);
}

/* Gives the keys a second part, whose halves are 0. */
static void use_tail(world *w)
{
    memset(w->m->tail_codes, 0, sizeof w->m->tail_codes);
    w->attention.tail = &w->tail;
}

/* Gives the attention halves of its keys, in the memory of the pool. */
static void use_ends(world *w)
{
    w->ends = w->keys;
    w->ends.format = TQKV_F16;
    w->ends.rotation = TQKV_ROTATION_ON;
    w->ends.codes = w->m->pool_codes;
    w->ends.codes_size = sizeof w->m->pool_codes;
    CHECK_RESULT(tqkv_encode(&w->ends, w->m->src, TOKENS, 0), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&w->ends, w->m->src2, TOKENS, 3), TQKV_OK);
    w->attention.first.keys = w->attention.last.keys = &w->ends;
    w->attention.first.n = 1;
    w->attention.last.n = 2;
}

/* Makes a ring of the five positions, which keeps its first one: of keys, values and tail. */
static void use_kept(world *w)
{
    use_tail(w);
    use_ends(w);
    w->kept_tail = w->tail;
    w->kept_tail.codes = w->m->pool_codes + sizeof w->m->pool_codes / 2;
    memset(w->kept_tail.codes, 0, sizeof w->m->pool_codes / 2);
    w->attention.first.values = &w->ends;
    w->attention.first.tail = &w->kept_tail;
    w->attention.last.keys = NULL;
    w->attention.last.n = 0;
    w->keys.ring = w->values.ring = w->tail.ring = true;
    w->keys.capacity = w->values.capacity = w->tail.capacity = 5;
    w->attention.end = 10;
    w->first = 6;
}

/* Gives the attention a list: four numbers, again and again. */
static void use_list(world *w, int32_t a, int32_t b, int32_t c, int32_t d, int length, int heads, int block)
{
    const int32_t numbers[4] = {a, b, c, d};
    for (int i = 0; i < 16; i++) w->list[i] = numbers[i % 4];
    w->attention.list.rows = w->list;
    w->attention.list.length = length;
    w->attention.list.heads = heads;
    w->attention.list.block = block;
}

static void set_strides(tqkv_strides *s, size_t token, size_t head)
{
    s->token = token;
    s->head = head;
}

/* Makes the cache one whose keys are the values, with a tail; one token is to be appended. */
static void use_latent(world *w)
{
    tqkv_cache_destroy(w->cache);
    stream_free(&w->snapshot);
    w->desc.shared = true;
    w->desc.tail_dim = TAIL;
    CHECK_RESULT(tqkv_cache_create(&w->desc, &w->cache), TQKV_OK);
    w->n_tokens = 1;
    w->src2 = NULL;
    for (int i = 0; i < TOKENS; i++) CHECK_RESULT(tqkv_cache_append(w->cache, w->src, NULL, 1), TQKV_OK);
    w->snapshot = stream_of_cache(w->cache);
}

static void free_world(world *w)
{
    tqkv_cache_destroy(w->cache);
    stream_free(&w->snapshot);
    stream_free(&w->store_snapshot);
    CHECK_NO_LEAK(&w->counter);
}

/* ---- The calls ---- */

static tqkv_result encode(world *w) { return tqkv_encode(w->store, w->src, w->n_tokens, w->position); }
static tqkv_result encode_slots(world *w) { return test_encode_slots(w->store, w->src, w->n_tokens, w->slots); }
static tqkv_result probe(world *w) { return tqkv_probe(w->store, w->src, w->n_tokens, w->out); }
static tqkv_result measure(world *w)
{
    return tqkv_measure(w->store, w->src, w->n_tokens, (tqkv_quality *)(void *)w->out);
}
static tqkv_result mean(world *w)
{
    return tqkv_calibrate(w->store, w->src, w->n_tokens, NULL, 0, 0, TQKV_PAIRS_NONE, w->out, NULL);
}
static tqkv_result calibrate(world *w)
{
    return tqkv_calibrate(w->store, w->src, w->n_tokens, w->q, w->n_heads, w->n_queries, w->pairs, w->out, w->scale);
}
static tqkv_result noise(world *w)
{
    return tqkv_logit_noise(w->store, w->src, w->n_tokens, w->q, w->n_heads, w->n_queries, (double *)(void *)w->out);
}
static tqkv_result score(world *w) { return tqkv_index_scores(w->x, w->q, w->out); }
static tqkv_result choose(world *w) { return tqkv_index_choose(w->x, w->src, w->n_kept, (int32_t *)(void *)w->out); }
static tqkv_result decode(world *w) { return tqkv_decode(w->store, w->position, w->n_positions, w->basis, w->out); }
static tqkv_result rotate(world *w) { return tqkv_rotate(w->src, w->n_rows, w->head_dim, TQKV_ROTATED); }
static tqkv_result unrotate(world *w) { return tqkv_rotate(w->src, w->n_rows, w->head_dim, w->basis); }
static tqkv_result attend(world *w) { return tqkv_attend(w->a, w->q, w->out); }
static tqkv_result batch(world *w)
{
    const void *const q[1] = {w->q};
    void *const out[1] = {w->out};
    return tqkv_attend_batch(w->a, 1, q, out);
}
static tqkv_result partial(world *w)
{
    return tqkv_attend_partial(w->a, w->q, w->first, w->count, w->out, w->max, w->sum);
}
static tqkv_result merge(world *w)
{
    return tqkv_attend_merge(w->a, w->out, w->max, w->sum, w->a, w->other_out, w->other_max, w->other_sum);
}
static tqkv_result finish(world *w) { return tqkv_attend_finish(w->a, w->out, w->max, w->sum); }
static tqkv_result create(world *w) { return tqkv_cache_create(w->d, w->result); }
static tqkv_result append(world *w) { return tqkv_cache_append(w->cache, w->src, w->src2, w->n_tokens); }
static tqkv_result cache_attend(world *w) { return tqkv_cache_attend(w->cache, w->q, w->n_queries, w->out); }
static tqkv_result cut_back(world *w) { return tqkv_cache_truncate(w->cache, w->end); }
static tqkv_result take_out(world *w) { return tqkv_cache_remove(w->cache, w->first, w->count - 1); }
static tqkv_result keep(world *w) { return tqkv_cache_keep(w->cache, w->n_newest, w->k, w->n_kept); }
static tqkv_result fork_cache(world *w) { return tqkv_cache_fork(w->cache, w->d, w->result); }
static tqkv_result save(world *w)
{
    stream s = stream_empty();
    tqkv_result result = tqkv_cache_save(w->cache, w->write, &s);
    CHECK(result == TQKV_OK || s.calls == 0, "a refused save has written");
    stream_free(&s);
    return result;
}
static tqkv_result load(world *w) { return tqkv_cache_load(w->d, w->read, &w->snapshot, w->result); }

static tqkv_result save_store(world *w)
{
    stream s = stream_empty();
    tqkv_result result = tqkv_store_save(w->store, w->position, w->n_positions, w->write, &s);
    CHECK(result == TQKV_OK || s.calls == 0, "a refused save has written");
    stream_free(&s);
    return result;
}
static tqkv_result load_store(world *w)
{
    return tqkv_store_load(w->store, w->position, w->n_positions, w->read, &w->store_snapshot);
}

/* From the keys to the values. */
static tqkv_result convert(world *w) { return tqkv_store_convert(&w->values, w->store, w->position, w->n_positions); }

/* Each call: its set, of it alone, its name and what makes it. */
#define CALLS \
    X(ENCODE, "encode", encode) \
    X(SLOTS, "encode_slots", encode_slots) \
    X(PROBE, "probe", probe) \
    X(DECODE, "decode", decode) \
    X(MEASURE, "measure", measure) \
    X(MEAN, "mean", mean) \
    X(ROTATE, "rotate", rotate) \
    X(UNROTATE, "unrotate", unrotate) \
    X(ATTEND, "attend", attend) \
    X(BATCH, "batch", batch) \
    X(CALIBRATE, "calibrate", calibrate) \
    X(NOISE, "noise", noise) \
    X(SCORE, "score", score) \
    X(CHOOSE, "choose", choose) \
    X(PARTIAL, "partial", partial) \
    X(MERGE, "merge", merge) \
    X(FINISH, "finish", finish) \
    X(CREATE, "create", create) \
    X(APPEND, "append", append) \
    X(CACHE_ATTEND, "cache_attend", cache_attend) \
    X(CUT_BACK, "cut_back", cut_back) \
    X(REMOVE, "remove", take_out) \
    X(KEEP, "keep", keep) \
    X(FORK, "fork", fork_cache) \
    X(SAVE, "save", save) \
    X(LOAD, "load", load) \
    X(SAVE_STORE, "store_save", save_store) \
    X(LOAD_STORE, "store_load", load_store) \
    X(CONVERT, "store_convert", convert)

#define X(set, name, run) AT_##set,
enum { CALLS N_CALLS };
#undef X

#define X(set, name, run) set = 1 << AT_##set,
enum {
    CALLS ALL = (1 << N_CALLS) - 1,
    WHOLE = ATTEND | BATCH,
    CODEC = ENCODE | PROBE | DECODE | MEASURE | MEAN,
    STORED = SAVE_STORE | LOAD_STORE | CONVERT,
    ROTATIONS = ROTATE | UNROTATE,
    RESIDENT = WHOLE | PARTIAL,                            /* these read stored positions */
    ATTENTION = RESIDENT | MERGE | FINISH,                 /* these take a tqkv_attention */
    STORE = CODEC | RESIDENT | STORED,                     /* these read the shape of a store */
    BUFFERS = ENCODE | SLOTS | DECODE | RESIDENT | STORED, /* these read or write its codes */
    CENTER = (CODEC - MEAN) | SLOTS | RESIDENT | STORED,   /* these read the centre */
    SOURCE = (CODEC - DECODE) | SLOTS                      /* these read src */
};
#undef X

typedef struct input_call {
    int set;
    const char *name;
    tqkv_result (*run)(world *w);
} input_call;

#define X(set, name, run) {set, name, run},
static const input_call calls[] = {CALLS};
#undef X

/* ---- The changes: each makes one argument wrong ---- */

typedef struct input_change {
    const char *name;
    int calls; /* the set of calls that notice */
    tqkv_result expected;
    void (*apply)(world *w);
} input_change;

#define CHANGE(name, calls, result, statement) \
    static void name##_##result(world *w) { statement; }
#include "input_changes.h"
#undef CHANGE

#define CHANGE(name, calls, result, statement) {#name, calls, TQKV_##result, name##_##result},
static const input_change changes[] = {
#include "input_changes.h"
};
#undef CHANGE

enum { N_CHANGES = sizeof changes / sizeof *changes };

/* ---- One call with one change ---- */

typedef struct input_row {
    const input_call *call;
    const input_change *change;
} input_row;

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
    row->change->apply(&w);
    memcpy(before, m, sizeof *m);
    w.made = (tqkv_cache *)(uintptr_t)1; /* create and load must replace it, also when they fail */
    test_explained = NULL;
    tqkv_result result = row->call->run(&w);
    CHECK_RESULT(result, row->change->expected);
    const bool refused = result != TQKV_OK && result != TQKV_OUT_OF_MEMORY && result != TQKV_IO;
    CHECK((test_explained != NULL) == refused, "%s: \"%s\"", tqkv_result_string(result),
          test_explained ? test_explained : "");
    const bool idle = !w.n_tokens && !w.n_positions && !w.n_rows;
    if (result != TQKV_OK || idle) check_unchanged(&w, before);
    const bool makes = (row->call->set & (CREATE | LOAD | FORK)) != 0;
    if (makes && w.result) CHECK((w.made != NULL) == (result == TQKV_OK), "the cache is %p", (void *)w.made);
    if (makes && w.result && result == TQKV_OK) tqkv_cache_destroy(w.made);
    free_world(&w);
    free(m);
    free(before);
}

/* ---- Sizes and words ---- */

static void check_sizes_of_invalid(NO_ROW)
{
    memory *m = (memory *)test_alloc(sizeof *m);
    for (int i = 0; i < N_CHANGES; i++) {
        if (changes[i].calls != STORE || changes[i].expected == TQKV_OK) continue; /* the shape itself is wrong */
        world w;
        make_world(&w, m);
        changes[i].apply(&w);
        CHECK(tqkv_codes_size(&w.keys) == 0, "%s: size %zu", changes[i].name, tqkv_codes_size(&w.keys));
        CHECK(tqkv_norms_size(&w.keys) == 0, "%s: size %zu", changes[i].name, tqkv_norms_size(&w.keys));
        free_world(&w);
    }
    CHECK(tqkv_codes_size(NULL) == 0 && tqkv_norms_size(NULL) == 0, "NULL has a size");
    CHECK(test_row_bytes(TQKV_FORMAT_DEFAULT, 128) == 0, "the default format has a row");
    CHECK(test_row_bytes(TQKV_I8, 100) == 0 && test_norms_per_row(TQKV_I8, 100) == 0, "head_dim 100 has a row");
    CHECK(test_norms_per_row(test_no_format(-3), 128) == 0, "an unknown format has norms");
    free(m);
}

/* A desc that is not that of a snapshot or a cache is refused with the name of the field. */
static void check_desc_names(NO_ROW)
{
    memory *m = (memory *)test_alloc(sizeof *m);
#define REFUSED(call, field, value) \
    do { \
        world w; \
        make_world(&w, m); \
        w.desc.tag = 1; /* the cache has none, so any goes */ \
        w.desc.field = (value); \
        test_explained = ""; \
        CHECK_RESULT(call(&w), TQKV_INVALID_ARGUMENT); \
        CHECK(strstr(test_explained, "desc: " #field " "), #field ": %s", test_explained); \
        free_world(&w); \
    } while (0)
    REFUSED(load, head_dim, 2 * D);
    REFUSED(load, value_dim, 2 * D);
    REFUSED(load, n_kv_heads, 2 * HEADS);
    REFUSED(load, n_heads, HEADS);
    REFUSED(load, capacity, 2 * CAPACITY);
    REFUSED(load, ring, true);
    REFUSED(load, key_format, TQKV_TQ4);
    REFUSED(load, value_format, TQKV_I8);
    REFUSED(load, window, 1);
    REFUSED(load, scale, 1.0f);
    REFUSED(load, softcap, 1.0f);
    REFUSED(load, shared, true);
    REFUSED(load, tail_dim, D);
    REFUSED(load, tail_format, TQKV_I8);
    REFUSED(load, exact_first, 1);
    REFUSED(load, exact_last, 1);
    REFUSED(load, calibrate, 16);
    REFUSED(fork_cache, head_dim, 2 * D);
    REFUSED(fork_cache, window, 1);
    REFUSED(fork_cache, calibrate, 16);
#undef REFUSED
    free(m);
}

void test_input_cases(void)
{
    for (int call = 0; call < N_CALLS; call++)
        for (int i = 0; i < N_CHANGES; i++) {
            const input_row row = {&calls[call], &changes[i]};
            if (row.change->calls & row.call->set)
                test_add(check_row, &row, sizeof row, "input/%s/%s", row.call->name, row.change->name);
        }
    test_add(check_desc_names, NULL, 0, "input/desc_names");
    test_add(check_sizes_of_invalid, NULL, 0, "input/sizes_of_invalid");
}
