/* What caches take in memory, for README's table: bytes of one layer as it is created, at its largest, and when 32,768
 * positions have come. A line each: bytes NAME created N largest N full N. */
#include "tqkv.h"

#include <stdio.h>
#include <stdlib.h>

enum { HEAD_DIM = 128, KV_HEADS = 8, POSITIONS = 32768, CHUNK = 512 };

static float rows[CHUNK * KV_HEADS * HEAD_DIM];

static void call(tqkv_result result)
{
    if (result == TQKV_OK) return;
    fprintf(stderr, "bytes: %s\n", tqkv_result_string(result));
    exit(1);
}

static void print_bytes(const char *name, tqkv_cache_desc desc)
{
    tqkv_cache *cache;
    desc.head_dim = HEAD_DIM;
    desc.n_kv_heads = KV_HEADS;
    desc.n_heads = KV_HEADS;
    desc.capacity = POSITIONS;
    call(tqkv_cache_create(&desc, &cache));
    const size_t created = tqkv_cache_bytes(cache);
    size_t largest = created;
    for (int i = 0; i < POSITIONS; i += CHUNK) {
        call(tqkv_cache_append(cache, rows, rows, CHUNK));
        if (tqkv_cache_bytes(cache) > largest) largest = tqkv_cache_bytes(cache);
    }
    printf("bytes %s created %zu largest %zu full %zu\n", name, created, largest, tqkv_cache_bytes(cache));
    tqkv_cache_destroy(cache);
}

int main(void)
{
    const tqkv_cache_desc halves = {.key_format = TQKV_F16, .value_format = TQKV_F16};
    const tqkv_cache_desc four = {.key_format = TQKV_TQ4, .value_format = TQKV_TQ4};
    for (int i = 0; i < CHUNK * KV_HEADS * HEAD_DIM; i++) rows[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    print_bytes("safe", tqkv_cache_preset(TQKV_SAFE));
    print_bytes("small", tqkv_cache_preset(TQKV_SMALL));
    print_bytes("tiny", tqkv_cache_preset(TQKV_TINY));
    print_bytes("i8/tq4", (tqkv_cache_desc){0});
    print_bytes("tq4/tq4", four);
    print_bytes("f16/f16", halves);
    return 0;
}
