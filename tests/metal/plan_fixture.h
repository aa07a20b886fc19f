/* Stores in buffers that are never read, plans of them, and what holds for every planned dispatch. */
#ifndef TQKV_TESTS_METAL_PLAN_FIXTURE_H
#define TQKV_TESTS_METAL_PLAN_FIXTURE_H

#include "../runner.h"
#include "sizes.h"

#include <limits.h>

/* What a call says after one change of what set_up makes. */
#define RESULT_AFTER(expected, set_up, call, change) \
    do { \
        set_up; \
        change; \
        CHECK_RESULT(call, TQKV_##expected); \
    } while (0)

/* A buffer that is never read or written. */
static inline tqkv_metal_buffer at(int number, size_t offset)
{
    static char things[16];
    tqkv_metal_buffer b;
    b.buffer = &things[number];
    b.offset = offset;
    return b;
}

static const tqkv_metal_buffer none = {NULL, 0};

/* Numbers of buffers; a scene's stores have those below. */
enum { Q = 8, SCRATCH, OUT, MORE, ARGUMENTS };

static inline tqkv_metal_store plan_store(tqkv_format format, int head_dim, int capacity, bool ring, int number)
{
    tqkv_metal_store s;
    memset(&s, 0, sizeof s);
    s.shape.format = format;
    s.shape.head_dim = head_dim;
    s.shape.n_kv_heads = 3;
    s.shape.capacity = capacity;
    s.shape.ring = ring;
    s.codes = at(number, 0);
    s.norms = at(number + 1, 0);
    return s;
}

/* An attention of one query over these, nothing else set. */
static inline tqkv_metal_attention plan_attention(const tqkv_metal_store *keys, const tqkv_metal_store *values)
{
    tqkv_metal_attention a;
    memset(&a, 0, sizeof a);
    a.keys = keys;
    a.values = values;
    a.attention.n_heads = keys ? keys->shape.n_kv_heads : 1;
    a.attention.n_queries = 1;
    return a;
}

/* -1: not set */
static inline int constant(const tqkv_metal_dispatch *d, int index) { return d->kernel.constants[index] - 1; }

/* The arguments of an attend dispatch, and of the merge behind it. */
static inline tqkv__attend_args attend_args(const tqkv_metal_dispatch *d)
{
    tqkv__attend_args args;
    memcpy(&args, d->arguments[0].bytes, sizeof args);
    return args;
}
static inline tqkv__merge_args merge_args(const tqkv_metal_dispatch *d)
{
    tqkv__merge_args args;
    memcpy(&args, d[1].arguments[0].bytes, sizeof args);
    return args;
}

static const char *overlapping(const tqkv_metal_dispatch *d)
{
    for (int i = 0; i < d->n_bindings; i++)
        if (tqkv_metal_overlapping(d, i)) return tqkv_metal_overlapping(d, i)->name;
    return "";
}

/* The limits of Metal: 32 KiB of threadgroup memory in multiples of 16, 1024 threads, one argument an index. */
static inline void check_dispatch(const tqkv_metal_dispatch *d)
{
    size_t memory = 0;
    unsigned indices = 0;
    for (int i = 0; i < d->n_arguments; i++) indices |= 1u << d->arguments[i].index;
    for (int i = 0; i < d->n_bindings; i++) {
        const int index = d->bindings[i].index;
        if (index == TQKV_METAL_ONLY_CHECKED) continue;
        CHECK(!(indices >> index & 1u), "index %d twice", index);
        indices |= 1u << index;
    }
    CHECK((indices & (indices + 1)) == 0, "indices %x", indices); /* 0, 1, 2 ... without gaps */
    CHECK(d->n_simdgroups <= d->kernel.most_simdgroups, "%d simdgroups of %d", d->n_simdgroups,
          d->kernel.most_simdgroups);
    const bool shared = d->kernel.family == TQKV_METAL_ATTEND_MATRIX && d->kernel.head_dim * TQKV__DIM_UNIT > 256;
    for (size_t n = 1; n <= (size_t)d->n_simdgroups; n++) {
        tqkv_metal_launch launch;
        memory = 0;
        if (shared && n < TQKV__LONG_SIMDGROUPS) { /* which share each row */
            CHECK_RESULT(tqkv_metal_plan_launch(d, 32 * n + 31, &launch), TQKV_UNSUPPORTED);
            continue;
        }
        CHECK_RESULT(tqkv_metal_plan_launch(d, 32 * n + 31, &launch), TQKV_OK);
        CHECK(launch.threads == 32 * n && !launch.threadgroups[0] == !d->grid[0], "%zu threads", launch.threads);
        for (int i = 0; i < TQKV_METAL_MEMORIES; i++) {
            CHECK(launch.memory[i] && launch.memory[i] % 16 == 0, "%zu bytes of memory %d", launch.memory[i], i);
            memory += launch.memory[i];
        }
    }
    CHECK(memory <= 32768, "%zu bytes of threadgroup memory", memory);
    CHECK(d->n_simdgroups > 0 && d->n_simdgroups <= 32 && d->grid[1] && d->grid[2], "no threads");
    CHECK(!*overlapping(d), "%s lies under another", overlapping(d));
}

/* The end of what a plan uses of a buffer. */
static inline size_t plan_end(const tqkv_metal_plan *plan, tqkv_metal_buffer of)
{
    size_t end = 0;
    for (int i = 0; i < plan->n; i++)
        for (int j = 0; j < plan->d[i].n_bindings; j++) {
            const tqkv_metal_binding *b = &plan->d[i].bindings[j];
            if (b->at.buffer == of.buffer && b->size && end < b->at.offset + b->size) end = b->at.offset + b->size;
        }
    return end;
}

/* What holds for every plan: its dispatches are right, or it has none. */
static inline tqkv_result check_plan(tqkv_result r, const tqkv_metal_plan *plan)
{
    CHECK(plan->result == r && (r == TQKV_OK || !plan->n), "%d dispatches", plan->n);
    for (int i = 0; i < plan->n; i++) check_dispatch(&plan->d[i]);
    return r;
}

/* In the scratch that the plan without it tells. */
static inline tqkv_result plan_attend(const tqkv_metal_attention *a, tqkv_metal_plan *plan)
{
    tqkv_metal_plan sizes;
    const tqkv_result r = check_plan(tqkv_metal_plan_attend(a, at(Q, 0), at(SCRATCH, 0), at(OUT, 0), plan), plan);
    CHECK_RESULT(tqkv_metal_plan_attend(a, none, none, none, &sizes), r);
    CHECK(plan_end(plan, at(SCRATCH, 0)) <= sizes.scratch_size, "%zu bytes of scratch", sizes.scratch_size);
    return r;
}

/* Of a cache in a buffer. */
static inline tqkv_result plan_append(const tqkv_cache *c, int n_tokens, tqkv_metal_plan *plan)
{
    return check_plan(tqkv_metal_plan_cache_append(c, at(0, 256), NULL, at(Q, 0), at(OUT, 0), n_tokens, none, plan),
                      plan);
}
static inline tqkv_result plan_queries(const tqkv_cache *c, int n_queries, tqkv_metal_plan *plan)
{
    return check_plan(
        tqkv_metal_plan_cache_attend(c, at(0, 256), NULL, NULL, at(Q, 0), n_queries, at(SCRATCH, 0), at(OUT, 0), plan),
        plan);
}

/* An attention, and all that it may read. */
typedef struct plan_scene {
    tqkv_metal_store keys, values, tail, first, last, first_tail;
    tqkv_metal_attention a;
    tqkv_metal_plan plan;
    int32_t pages[4];
} plan_scene;

/* Linear stores; halves of the first and newest positions; keys of 512 that are the values, with a tail; a pool of 5
   pages. */
typedef enum plan_kind { PLAIN, ENDS, LATENT, PAGED } plan_kind;

static inline tqkv_metal_store plan_pool(tqkv_format format, int number, const int32_t *pages)
{
    tqkv_metal_store s = plan_store(format, 64, 320, false, number);
    s.shape.pages = pages;
    s.shape.n_pages = 4;
    s.shape.page_size = 64;
    s.pages = at(MORE, 128 * (size_t)number);
    return s;
}

static inline void set_scene(plan_scene *s, plan_kind kind)
{
    static const int32_t pages[4] = {3, 0, 1, 2};
    memcpy(s->pages, pages, sizeof pages);
    s->keys = plan_store(TQKV_TQ4, kind == LATENT ? 512 : 64, 9000, false, 0);
    s->values = plan_store(TQKV_I8, 64, 9000, false, 2);
    if (kind == PAGED) s->keys = plan_pool(TQKV_I8, 0, s->pages), s->values = plan_pool(TQKV_TQ4, 2, s->pages);
    s->tail = plan_store(TQKV_I8, 64, 9000, false, 2);
    s->first = plan_store(TQKV_F16, kind == LATENT ? 512 : 64, 20, false, 4);
    s->last = plan_store(TQKV_F16, 64, 704, true, 4);
    s->first_tail = plan_store(TQKV_I8, 64, 20, false, 6);
    s->first.shape.rotation = s->last.shape.rotation = TQKV_ROTATION_ON;
    s->a = plan_attention(&s->keys, kind == LATENT ? &s->keys : &s->values);
    s->a.attention.n_heads = 6;
    s->a.attention.end = kind == PAGED ? 200 : 2000;
    if (kind == LATENT) s->a.tail = &s->tail;
    if (kind != ENDS) return;
    s->a.first.keys = s->a.first.values = &s->first;
    s->a.last.keys = s->a.last.values = &s->last;
    s->a.attention.first.n = 20;
    s->a.attention.last.n = 700;
}

/* Attention over a scene after one change: what planning it says; the name of an array that overlaps another. */
#define PLAN_IS(expected, kind, change) RESULT_AFTER(expected, set_scene(&s, kind), plan_attend(&s.a, &s.plan), change)
#define PLAN_OVERLAPS(name, change) \
    do { \
        RESULT_AFTER(OK, set_scene(&s, PLAIN), \
                     tqkv_metal_plan_attend(&s.a, at(Q, 0), at(SCRATCH, 0), at(OUT, 0), &s.plan), change); \
        CHECK(!strcmp(overlapping(s.plan.d), name), "%s: %s", #change, overlapping(s.plan.d)); \
    } while (0)

#endif
