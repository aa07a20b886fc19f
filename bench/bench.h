/* What the files of the benchmark share: the pairs of formats, the state of a run,
 * its calls and the lines that it prints. */
#ifndef BENCH_BENCH_H
#define BENCH_BENCH_H

#include "stream.h"
#include "peak.h"
#include "peer.h"
#include "timing.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct pair {
    const char *name;
    tqkv_format keys, values;
    tqkv_type type; /* of queries and outputs */
} pair;

#define PAIR(name, keys, values) \
    { \
        name, keys, values, TQKV_TYPE_F32 \
    }
static const pair pairs[] = {
    PAIR("f16", TQKV_F16, TQKV_F16),
    PAIR("i8", TQKV_I8, TQKV_I8),
    PAIR("tq8", TQKV_TQ8, TQKV_TQ8),
    PAIR("tq6", TQKV_TQ6, TQKV_TQ6),
    PAIR("tq5", TQKV_TQ5, TQKV_TQ5),
    PAIR("tq4", TQKV_TQ4, TQKV_TQ4),
    PAIR("tq3", TQKV_TQ3, TQKV_TQ3),
    PAIR("tq2", TQKV_TQ2, TQKV_TQ2),
    PAIR("tq6_bytes", TQKV_TQ6_BYTES, TQKV_TQ6_BYTES),
    PAIR("tq5_bytes", TQKV_TQ5_BYTES, TQKV_TQ5_BYTES),
    PAIR("default", TQKV_I8, TQKV_TQ4),
    {"default_bf16", TQKV_I8, TQKV_TQ4, TQKV_TYPE_BF16},
};

enum { FORMATS = TQKV_TQ2 + 1 };

static const int head_dims[] = {64, 80, 96, 128, 192, 256, 512};

typedef struct options {
    int head_dim, context, group, queries, rounds, threads, quick, help; /* 0: all, or the default */
    const char *isa, *format, *only, *peers[2];                          /* peers: shared objects */
} options;

typedef struct bench {
    options options;
    const peak *peak;
    bool best;     /* the library's own choice of instruction set: no suffix in the ratios' names */
    float *memory; /* [PEAK_MEMORY_BYTES / 4] */
    size_t read_at;
    volatile float sink;
    const peer_library *peers[2];                /* or NULL */
    bench_stream keys[FORMATS], values[FORMATS]; /* by format */
} bench;

bool wanted(const bench *b, const pair *p); /* by --format; F16 always: the others are compared with it */
bool chosen(int option, int value);         /* option: 0 for all */
timing_limits limits_of(const options *o);

/* A stream for each format in use, in b->keys and b->values; the others stay empty. */
void open_streams(bench *b, int head_dim, int n_positions);
void close_streams(bench *b);
double stored_bytes(const bench *b, const pair *p); /* of keys and values */
void *typed_copy(tqkv_type type, const float *values, size_t n);

/* ---- Work that is timed ---- */

void run_fma(void *user); /* user: a bench */
void run_read(void *user);

typedef struct attend_work {
    tqkv_attention attention;
    const bench_stream *keys, *values;
    int layer;
    const void *q;
    float *out;
} attend_work;

void run_attend(void *user); /* user: an attend_work; each time another layer */

/* ---- Printing ---- */

/* A line for programs: the speed relative to `to`. The name ends in the instruction set if one is forced. */
void print_ratio(const bench *b, const char *name, const char *to, double value);
void print_times(const timing *t, const timing_entry *entry);
bool is_peer(const timing_entry *entry);

/* ---- What is measured ---- */

/* Calls over pages and lists, and by threads: one query of 4 heads a KV head. */
enum { PAGE = 64, PAGED_DIM = 128, PAGED_POSITIONS = 16384, PAGED_GROUP = 4, SEQUENCES = 16, SEQUENCE_STEP = 500 };
enum { PAGED_HEADS = BENCH_KV_HEADS * PAGED_GROUP, PAGED_ROW = PAGED_HEADS * PAGED_DIM };

void run_decode(bench *b);
void run_latent(bench *b);
void run_encoders(bench *b, int head_dim);
void run_pages(bench *b);
void run_sparse(bench *b);
void run_scales(bench *b);
void run_ends(bench *b);
void run_presets(bench *b);
void run_errors(void);
void run_threads(bench *b);
void run_machine(bench *b, int threads);

/* 16 sequences of 500 to 8000 positions, one query each, over random pages: a batch, a loop of calls, and one sequence
   of the same total, paged and as a linear store. The ratios: speed of the batch, of the others'. By wall time if
   there is a hook: `suffix` tells its threads. outs: [SEQUENCES][PAGED_ROW] */
void run_batches(bench *b, const pair *p, const float *q, float *outs, tqkv_parallel hook, const char *suffix);

#endif
