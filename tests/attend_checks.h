/* What holds for any attention: its error, and the same bits in every way to ask for it. */
#ifndef TQKV_TESTS_ATTEND_CHECKS_H
#define TQKV_TESTS_ATTEND_CHECKS_H

#include "attend_fixture.h"
#include "counting.h"

#include <fenv.h>

static inline size_t attend_out_bytes(const attend_problem *p) { return p->n_rows * p->value_dim * sizeof(float); }

static inline void attend_expect(const attend_problem *p, const tqkv_attention *a, const char *what)
{
    float *out = (float *)test_alloc_filled(attend_out_bytes(p), 0xff);
    CHECK_RESULT(tqkv_attend(a, p->q, out), TQKV_OK);
    CHECK(!memcmp(out, p->out, attend_out_bytes(p)), "%s: other bits", what);
    free(out);
}

/* Tasks in another order, in another rounding mode, and no invalid operation unless numbers are wild. */
static inline void attend_check_hook(const attend_problem *p, bool wild)
{
    tqkv_attention a = p->attention;
    int calls = 0;
    a.parallel.run = test_run_backwards;
    a.parallel.user = &calls;
#ifdef FE_UPWARD
    fesetround(FE_UPWARD);
#endif
    feclearexcept(FE_ALL_EXCEPT);
    attend_expect(p, &a, "by tasks");
    CHECK(wild || !fetestexcept(FE_INVALID | FE_DIVBYZERO), "an invalid operation, or a division by zero");
#ifdef FE_UPWARD
    fesetround(FE_TONEAREST);
#endif
    CHECK(calls > 0, "the hook was not called");
}

/* With every instruction set, and NEON with each of its products. */
static inline void attend_check_sets(const attend_problem *p)
{
    static const char *const sets[4] = {"scalar", "avx2", "avx512", "neon"};
    const char *in_use = tqkv_isa_name();
    const char best = test_set_products(1);
    for (char products = 1; products < best; products++) {
        test_set_products(products);
        attend_expect(p, &p->attention, "with fewer products");
    }
    test_set_products(best);
    for (int i = 0; i < 4; i++)
        if (tqkv_isa_force(sets[i]) == TQKV_OK) attend_expect(p, &p->attention, sets[i]);
    CHECK_RESULT(tqkv_isa_force(in_use), TQKV_OK);
}

/* ---- Slices ---- */

enum { ATTEND_SLICES = 6 };

typedef struct attend_slice {
    float *out, *max, *sum;
} attend_slice;

static inline attend_slice attend_new_slice(const attend_problem *p)
{
    const attend_slice s = {(float *)test_alloc_filled(attend_out_bytes(p), 0xff),
                            (float *)test_alloc_filled(p->n_rows * sizeof(float), 0xff),
                            (float *)test_alloc_filled(p->n_rows * sizeof(float), 0xff)};
    return s;
}

static inline void attend_free_slice(attend_slice *s)
{
    free(s->out);
    free(s->max);
    free(s->sum);
}

/* Cuts [oldest, end) at random places. Two of them are equal, which makes an empty slice. cuts: [ATTEND_SLICES + 1] */
static inline void attend_cut(const attend_problem *p, data_random *random, int64_t *cuts)
{
    const reference_shape shape = reference_attention_shape(&p->attention);
    for (int i = 0; i <= ATTEND_SLICES; i++)
        cuts[i] = shape.oldest + data_below(random, (int)(shape.end - shape.oldest + 1));
    cuts[0] = shape.oldest;
    cuts[ATTEND_SLICES] = shape.end;
    cuts[2] = cuts[3];
    for (int i = 1; i <= ATTEND_SLICES; i++)
        for (int j = i; j > 0 && cuts[j - 1] > cuts[j]; j--) {
            const int64_t larger = cuts[j - 1];
            cuts[j - 1] = cuts[j];
            cuts[j] = larger;
        }
}

/* One slice, by the call itself and by tasks: the same bits. An empty one is -infinity, 0 and zeros. */
static inline attend_slice attend_one_slice(const attend_problem *p, int64_t first, int count, bool empty)
{
    attend_slice s = attend_new_slice(p), again = attend_new_slice(p);
    tqkv_attention a = p->attention;
    CHECK_RESULT(tqkv_attend_partial(&a, p->q, first, count, s.out, s.max, s.sum), TQKV_OK);
    a.parallel.run = test_run_backwards;
    CHECK_RESULT(tqkv_attend_partial(&a, p->q, first, count, again.out, again.max, again.sum), TQKV_OK);
    CHECK(!memcmp(s.out, again.out, attend_out_bytes(p)) && !memcmp(s.max, again.max, p->n_rows * sizeof(float)) &&
              !memcmp(s.sum, again.sum, p->n_rows * sizeof(float)),
          "a slice of %d: other bits by tasks", count);
    for (size_t i = 0; empty && i < p->n_rows; i++)
        CHECK(s.max[i] == -(float)INFINITY && s.sum[i] == 0.0f && s.out[i * p->value_dim] == 0.0f, "an empty slice");
    attend_free_slice(&again);
    return s;
}

/* Attends slice by slice, merges pairs of them in a random order, and finishes. out: as the problem's */
static inline void attend_by_slices(const attend_problem *p, data_random *random, float *out)
{
    const tqkv_attention *a = &p->attention;
    attend_slice slices[ATTEND_SLICES];
    int64_t cuts[ATTEND_SLICES + 1];
    attend_cut(p, random, cuts);
    for (int i = 0; i < ATTEND_SLICES; i++) {
        const int count = (int)(cuts[i + 1] - cuts[i]);
        const bool keeps = cuts[i] == cuts[0] && a->first.n; /* it has first positions that are gone */
        slices[i] = attend_one_slice(p, cuts[i], count, count == 0 && !keeps);
        if (count == 0 && keeps) { /* and no other may have them again */
            attend_free_slice(&slices[i]);
            slices[i] = attend_new_slice(p);
            for (size_t j = 0; j < p->n_rows; j++) slices[i].max[j] = -(float)INFINITY, slices[i].sum[j] = 0.0f;
            memset(slices[i].out, 0, attend_out_bytes(p));
        }
    }
    for (int left = ATTEND_SLICES; left > 1; left--) {
        const int into = data_below(random, left), from = (into + 1 + data_below(random, left - 1)) % left;
        attend_slice *d = &slices[into], *s = &slices[from];
        CHECK_RESULT(tqkv_attend_merge(a, d->out, d->max, d->sum, a, s->out, s->max, s->sum), TQKV_OK);
        attend_free_slice(s);
        slices[from] = slices[left - 1];
    }
    CHECK_RESULT(tqkv_attend_finish(a, slices[0].out, slices[0].max, slices[0].sum), TQKV_OK);
    memcpy(out, slices[0].out, attend_out_bytes(p));
    attend_free_slice(&slices[0]);
}

/* ---- Company ---- */

/* The call of one query alone. False: it would see other positions, or none are resident. */
static inline bool attend_query_alone(const attend_problem *p, int query, tqkv_attention *a)
{
    const reference_shape shape = reference_attention_shape(&p->attention);
    *a = p->attention;
    a->end -= a->n_queries - 1 - query;
    a->n_queries = 1;
    a->kv_len = (int)(a->end - shape.oldest);
    if (a->list.rows) a->list.rows += (a->list.heads ? a->list.heads : 1) * a->list.length * query;
    return !a->tree && !a->non_causal && a->end > shape.oldest;
}

/* Some queries alone, and in a batch behind the whole call. */
static inline void attend_check_company(const attend_problem *p, data_random *random)
{
    const size_t n_heads = (size_t)p->attention.n_heads, n = n_heads * p->value_dim;
    const int n_queries = p->attention.n_queries;
    float *alone = (float *)test_alloc(n * sizeof *alone), *all = (float *)test_alloc(attend_out_bytes(p));
    for (int i = 0; i < 3; i++) {
        const int query = i == 0 ? 0 : i == 1 ? n_queries - 1 : data_below(random, n_queries);
        tqkv_attention items[2] = {p->attention, p->attention};
        const void *q[2] = {p->q, p->q + (size_t)query * n_heads * p->head_dim};
        void *out[2] = {all, alone};
        if (!attend_query_alone(p, query, &items[1])) continue;
        CHECK_RESULT(tqkv_attend(&items[1], q[1], alone), TQKV_OK);
        CHECK(!memcmp(alone, p->out + (size_t)query * n, n * sizeof *alone), "query %d has other bits alone", query);
        memset(alone, 0xff, n * sizeof *alone);
        memset(all, 0xff, attend_out_bytes(p));
        if (i % 2) items[0].parallel.run = test_run_backwards;
        CHECK_RESULT(tqkv_attend_batch(items, 2, q, out), TQKV_OK);
        CHECK(!memcmp(alone, p->out + (size_t)query * n, n * sizeof *alone) &&
                  !memcmp(all, p->out, attend_out_bytes(p)),
              "other bits in a batch with query %d", query);
    }
    free(alone);
    free(all);
}

/* ---- Masks that hide nothing, and the default scale ---- */

/* A tree in which each query sees all before it, and a list of all blocks. */
static inline void attend_check_masks(const attend_problem *p, data_random *random)
{
    enum { MOST = 4096 };
    static const int blocks[5] = {1, 4, 16, 64, 128};
    const reference_shape shape = reference_attention_shape(&p->attention);
    const int block = blocks[data_below(random, 5)], n_queries = shape.n_queries;
    uint64_t tree[64];
    tqkv_attention a = p->attention;
    for (int i = 0; i < 64; i++) tree[i] = i % 2 ? UINT64_MAX : ((uint64_t)2 << i) - 1;
    a.tree = tree;
    if (!p->attention.tree && !a.non_causal && n_queries <= 64) attend_expect(p, &a, "in a tree");
    a = p->attention;
    a.scale = a.scale == 0.0f ? (float)(1.0 / sqrt((double)p->head_dim)) : a.scale;
    attend_expect(p, &a, "with the default scale");
    a = p->attention;
    if (a.list.rows || shape.end > INT32_MAX) return;
    const int64_t first = shape.lowest / block, n = shape.end / block + 1 - first;
    if (n * n_queries > 64 * MOST) return;
    int32_t *rows = (int32_t *)test_alloc((size_t)(n * n_queries) * sizeof *rows);
    for (int i = 0; i < n * n_queries; i++) rows[i] = (int32_t)(first + i % n);
    a.list.rows = rows;
    a.list.length = (int)n;
    a.list.block = block;
    attend_expect(p, &a, "with a list of all blocks");
    free(rows);
}

/* ---- Where positions lie ---- */

/* A pool with the positions from `first` on of a linear store, or of a ring that has them all; pages that no query sees
 * are not there. pages: [a->end / page_size + 2] */
static inline tqkv_store attend_paged(const tqkv_attention *a, const tqkv_store *s, int64_t first, data_random *random,
                                      int page_size, int32_t *pages)
{
    const int n_pages = (int)(a->end / page_size) + 2;
    const int64_t room = first + s->capacity;
    tqkv_store pool = test_store(s->format, s->head_dim, s->n_kv_heads, n_pages * page_size, false);
    const size_t codes = reference_row_bytes(s->format, s->head_dim);
    const size_t norms = (size_t)reference_norms_per_row(s->format, s->head_dim) * sizeof(float);
    pool.rotation = s->rotation;
    pool.block_scale = s->block_scale;
    pool.center = s->center;
    pool.channel_scale = s->channel_scale;
    pool.pages = pages;
    pool.n_pages = n_pages;
    pool.page_size = page_size;
    for (int i = 0; i < n_pages; i++) {
        const int j = data_below(random, i + 1);
        if (j < i) pages[i] = pages[j];
        pages[j] = i;
    }
    for (int64_t at = first; at < a->end && at < room; at++)
        for (int h = 0; h < s->n_kv_heads; h++) {
            memcpy((void *)(uintptr_t)reference_codes_at(&pool, h, at), reference_codes_at(s, h, at), codes);
            if (norms) memcpy((void *)(uintptr_t)reference_norms_at(&pool, h, at), reference_norms_at(s, h, at), norms);
        }
    for (int i = 0; i < n_pages; i++) {
        bool seen = false;
        for (int64_t at = i * page_size; at < (i + 1) * page_size; at++)
            seen = seen || (at >= first && at < room && attend_is_seen(a, at));
        if (!seen) pages[i] = i % 2 ? -1 : n_pages;
    }
    return pool;
}

/* A page that a query sees, but that is not there, is refused. pages: [n]; those that are seen lie in the pool */
static inline void attend_check_missing(const attend_problem *p, const tqkv_attention *a, data_random *random,
                                        int32_t *pages, int n)
{
    int at = data_below(random, n), left = n;
    while (left > 0 && (pages[at] < 0 || pages[at] >= n)) at = (at + 1) % n, left--;
    if (!left || a->first.n || a->last.n) return; /* some are read as halves alone */
    float *out = (float *)test_alloc_filled(attend_out_bytes(p), 0xff);
    const int32_t page = pages[at];
    pages[at] = at % 2 ? -1 : n;
    CHECK_RESULT(tqkv_attend(a, p->q, out), TQKV_OUT_OF_RANGE);
    CHECK(test_is_untouched(out, attend_out_bytes(p)), "written");
    pages[at] = page;
    free(out);
}

/* Keys with their tail, values or both, or the halves, in pages: the same bits, whole and as a slice. */
static inline void attend_check_pages(const attend_problem *p, data_random *random)
{
    static const int sizes[8] = {64, 16, 128, 1, 48, 64, 9, 256};
    const tqkv_attention *from = &p->attention;
    const reference_shape shape = reference_attention_shape(from);
    const bool shared = from->values == from->keys;
    const int which = 1 + data_below(random, 7), codes_size = sizes[data_below(random, 8)],
              halves_size = sizes[data_below(random, 8)];
    tqkv_store pools[7];
    int32_t *pages[7] = {NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    tqkv_attention a = *from;
    const tqkv_store **const places[7] = {&a.keys,         &a.values,    &a.tail,       &a.first.keys,
                                          &a.first.values, &a.last.keys, &a.last.values};
    if (from->end > from->keys->capacity || from->end > from->values->capacity || shape.end > 3000) return;
    if (from->keys->ring && from->first.n) return; /* which it adds apart */
    a.kv_len = (int)(shape.end - shape.oldest);
    for (int i = 0; i < 7; i++) {
        const tqkv_store *const store = *places[i];
        const int page_size = i < 3 ? codes_size : halves_size;
        data_random order = {random->state + (i == 1 ? 1u : (unsigned)i / 3)};
        if (!store || !(which >> (i > 2 ? 2 : i % 2) & 1)) continue;
        const int64_t first = i < 5 || from->end <= store->capacity ? 0 : from->end - store->capacity;
        pages[i] = (int32_t *)test_alloc((size_t)(from->end / page_size + 2) * sizeof(int32_t));
        pools[i] = attend_paged(from, store, first, &order, page_size, pages[i]);
        if (i == 2) pools[2].pages = pages[0];
        *places[i] = &pools[i];
    }
    if (shared) a.values = a.keys, a.first.values = a.first.keys, a.last.values = a.last.keys;
    attend_expect(p, &a, "in pages");
    for (int i = 0; i < 2 - shared; i++)
        if (pages[i]) attend_check_missing(p, &a, random, pages[i], pools[i].n_pages);
    for (int i = 0; i < 7; i++) {
        if (pages[i]) test_store_free(&pools[i]);
        free(pages[i]);
    }
}

/* Each allocation fails in turn, of a call and of a slice: nothing is written, and nothing leaks. */
static inline void attend_check_memory(const attend_problem *p)
{
    counting counter = {0, 0, 0, 0, 0};
    tqkv_attention a = p->attention;
    const reference_shape shape = reference_attention_shape(&a);
    a.allocator = counting_allocator(&counter);
    for (int partial = 0; partial < 2; partial++)
        for (tqkv_result r = TQKV_OUT_OF_MEMORY; r != TQKV_OK;) {
            attend_slice s = attend_new_slice(p), untouched = attend_new_slice(p);
            counter.calls = 0;
            counter.fail_at++;
            r = partial
                    ? tqkv_attend_partial(&a, p->q, shape.oldest, (int)(shape.end - shape.oldest), s.out, s.max, s.sum)
                    : tqkv_attend(&a, p->q, s.out);
            CHECK_NO_LEAK(&counter);
            CHECK(r == TQKV_OK || r == TQKV_OUT_OF_MEMORY, "%s", tqkv_result_string(r));
            CHECK(r == TQKV_OK || (!memcmp(s.out, untouched.out, attend_out_bytes(p)) &&
                                   !memcmp(s.max, untouched.max, p->n_rows * sizeof(float)) &&
                                   !memcmp(s.sum, untouched.sum, p->n_rows * sizeof(float))),
                  "allocation %d fails: written", counter.fail_at);
            if (r == TQKV_OK) counter.fail_at = 0;
            attend_free_slice(&s);
            attend_free_slice(&untouched);
        }
}

/* What slots hold that no query sees changes nothing. They hold NaN, or anything; now they are overwritten. */
static inline void attend_check_unseen(const attend_problem *p)
{
    const tqkv_attention *a = &p->attention;
    const tqkv_store *const stores[3] = {a->keys, a->values, a->tail};
    const reference_shape shape = reference_attention_shape(a);
    for (int64_t at = shape.oldest; at < shape.end; at++) {
        if (attend_is_seen(a, at)) continue;
        for (int i = 0; i < 3 * a->keys->n_kv_heads; i++) {
            const tqkv_store *s = stores[i % 3];
            if (!s) continue;
            memset((void *)(uintptr_t)reference_codes_at(s, i / 3, at), 0x91,
                   reference_row_bytes(s->format, s->head_dim));
            if (reference_norms_per_row(s->format, s->head_dim))
                *(float *)(uintptr_t)reference_norms_at(s, i / 3, at) = -1.0f;
        }
    }
    attend_expect(p, a, "with other numbers in slots that are not seen");
}

/* One stream that is described twice, and queries and outputs with gaps: the same bits, and nothing between rows. */
static inline void attend_check_gaps(const attend_problem *p, data_random *random)
{
    const size_t n_heads = (size_t)p->attention.n_heads, n_queries = p->n_rows / n_heads, gap = 16;
    const size_t dims[2] = {p->head_dim + gap, p->value_dim + gap};
    const bool by_head = data_below(random, 2);
    tqkv_attention a = p->attention;
    tqkv_store again = *a.keys;
    float *memory[2];
    tqkv_strides strides[2];
    if (a.values == a.keys) a.values = &again;
    for (int i = 0; i < 2; i++) {
        strides[i].token = by_head ? dims[i] : n_heads * dims[i] + gap;
        strides[i].head = by_head ? n_queries * dims[i] + gap : dims[i];
        memory[i] =
            (float *)test_alloc_filled((p->n_rows * dims[i] + (n_heads + n_queries) * gap) * sizeof(float), 0xff);
    }
    for (size_t r = 0; r < p->n_rows; r++)
        memcpy(memory[0] + r / n_heads * strides[0].token + r % n_heads * strides[0].head, p->q + r * p->head_dim,
               p->head_dim * sizeof(float));
    a.query_strides = strides[0];
    a.output_strides = strides[1];
    CHECK_RESULT(tqkv_attend(&a, memory[0], memory[1]), TQKV_OK);
    for (size_t r = 0; r < p->n_rows; r++) {
        const float *row = memory[1] + r / n_heads * strides[1].token + r % n_heads * strides[1].head;
        uint32_t behind;
        memcpy(&behind, row + p->value_dim, sizeof behind);
        CHECK(!memcmp(row, p->out + r * p->value_dim, p->value_dim * sizeof *row), "row %d with gaps", (int)r);
        CHECK(behind == UINT32_MAX, "the gap behind row %d", (int)r);
    }
    const reference_shape shape = reference_attention_shape(&a);
    const int n = (int)(shape.end - shape.oldest);
    attend_slice slices[2] = {attend_new_slice(p), attend_new_slice(p)};
    for (int i = 0; i < 2; i++)
        CHECK_RESULT(tqkv_attend_partial(i ? &a : &p->attention, i ? memory[0] : p->q, shape.oldest, n, slices[i].out,
                                         slices[i].max, slices[i].sum),
                     TQKV_OK);
    CHECK(!memcmp(slices[0].out, slices[1].out, attend_out_bytes(p)), "a slice of rows with gaps");
    attend_free_slice(&slices[0]);
    attend_free_slice(&slices[1]);
    free(memory[0]);
    free(memory[1]);
}

/* All of it; p->out becomes what attention gives. wild: numbers of any size, which have no error. */
static inline void attend_check_ways(attend_problem *p, uint64_t seed, bool wild)
{
    data_random random = {seed};
    float *sliced = (float *)test_alloc(attend_out_bytes(p));
    CHECK_RESULT(tqkv_attend(&p->attention, p->q, p->out), TQKV_OK);
    attend_check_hook(p, wild || p->poisoned >= 0);
    attend_check_sets(p);
    attend_check_company(p, &random);
    attend_check_memory(p);
    attend_check_masks(p, &random);
    attend_check_pages(p, &random);
    attend_check_gaps(p, &random);
    attend_check_unseen(p);
    attend_by_slices(p, &random, sliced);
    if (!wild) {
        attend_check(p, p->out, "out");
        attend_check(p, sliced, "slices");
    }
    free(sliced);
}

#endif
