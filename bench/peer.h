/* The same work by a peer: ggml, or its fork in ik_llama.cpp. Each is a shared object, bench/ggml.c linked with that
   library: both have the same symbols, and bench loads them side by side. */
#ifndef BENCH_PEER_H
#define BENCH_PEER_H

#include "stream.h"
#include "timing.h"

typedef struct peer peer;

/* What a shared object exports as peer_exports. The names of all entries hold "ggml_". */
typedef struct peer_library {
    /* Prepares the peer's ways to compute this shape. keys, values: F16 streams of that shape, which it reads in place.
       q: [n_queries][n_heads][head_dim]. Returns NULL if the peer would need minutes. */
    peer *(*open)(const bench_shape *shape, const bench_stream *keys, const bench_stream *values, const float *q);
    void (*add)(peer *p, timing *t);
    /* Exits if the peer's flash attention over f16 disagrees with out: [n_queries][n_heads][head_dim]. Short contexts
       only. */
    void (*check)(peer *p, const float *out);
    void (*close)(peer *p);
    /* Adds conversions of source: [n_rows][head_dim] to the peer's formats. */
    void (*add_encoders)(timing *t, const float *source, int n_rows, int head_dim);
} peer_library;

#endif
