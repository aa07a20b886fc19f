/* Stores in buffers that are never read, plans of them, and what holds for every planned dispatch. */
#ifndef TQKV_TESTS_METAL_PLAN_FIXTURE_H
#define TQKV_TESTS_METAL_PLAN_FIXTURE_H

#include "../runner.h"
#include "sizes.h"

#include <limits.h>

/* A buffer that is never read or written. */
static inline tqkv_metal_buffer at(int number, size_t offset)
{
    static char things[8];
    tqkv_metal_buffer b;
    b.buffer = &things[number];
    b.offset = offset;
    return b;
}

static const tqkv_metal_buffer none = {NULL, 0};

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

/* The last binding of that name. */
static inline tqkv_metal_binding binding(const tqkv_metal_dispatch *d, const char *name)
{
    tqkv_metal_binding found;
    memset(&found, 0, sizeof found);
    for (int i = 0; i < d->n_bindings; i++)
        if (!strcmp(d->bindings[i].name, name)) found = d->bindings[i];
    CHECK(found.name, "no %s", name);
    return found;
}

/* -1: not set */
static inline int constant(const tqkv_metal_dispatch *d, int index) { return d->kernel.constants[index] - 1; }

/* The arguments of an attend dispatch, of the merge behind it, and number i of a dispatch that encodes or decodes. */
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
static inline tqkv__rows_args rows_args(const tqkv_metal_dispatch *d, int i)
{
    tqkv__rows_args args;
    memcpy(&args, d->arguments[i].bytes, sizeof args);
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

/* Checks all dispatches of a plan. */
static inline void check_plan(const tqkv_metal_plan *plan)
{
    for (int i = 0; i < plan->n; i++) check_dispatch(&plan->d[i]);
}

static inline tqkv_result plan_attend(const tqkv_metal_attention *a, tqkv_metal_plan *plan)
{
    const tqkv_result r = tqkv_metal_plan_attend(a, at(4, 0), at(5, 0), at(6, 0), plan);
    CHECK(plan->result == r && (plan->n > 0) == (r == TQKV_OK), "%d dispatches", plan->n);
    check_plan(plan);
    return r;
}

/* The scratch that a call needs, which its plan without scratch tells. */
static inline tqkv_result plan_scratch(const tqkv_metal_attention *a, size_t *bytes)
{
    tqkv_metal_plan plan;
    const tqkv_result r = tqkv_metal_plan_attend(a, none, none, none, &plan);
    *bytes = plan.scratch_size;
    return r;
}

/* A pool of 5 pages, and a table of 4. */
static inline tqkv_metal_store plan_pool(tqkv_format format, int number, const int32_t *pages)
{
    tqkv_metal_store s = plan_store(format, 64, 320, false, number);
    s.shape.pages = pages;
    s.shape.n_pages = 4;
    s.shape.page_size = 64;
    s.pages = at(7, 128 * (size_t)number);
    return s;
}

#endif
