// A layer with a sliding window, token by token: a ring that holds the window alone gives what a cache of the whole
// context gives, in a fraction of the memory.
#include "tqkv.h"

#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

namespace
{
struct CacheDeleter {
    void operator()(tqkv_cache *cache) const { tqkv_cache_destroy(cache); }
};
using Cache = std::unique_ptr<tqkv_cache, CacheDeleter>;

constexpr int head_dim = 64, n_heads = 4, n_kv_heads = 2, window = 256, n_tokens = 2000;

Cache make_cache(int capacity, bool ring)
{
    tqkv_cache_desc desc = {};
    desc.head_dim = head_dim;
    desc.n_heads = n_heads;
    desc.n_kv_heads = n_kv_heads;
    desc.capacity = capacity;
    desc.ring = ring;
    desc.window = window;
    tqkv_cache *cache = nullptr;
    const tqkv_result result = tqkv_cache_create(&desc, &cache);
    if (result != TQKV_OK) std::printf("create: %s\n", tqkv_result_string(result));
    return Cache(cache);
}

// Something smooth in place of a model's projections.
void fill(std::vector<float> &row, int token, float phase)
{
    for (std::size_t i = 0; i < row.size(); i++)
        row[i] = std::sin(phase + 0.37f * static_cast<float>(i) + 0.11f * static_cast<float>(token));
}
} // namespace

int main()
{
    const Cache ring = make_cache(window, true), whole = make_cache(n_tokens, false);
    if (!ring || !whole) return 1;
    std::vector<float> k(n_kv_heads * head_dim), v(k.size()), q(n_heads * head_dim), a(q.size()), b(q.size());
    float difference = 0;
    for (int token = 0; token < n_tokens; token++) {
        fill(k, token, 0.0f);
        fill(v, token, 1.0f);
        fill(q, token, 2.0f);
        for (tqkv_cache *cache : {ring.get(), whole.get()}) {
            if (tqkv_cache_append(cache, k.data(), v.data(), 1) != TQKV_OK) return 1;
            if (tqkv_cache_attend(cache, q.data(), 1, cache == ring.get() ? a.data() : b.data()) != TQKV_OK) return 1;
        }
        for (std::size_t i = 0; i < a.size(); i++) difference = std::fmax(difference, std::fabs(a[i] - b[i]));
    }
    const bool good = difference < 1e-5f;
    std::printf(
        "%d tokens through a window of %d: %zu bytes in the ring, %zu in the whole cache; outputs differ by %g: %s\n",
        n_tokens, window, tqkv_cache_bytes(ring.get()), tqkv_cache_bytes(whole.get()), static_cast<double>(difference),
        good ? "as expected" : "WRONG");
    return good ? 0 : 1;
}
