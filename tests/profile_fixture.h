/* Profiles of models as files in memory, written by hand: what examples/profile.h must read, and edits of it. */
#ifndef TQKV_TESTS_PROFILE_FIXTURE_H
#define TQKV_TESTS_PROFILE_FIXTURE_H

#include "examples/profile.h"
#include "tests/runner.h"

typedef struct profile_made {
    int n_layers, n_kv_heads, head_dim;
    bool has_plan, swap; /* swap: the scales come before the centres */
    uint32_t version, alignment;
} profile_made;

typedef struct profile_bytes {
    uint8_t *bytes;
    size_t size, room, hash_at;
} profile_bytes;

static inline void profile_put(profile_bytes *to, const void *bytes, size_t n)
{
    if (to->size + n > to->room) {
        uint8_t *larger = (uint8_t *)test_alloc(to->room = 2 * (to->size + n));
        if (to->size) memcpy(larger, to->bytes, to->size);
        free(to->bytes);
        to->bytes = larger;
    }
    if (n) memcpy(to->bytes + to->size, bytes, n);
    to->size += n;
}

static inline void profile_put_number(profile_bytes *to, uint64_t number, int n_bytes)
{
    for (int i = 0; i < n_bytes; i++) {
        const uint8_t byte = (uint8_t)(number >> (8 * i));
        profile_put(to, &byte, 1);
    }
}

static inline void profile_put_string(profile_bytes *to, const char *text)
{
    profile_put_number(to, strlen(text), 8);
    profile_put(to, text, strlen(text));
}

static inline void profile_put_field(profile_bytes *to, const char *name, uint64_t value)
{
    profile_put_string(to, name);
    profile_put_number(to, PROFILE_U32, 4);
    profile_put_number(to, value, 4);
}

static inline void profile_put_plan(profile_bytes *to, const char *name, const profile_made *made, int step)
{
    profile_put_string(to, name);
    profile_put_number(to, PROFILE_ARRAY, 4);
    profile_put_number(to, PROFILE_STRING, 4);
    profile_put_number(to, (uint64_t)made->n_layers, 8);
    for (int i = 0; i < made->n_layers; i++)
        profile_put_string(to, tqkv_format_name((i + step) % 2 ? TQKV_TQ4 : TQKV_I8));
}

static inline void profile_put_header(profile_bytes *to, const profile_made *made)
{
    profile_put(to, "GGUF", 4);
    profile_put_number(to, 3, 4);
    profile_put_number(to, 2 * (uint64_t)made->n_layers, 8);
    profile_put_number(to, made->has_plan ? 8 : 6, 8);
    profile_put_string(to, "general.architecture");
    profile_put_number(to, PROFILE_STRING, 4);
    profile_put_string(to, "tqkv");
    profile_put_string(to, "some.numbers"); /* of no meaning */
    profile_put_number(to, PROFILE_ARRAY, 4);
    profile_put_number(to, 3, 4);
    profile_put_number(to, 2, 8);
    profile_put_number(to, 0x12345678, 4);
    profile_put_field(to, "tqkv.version", made->version);
    profile_put_field(to, "tqkv.layer_count", (uint64_t)made->n_layers);
    profile_put_field(to, "general.alignment", made->alignment);
    if (made->has_plan) {
        profile_put_plan(to, "tqkv.key_formats", made, 0);
        profile_put_plan(to, "tqkv.value_formats", made, 1);
    }
    profile_put_string(to, "tqkv.hash");
    profile_put_number(to, PROFILE_U64, 4);
    to->hash_at = to->size;
    profile_put_number(to, 0, 8);
}

/* The value i of a layer's centre or scale. */
static inline float profile_value(int layer, bool is_scale, size_t i)
{
    return is_scale ? 0.5f + (float)((i + (size_t)layer) % 7) : (float)i - 8.0f * (float)layer;
}

static inline void profile_fix_hash(uint8_t *bytes, size_t size, size_t hash_at)
{
    if (hash_at > size || size - hash_at < 8) return;
    memset(bytes + hash_at, 0, 8);
    const uint64_t hash = XXH3_64bits(bytes, size);
    for (int i = 0; i < 8; i++) bytes[hash_at + (size_t)i] = (uint8_t)(hash >> (8 * i));
}

static inline profile_bytes profile_make(const profile_made *made)
{
    profile_bytes file = {NULL, 0, 0, 0};
    const size_t values = (size_t)made->n_kv_heads * (size_t)made->head_dim;
    const size_t room = (4 * values + made->alignment - 1) / made->alignment * made->alignment;
    profile_put_header(&file, made);
    for (int i = 0; i < 2 * made->n_layers; i++) {
        char name[32];
        snprintf(name, sizeof name, "blk.%d.%s", i / 2, (i % 2 != 0) != made->swap ? "key_scale" : "key_center");
        profile_put_string(&file, name);
        profile_put_number(&file, 2, 4);
        profile_put_number(&file, (uint64_t)made->head_dim, 8);
        profile_put_number(&file, (uint64_t)made->n_kv_heads, 8);
        profile_put_number(&file, 0, 4);
        profile_put_number(&file, (uint64_t)i * room, 8);
    }
    while (file.size % made->alignment) profile_put_number(&file, 0, 1);
    for (int i = 0; i < 2 * made->n_layers; i++) {
        for (size_t j = 0; j < values; j++) {
            const float value = profile_value(i / 2, (i % 2 != 0) != made->swap, j);
            uint32_t bits;
            memcpy(&bits, &value, 4);
            profile_put_number(&file, bits, 4);
        }
        for (size_t j = 4 * values; j < room; j++) profile_put_number(&file, 0, 1);
    }
    profile_fix_hash(file.bytes, file.size, file.hash_at);
    return file;
}

#endif
