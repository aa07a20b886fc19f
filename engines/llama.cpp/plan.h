/* Which query of a graph sees which cells, from the mask alone: llama.cpp tells a backend nothing of sequences. */
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tqkv_llama
{

/* Halves [stream][query][cell], 0 where the query sees the cell and minus infinity where not. */
struct mask_view {
    const void *data;
    size_t row_bytes, stream_bytes;
    int n_cells, n_queries, n_streams;
    int first_cell, cells_a_stream; /* of stream 0 here, in the cache */
};

/* Queries that follow each other in one sequence: each sees what the one before saw and its own cell and, under a
   window, not the oldest any more. */
struct run {
    int first, n_queries;       /* in the order of the queries of all streams */
    std::vector<int32_t> cells; /* in the order of their positions, up to the last query's own */
    int window;                 /* 0: none */
    /* The cells in pages of 64, where they lie in whole ones; the first may begin within its page. */
    std::vector<int32_t> pages;
};

/* own: [n_streams][n_queries] the cell that each query's token was written to, or NULL; order: [cells of the cache] by
   which cells of a sequence are sorted. False: a mask that adds something to scores. */
bool make_runs(const mask_view &mask, const int32_t *own, const uint32_t *order, std::vector<run> *runs);

} // namespace tqkv_llama
