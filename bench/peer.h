/* The same work by ggml: bench/ggml.c, built only with GGML_PREFIX, the folder where ggml is installed. */
#ifndef BENCH_PEER_H
#define BENCH_PEER_H

#include "stream.h"
#include "timing.h"

typedef struct peer peer;

/* Makes entries for ggml's ways to compute this shape. keys, values: F16 streams of that shape, which ggml reads in place.
   q: [n_queries][n_heads][head_dim]. Returns NULL if ggml would need minutes. */
peer *peer_open(const bench_shape *shape, const bench_stream *keys, const bench_stream *values, const float *q);
void peer_add(peer *p, timing *t);
/* Exits if ggml's flash attention over f16 disagrees with out: [n_queries][n_heads][head_dim]. Short contexts only. */
void peer_check(peer *p, const float *out);
void peer_close(peer *p);

/* Adds ggml's conversions of source: [n] to f16, q8_0 and q4_0. */
void peer_add_encoders(timing *t, const float *source, int n);

#endif
