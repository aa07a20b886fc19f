/* With sets left out, or the plans of GPU calls put in: a cache works. Prints the set in use. */
#ifdef TQKV_METAL
#include "tqkv_metal.m"
#else
#define TQKV_IMPLEMENTATION
#include "tqkv.h"
#endif

#include <stdio.h>

int main(void)
{
    static float rows[4 * 64], out[64];
    tqkv_cache_desc desc;
    tqkv_cache *cache;
    for (int i = 0; i < 4 * 64; i++) rows[i] = (float)(i * 37 % 101) - 50.0f;
    memset(&desc, 0, sizeof desc);
    desc.head_dim = 64;
    desc.n_kv_heads = desc.n_heads = 1;
    desc.capacity = 4;
    if (tqkv_cache_create(&desc, &cache) != TQKV_OK) return 1;
    if (tqkv_cache_append(cache, rows, rows, 4) != TQKV_OK || tqkv_cache_attend(cache, rows, 1, out) != TQKV_OK)
        return 2;
    tqkv_cache_destroy(cache);
    puts(tqkv_isa_name());
    return out[0] == out[0] ? 0 : 4;
}
