/* Memory of llama.cpp's KV cache. The device's buffer type is the processor's memory, but for a KV cache that tqkv can
 * hold: that one gets a buffer of a type which is not the host's, so that no other backend looks into it. Its address
 * space is never touched; its rows are in a cache. */
#pragma once
#include "cache.h"

#include "ggml-backend-impl.h"

namespace tqkv_llama
{

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device);
ggml_backend_buffer_type_t cache_buffer_type();

/* A tensor of a KV cache that tqkv holds. */
struct cache_tensor {
    cache *owner = nullptr; /* NULL: it is none */
    layer *at = nullptr;
    side which = KEYS;
    const ggml_tensor *root = nullptr;
};
cache_tensor find_cache_tensor(const ggml_tensor *t);
/* A KV tensor of a context that is made only to measure its memory: it has no memory. */
bool is_measured(const ggml_tensor *t);

/* What tqkv cannot do is left to llama.cpp's own cache: the buffer becomes the processor's. Says why, unless the reason
   is NULL. False, and nothing is changed, if it holds rows already. */
bool leave_to_host(const ggml_tensor *t, const char *reason);

/* Says once that no KV cache was put here, which llama.cpp itself does in silence. */
void warn_without_cache();

/* Before the first rows of a cache: says once what is stored, and in how much memory. */
void announce(const ggml_tensor *t);

} // namespace tqkv_llama
