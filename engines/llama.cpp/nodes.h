/* The nodes of a graph that the backend takes: writing rows into a KV cache, attention over it, turning its keys. */
#pragma once
#include "buffer.h"

namespace tqkv_llama
{

/* Whether the backend computes this node. Where it meets a KV cache that tqkv cannot hold, that cache becomes
   llama.cpp's own. */
bool takes_node(const ggml_tensor *node);
ggml_status compute_nodes(ggml_cgraph *graph, int n_threads);

} // namespace tqkv_llama
