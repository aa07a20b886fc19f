/* For a report of a Mac without Homebrew, where xxhash.h is missing. The report compares hashes only with each other,
   so any will do: this is FNV-1a. Snapshots written with it are no snapshots, and test_tables.c would fail. */
#ifndef TQKV_REPORT_HASH_H
#define TQKV_REPORT_HASH_H
#include <stddef.h>
#include <stdint.h>

#define XXH_VERSION_NUMBER 800
typedef struct XXH3_state_t {
    uint64_t hash;
} XXH3_state_t;
#define XXH3_INITSTATE(state) ((void)(state))

static inline int XXH3_64bits_reset(XXH3_state_t *state)
{
    state->hash = 0xcbf29ce484222325u;
    return 0;
}

static inline int XXH3_64bits_update(XXH3_state_t *state, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) state->hash = (state->hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return 0;
}

static inline uint64_t XXH3_64bits_digest(const XXH3_state_t *state) { return state->hash; }

static inline uint64_t XXH3_64bits(const void *bytes, size_t n)
{
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, bytes, n);
    return XXH3_64bits_digest(&state);
}

#endif
