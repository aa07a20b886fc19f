/* An allocator and a stream in memory. Both count their calls and fail at the call that a test names. */
#ifndef TQKV_TESTS_COUNTING_H
#define TQKV_TESTS_COUNTING_H

#include "runner.h"

typedef struct counting {
    int calls, fail_at; /* call number fail_at returns NULL, counted from 1; 0: none */
    int live;           /* blocks not yet freed */
    int wrong_sizes;    /* frees with a size that is not the block's */
    size_t largest;     /* of the blocks asked for */
} counting;

enum { COUNTING_HEADER = 64 };

static inline void *counting_alloc(void *user, size_t size)
{
    counting *counter = (counting *)user;
    if (size > counter->largest) counter->largest = size;
    if (++counter->calls == counter->fail_at) {
        test_faults++;
        return NULL;
    }
    unsigned char *block = (unsigned char *)test_alloc(size + COUNTING_HEADER);
    memcpy(block, &size, sizeof size);
    memset(block + COUNTING_HEADER, 0xa5, size); /* shows reads of memory that was not written */
    counter->live++;
    return block + COUNTING_HEADER;
}

static inline void counting_free(void *user, void *pointer, size_t size)
{
    counting *counter = (counting *)user;
    if (!pointer) return;
    unsigned char *block = (unsigned char *)pointer - COUNTING_HEADER;
    if (memcmp(block, &size, sizeof size)) counter->wrong_sizes++;
    counter->live--;
    free(block);
}

static inline tqkv_allocator counting_allocator(counting *counter)
{
    tqkv_allocator allocator;
    allocator.alloc = counting_alloc;
    allocator.free = counting_free;
    allocator.user = counter;
    return allocator;
}

/* Every block was freed, with its own size. */
#define CHECK_NO_LEAK(counter) \
    do { \
        CHECK((counter)->live == 0, "%d blocks leaked", (counter)->live); \
        CHECK((counter)->wrong_sizes == 0, "%d blocks freed with a wrong size", (counter)->wrong_sizes); \
    } while (0)

/* ---- Streams ---- */

typedef struct failing_call {
    size_t largest, answer; /* most bytes that a call moves, 0: all; what the failing call returns */
    bool one_more;          /* the failing call returns the size asked for plus one */
} failing_call;

typedef struct stream {
    unsigned char *bytes;
    size_t size, room, at;
    failing_call call;
    int calls, fail_at; /* call number fail_at fails, counted from 1; 0: none */
} stream;

static inline size_t stream_share(stream *s, size_t n)
{
    return s->call.largest && n > s->call.largest ? s->call.largest : n;
}

static inline bool stream_fails(stream *s)
{
    if (++s->calls != s->fail_at) return false;
    test_faults++;
    return true;
}

static inline size_t stream_write(void *user, const void *bytes, size_t n)
{
    stream *s = (stream *)user;
    if (stream_fails(s)) return s->call.one_more ? n + 1 : s->call.answer;
    size_t share = stream_share(s, n);
    if (!s->bytes || s->size + share > s->room) {
        s->room = 2 * (s->size + share) + 1;
        s->bytes = (unsigned char *)realloc(s->bytes, s->room);
        if (!s->bytes) exit(2);
    }
    if (share) memcpy(s->bytes + s->size, bytes, share);
    s->size += share;
    return share;
}

static inline size_t stream_read(void *user, void *bytes, size_t n)
{
    stream *s = (stream *)user;
    if (stream_fails(s)) return s->call.one_more ? n + 1 : s->call.answer;
    size_t share = stream_share(s, n);
    if (share > s->size - s->at) share = s->size - s->at;
    if (share) memcpy(bytes, s->bytes + s->at, share);
    s->at += share;
    return share;
}

static inline stream stream_empty(void)
{
    stream s;
    memset(&s, 0, sizeof s);
    return s;
}

static inline void stream_fail(stream *s, const failing_call *call, int fail_at)
{
    s->call = *call;
    s->fail_at = fail_at;
}

static inline void stream_rewind(stream *s)
{
    s->at = 0;
    s->calls = 0;
}

static inline void stream_free(stream *s)
{
    free(s->bytes);
    *s = stream_empty();
}

/* The snapshot of a cache. The caller frees it. */
static inline stream stream_of_cache(const tqkv_cache *cache)
{
    stream s = stream_empty();
    CHECK_RESULT(tqkv_cache_save(cache, stream_write, &s), TQKV_OK);
    return s;
}

static inline bool stream_is_equal(const stream *a, const stream *b)
{
    return a->size == b->size && (a->size == 0 || !memcmp(a->bytes, b->bytes, a->size));
}

#endif
