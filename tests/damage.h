/* What damaged bytes and failing streams do to anything that is saved and loaded. */
#ifndef TQKV_TESTS_DAMAGE_H
#define TQKV_TESTS_DAMAGE_H

#include "counting.h"
#include "reference.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

typedef struct saved_thing {
    tqkv_result (*save)(const struct saved_thing *s, stream *to);
    tqkv_result (*load)(const struct saved_thing *s, stream *from); /* checks what a refused one leaves, too */
    const void *from, *to;
} saved_thing;

static inline stream damage_stream(const saved_thing *s)
{
    stream bytes = stream_empty();
    CHECK_RESULT(s->save(s, &bytes), TQKV_OK);
    return bytes;
}

static inline void damage_expect(const saved_thing *s, stream *bytes, tqkv_result expected, const char *what, size_t at)
{
    stream_rewind(bytes);
    const tqkv_result result = s->load(s, bytes);
    CHECK(result == expected, "%s %d: %s", what, (int)at, tqkv_result_string(result));
}

/* Every byte changed, every length cut, one byte moved from the middle to the end. */
static inline void damage_bytes(const saved_thing *s)
{
    static const unsigned char masks[4] = {0x01, 0x80, 0xff, 0x10};
    stream bytes = damage_stream(s);
    const size_t whole = bytes.size;
    for (size_t i = 0; i < whole; i++)
        for (size_t m = 0; m < (whole < 1500 ? 4 : 1); m++) {
            bytes.bytes[i] ^= masks[(m + i) % 4];
            damage_expect(s, &bytes, TQKV_CORRUPT, "flipped byte", i);
            bytes.bytes[i] ^= masks[(m + i) % 4];
        }
    for (bytes.size = 0; bytes.size < whole; bytes.size++) damage_expect(s, &bytes, TQKV_CORRUPT, "length", bytes.size);
    for (size_t i = 0; i + 1 < whole; i++) {
        unsigned char *rest = bytes.bytes + i, moved = *rest, *last = bytes.bytes + whole - 1;
        if (moved == rest[1]) continue;
        memmove(rest, rest + 1, (size_t)(last - rest));
        *last = moved;
        damage_expect(s, &bytes, TQKV_CORRUPT, "moved byte", i);
        memmove(rest + 1, rest, (size_t)(last - rest));
        *rest = moved;
    }
    damage_expect(s, &bytes, TQKV_OK, "whole", whole);
    stream_free(&bytes);
}

/* Call n of a writer, and of a reader, moves 0 bytes or more than it should, for every n, of short calls too. */
static inline void damage_calls(const saved_thing *s, const failing_call *call)
{
    const tqkv_result expected = call->one_more || call->answer ? TQKV_IO : TQKV_CORRUPT;
    stream whole = stream_empty(), fast = damage_stream(s);
    stream_fail(&whole, call, 0);
    CHECK_RESULT(s->save(s, &whole), TQKV_OK);
    const int writes = whole.calls;
    for (int n = 1; n <= writes; n++) {
        stream failing = stream_empty();
        stream_fail(&failing, call, n);
        const tqkv_result result = s->save(s, &failing);
        CHECK(result == TQKV_IO && failing.calls == n, "write %d of %d: %s after %d", n, writes,
              tqkv_result_string(result), failing.calls);
        stream_free(&failing);
    }
    damage_expect(s, &whole, TQKV_OK, "short reads", 0);
    for (int n = 1, reads = whole.calls; n <= reads; n++) {
        stream_fail(&whole, call, n);
        damage_expect(s, &whole, expected, "read", (size_t)n);
        CHECK(whole.calls == n, "%d reads after the failed one", whole.calls - n);
    }
    stream after = damage_stream(s);
    CHECK(stream_is_equal(&whole, &fast) && stream_is_equal(&whole, &after), "short or failed writes give other bytes");
    stream_free(&whole);
    stream_free(&fast);
    stream_free(&after);
}

/* Puts an integer at an offset in the part [begin, end), whose hash follows it. */
static inline void damage_put(stream *s, size_t begin, size_t end, size_t offset, int bytes, uint64_t value)
{
    for (int i = 0; i < bytes; i++) s->bytes[offset + (size_t)i] = (unsigned char)(value >> (8 * i));
    const uint64_t hash = XXH3_64bits(s->bytes + begin, end - begin);
    for (int i = 0; i < 8; i++) s->bytes[end + (size_t)i] = (unsigned char)(hash >> (8 * i));
}

/* A field of a header, little-endian: what else it may be; most 0: nothing. */
typedef struct field_row {
    const char *name;
    int offset, bytes;
    uint64_t least, most, step; /* least, least + step, ... most */
    int set;                    /* of things that have it so, in bits; or what a load of another value gives */
} field_row;

/* Each bit of the field changed, and values beside its range and far away, in headers with a valid hash. */
static inline void damage_field(const saved_thing *s, const field_row *row, size_t header_size, tqkv_result expected)
{
    const int bits = 8 * row->bytes;
    const uint64_t all = UINT64_MAX >> (64 - bits);
    stream bytes = damage_stream(s);
    uint64_t is = 0;
    for (int i = row->bytes; i-- > 0;) is = is << 8 | bytes.bytes[row->offset + i];
    const uint64_t low = row->most ? row->least : is, high = row->most ? row->most : is;
    const uint64_t far[5] = {low - 1, high + 1, 0, all, (uint64_t)3 << (bits - 2)};
    for (int i = 0; i < bits + 5; i++) {
        const uint64_t value = (i < bits ? is ^ (uint64_t)1 << i : far[i - bits]) & all;
        if (value == is || (value >= low && value <= high && (value - low) % row->step == 0)) continue;
        damage_put(&bytes, 0, header_size, (size_t)row->offset, row->bytes, value);
        damage_expect(s, &bytes, expected, row->name, (size_t)value);
    }
    stream_free(&bytes);
}

/* No slot of a store filled with 0xff was written but those of n positions. */
static inline void damage_others(const tqkv_store *s, int64_t position, int n)
{
    tqkv_store slots = *s;
    slots.pages = NULL;
    slots.ring = false;
    const size_t codes = reference_row_bytes(s->format, s->head_dim);
    const size_t norms = (size_t)reference_norms_per_row(s->format, s->head_dim) * sizeof(float);
    for (int slot = 0; slot < s->capacity; slot++) {
        bool named = false;
        for (int i = 0; i < n; i++) named = named || reference_slot(s, position + i) == slot;
        for (int h = 0; h < s->n_kv_heads && !named; h++)
            CHECK(test_is_untouched(reference_codes_at(&slots, h, slot), codes) &&
                      (!norms || test_is_untouched(reference_norms_at(&slots, h, slot), norms)),
                  "slot %d was written", slot);
    }
}

typedef struct damage_row {
    int index;
    failing_call call;
} damage_row;

/* Cases NAME/zero/0 and so on of thing number `index`. */
static inline void damage_add_calls(void (*check)(const void *row), const char *name, int index)
{
    static const size_t largest[4] = {0, 1, 7, 100};
    static const char *const kinds[3] = {"zero", "more", "one_more"};
    for (int i = 0; i < 12; i++) {
        const damage_row row = {index, {largest[i / 3], i % 3 == 1 ? SIZE_MAX : 0, i % 3 == 2}};
        test_add(check, &row, sizeof row, "%s/%s/%d/%d", name, kinds[i % 3], (int)row.call.largest, index);
    }
}

#endif
