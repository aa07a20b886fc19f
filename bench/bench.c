/* Measures tqkv against this core's limits and against peers. `bench --help` names the options. */
#define TQKV_IMPLEMENTATION
#include "stream.h"
#include "peak.h"
#include "peer.h"
#include "timing.h"
#include "../examples/thread_pool.h"

#include <dlfcn.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct pair {
    const char *name;
    tqkv_format keys, values;
    tqkv_type type; /* of queries and outputs */
    tqkv_arithmetic arithmetic;
    const char *beside; /* the pair whose floats it is compared with, or NULL */
} pair;

#define PAIR(name, keys, values)                                                                                       \
    {                                                                                                                  \
        name, keys, values, TQKV_TYPE_F32, TQKV_FLOAT, NULL                                                            \
    }
#define INTEGERS(name, keys, values)                                                                                   \
    {                                                                                                                  \
        name "_int", keys, values, TQKV_TYPE_F32, TQKV_INTEGER, name                                                   \
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
    {"default_bf16", TQKV_I8, TQKV_TQ4, TQKV_TYPE_BF16, TQKV_FLOAT, "default"},
    INTEGERS("i8", TQKV_I8, TQKV_I8),
    INTEGERS("tq6", TQKV_TQ6, TQKV_TQ6),
    INTEGERS("tq5", TQKV_TQ5, TQKV_TQ5),
    INTEGERS("tq4", TQKV_TQ4, TQKV_TQ4),
    INTEGERS("tq3", TQKV_TQ3, TQKV_TQ3),
    INTEGERS("tq2", TQKV_TQ2, TQKV_TQ2),
    INTEGERS("default", TQKV_I8, TQKV_TQ4),
};

/* Rows of other types to encode, beside the floats of the same format. */
static const struct {
    const char *name;
    tqkv_format format;
    tqkv_type type;
} typed_rows[] = {
    {"i8_of_f16", TQKV_I8, TQKV_TYPE_F16},
    {"i8_of_bf16", TQKV_I8, TQKV_TYPE_BF16},
    {"tq4_of_f16", TQKV_TQ4, TQKV_TYPE_F16},
    {"tq4_of_bf16", TQKV_TQ4, TQKV_TYPE_BF16},
};
enum { TYPES = TQKV_TYPE_BF16 + 1, TYPED_ROWS = sizeof typed_rows / sizeof *typed_rows };

enum { FORMATS = TQKV_TQ2 + 1 };

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

/* ---- What is timed ---- */

static void run_fma(void *user)
{
    bench *b = (bench *)user;
    b->sink += b->peak->fma();
}

static void run_read(void *user)
{
    bench *b = (bench *)user;
    b->sink += b->peak->read(b->memory + b->read_at / sizeof(float));
    b->read_at = (b->read_at + PEAK_READ_BYTES) % PEAK_MEMORY_BYTES;
}

typedef struct attend_work {
    tqkv_attention attention;
    const bench_stream *keys, *values;
    int layer;
    const void *q;
    float *out;
} attend_work;

static void run_attend(void *user)
{
    attend_work *work = (attend_work *)user;
    work->attention.keys = &work->keys->layers[work->layer];
    work->attention.values = &work->values->layers[work->layer];
    const int n_layers = work->keys->n_layers < work->values->n_layers ? work->keys->n_layers : work->values->n_layers;
    work->layer = (work->layer + 1) % n_layers;
    bench_check(tqkv_attend(&work->attention, work->q, work->out));
}

typedef struct encode_work {
    tqkv_store store;
    const void *source; /* [n_tokens][BENCH_KV_HEADS][head_dim] */
    int n_tokens;
} encode_work;

static void run_encode(void *user)
{
    const encode_work *work = (const encode_work *)user;
    bench_check(tqkv_encode(&work->store, work->source, work->n_tokens, 0));
}

typedef struct copy_work {
    void *to;
    const void *from;
    size_t size;
} copy_work;

static void run_copy(void *user)
{
    const copy_work *work = (const copy_work *)user;
    memcpy(work->to, work->from, work->size);
}

/* ---- Printing ---- */

/* Prints a line for programs: the speed relative to `to`. The name ends in the instruction set if one is forced. */
static void print_ratio(const bench *b, const char *name, const char *to, double value)
{
    printf("ratio %s_%s%s%s %.4g\n", name, to, b->best ? "" : "_", b->best ? "" : b->peak->isa, value);
}

static void name_shape(const bench_shape *shape, const char *format, char *name, size_t size)
{
    const int n =
        snprintf(name, size, "decode_%s_d%d_n%d_g%d", format, shape->head_dim, shape->n_positions, shape->group);
    if (shape->n_queries > 1) snprintf(name + n, size - (size_t)n, "_q%d", shape->n_queries);
}

/* Multiply-adds that a shape needs: one for the score and one for the sum, per query head, visible position and
   dimension. */
static double multiply_adds(const bench_shape *shape)
{
    const double hidden = (shape->n_queries - 1) / 2.0; /* positions that the average query does not see */
    return 2.0 * BENCH_KV_HEADS * shape->group * shape->n_queries * (shape->n_positions - hidden) * shape->head_dim;
}

/* limits: [n_rounds], the least time by a round's measured peaks: the larger of arithmetic time and memory time. */
static void find_limits(const bench *b, const timing *t, double macs, double bytes, double *fma, double *limits)
{
    const timing_entry *fma_entry = timing_find(t, "fma"), *read_entry = timing_find(t, "read");
    for (int i = 0; i < t->n_rounds; i++) {
        const double read = bytes / PEAK_READ_BYTES * read_entry->cpu[i];
        fma[i] = macs / peak_fma_count(b->peak) * fma_entry->cpu[i];
        limits[i] = fma[i] > read ? fma[i] : read;
    }
}

static void print_times(const timing *t, const timing_entry *entry)
{
    const int n = t->n_rounds;
    printf("  %-28s %10.1f %10.1f %10.1f %10.1f", entry->name, 1e6 * timing_median(entry->cpu, n),
           1e6 * timing_quantile(entry->cpu, n, 0), 1e6 * timing_quantile(entry->cpu, n, 1),
           1e6 * timing_median(entry->wall, n));
}

static double stored_bytes(const bench *b, const pair *p)
{
    const tqkv_store *keys = b->keys[p->keys].layers, *values = b->values[p->values].layers;
    return (double)(keys->codes_size + keys->norms_size + values->codes_size + values->norms_size);
}

/* Prints the line of the table, or with ratios the lines for programs. */
static void print_pair(const bench *b, const timing *t, const bench_shape *shape, const pair *p, bool ratios)
{
    double fma[TIMING_MAX_ROUNDS], limits[TIMING_MAX_ROUNDS], of_limit[TIMING_MAX_ROUNDS], of_fma[TIMING_MAX_ROUNDS];
    char name[96];
    const timing_entry *entry = timing_find(t, p->name), *f16 = timing_find(t, "f16");
    const int n = t->n_rounds;
    find_limits(b, t, multiply_adds(shape), stored_bytes(b, p), fma, limits);
    for (int i = 0; i < n; i++) {
        of_limit[i] = limits[i] / entry->cpu[i];
        of_fma[i] = fma[i] / entry->cpu[i];
    }
    if (!ratios) {
        print_times(t, entry);
        printf(" %9.1f %-5s %8.2f %8.2f\n", 1e6 * timing_median(limits, n),
               timing_median(limits, n) > timing_median(fma, n) ? "bytes" : "fma", timing_median(of_limit, n),
               timing_ratio(t, entry, f16));
        return;
    }
    name_shape(shape, p->name, name, sizeof name);
    print_ratio(b, name, "limit", timing_median(of_limit, n));
    if (shape->n_queries > 1) print_ratio(b, name, "fma", timing_median(of_fma, n));
    if (entry != f16) print_ratio(b, name, "f16", timing_ratio(t, entry, f16));
    const timing_entry *floats = p->beside ? timing_find(t, p->beside) : NULL;
    if (floats) print_ratio(b, name, "floats", timing_ratio(t, entry, floats));
}

static bool is_peer(const timing_entry *entry) { return strstr(entry->name, "ggml_") != NULL; }

/* Prints the speed relative to each of the peers' ways, and to the best of those that read f16. */
static void print_peers(const bench *b, const timing *t, const bench_shape *shape, const pair *p)
{
    char name[96];
    const timing_entry *entry = timing_find(t, p->name);
    double best = 0.0;
    name_shape(shape, p->name, name, sizeof name);
    for (int i = 0; i < t->n_entries; i++) {
        if (!is_peer(&t->entries[i])) continue;
        const double ratio = timing_ratio(t, entry, &t->entries[i]);
        if (strstr(t->entries[i].name, "f16") && (best == 0.0 || ratio < best)) best = ratio;
        print_ratio(b, name, t->entries[i].name, ratio);
    }
    if (best > 0.0) print_ratio(b, name, "peers_best_f16", best);
}

static const int head_dims[] = {64, 80, 96, 128, 192, 256, 512};

/* ---- Attention ---- */

static bool wanted(const bench *b, const pair *p)
{
    const char *format = b->options.format;
    const bool integers = p->arithmetic == TQKV_INTEGER; /* beside their floats */
    return !format || strcmp(format, integers ? p->beside : p->name) == 0 ||
           p->keys == TQKV_F16; /* the others are compared with F16 */
}

static timing_limits limits_of(const options *o)
{
    timing_limits limits = {.min_rounds = 3, .max_rounds = 15, .seconds = o->quick ? 0.3 : 1.0, .sample = 1e-3};
    if (o->rounds > 0) limits.min_rounds = limits.max_rounds = o->rounds;
    return limits;
}

static void print_shape(const bench *b, const timing *t, const bench_shape *shape)
{
    printf("\nattention: head_dim %d, %d positions, group %d, %d %s; %d rounds\n", shape->head_dim, shape->n_positions,
           shape->group, shape->n_queries, shape->n_queries == 1 ? "query" : "queries", t->n_rounds);
    printf("  %-28s %10s %10s %10s %10s %9s %-5s %8s %8s\n", "microseconds", "median", "least", "most", "wall", "limit",
           "by", "share", "x f16");
    for (int i = 0; i < COUNT(pairs); i++)
        if (timing_find(t, pairs[i].name)) print_pair(b, t, shape, &pairs[i], false);
    for (int i = 0; i < t->n_entries; i++) {
        if (!is_peer(&t->entries[i])) continue;
        print_times(t, &t->entries[i]);
        printf("\n");
    }
    for (int i = 0; i < COUNT(pairs); i++) {
        if (!timing_find(t, pairs[i].name)) continue;
        print_pair(b, t, shape, &pairs[i], true);
        print_peers(b, t, shape, &pairs[i]);
    }
    fflush(stdout);
}

static void *typed_copy(tqkv_type type, const float *values, size_t n)
{
    void *typed = bench_alloc(n * sizeof *values);
    tqkv__narrow_row(type, values, (int)n, typed);
    return typed;
}

static void run_shape(bench *b, const bench_shape *shape)
{
    static timing t;
    static attend_work works[COUNT(pairs)];
    const timing_limits limits = limits_of(&b->options);
    const int n_heads = BENCH_KV_HEADS * shape->group;
    const size_t n = (size_t)shape->n_queries * (size_t)n_heads * (size_t)shape->head_dim;
    float *q = (float *)bench_alloc(n * sizeof *q), *out = (float *)bench_alloc(n * sizeof *out);
    bench_fill(q, n, 3);
    void *halves = typed_copy(TQKV_TYPE_BF16, q, n);
    t.n_entries = 0;
    timing_add(&t, "fma", run_fma, b);
    timing_add(&t, "read", run_read, b);
    for (int i = 0; i < COUNT(pairs); i++) {
        const tqkv_attention attention = {.n_heads = n_heads, .n_queries = shape->n_queries, .end = shape->n_positions};
        if (!wanted(b, &pairs[i])) continue;
        works[i] = (attend_work){attention, &b->keys[pairs[i].keys], &b->values[pairs[i].values], 0, q, out};
        works[i].attention.query_type = works[i].attention.output_type = pairs[i].type;
        works[i].attention.arithmetic = pairs[i].arithmetic;
        if (pairs[i].type) works[i].q = halves;
        timing_add(&t, pairs[i].name, run_attend, &works[i]);
    }
    peer *peers[COUNT(b->peers)] = {NULL};
    run_attend(&works[0]); /* F16 */
    for (int i = 0; i < COUNT(b->peers); i++) {
        if (b->peers[i]) peers[i] = b->peers[i]->open(shape, &b->keys[TQKV_F16], &b->values[TQKV_F16], q);
        if (!peers[i]) continue;
        b->peers[i]->add(peers[i], &t);
        b->peers[i]->check(peers[i], out);
    }
    timing_run(&t, &limits);
    print_shape(b, &t, shape);
    for (int i = 0; i < COUNT(b->peers); i++)
        if (peers[i]) b->peers[i]->close(peers[i]);
    free(q);
    free(halves);
    free(out);
}

/* Opens a stream for each format in use; the others stay empty. */
static void open_streams(bench *b, int head_dim, int n_positions)
{
    const size_t n = (size_t)BENCH_SOURCE_TOKENS * BENCH_KV_HEADS * (size_t)head_dim;
    float *source = (float *)bench_alloc(n * sizeof *source);
    for (int i = 0; i < COUNT(pairs); i++) {
        if (!wanted(b, &pairs[i])) continue;
        bench_stream *keys = &b->keys[pairs[i].keys], *values = &b->values[pairs[i].values];
        bench_fill(source, n, 1);
        if (!keys->layers) bench_stream_open(keys, pairs[i].keys, head_dim, n_positions, source);
        bench_fill(source, n, 2);
        if (!values->layers) bench_stream_open(values, pairs[i].values, head_dim, n_positions, source);
    }
    free(source);
}

static void close_streams(bench *b)
{
    for (int i = 0; i < FORMATS; i++) {
        bench_stream_close(&b->keys[i]);
        bench_stream_close(&b->values[i]);
    }
}

static bool chosen(int option, int value) { return option == 0 || option == value; }

/* Runs all groups and numbers of queries; 128 queries at one shape only. Groups of 6 and 64 are those of models: 24
   heads over 4 of 256, 64 over one of 512. */
static void run_context(bench *b, int head_dim, int n_positions)
{
    static const int groups[] = {2, 6, 8, 64}, queries[] = {1, 8, 128};
    const options *o = &b->options;
    open_streams(b, head_dim, n_positions);
    for (int g = 0; g < COUNT(groups); g++)
        for (int i = 0; i < COUNT(queries); i++) {
            const bench_shape shape = {head_dim, n_positions, groups[g], queries[i]};
            const bool first = groups[g] == 2 && queries[i] == 1;
            if (!chosen(o->group, groups[g]) || !chosen(o->queries, queries[i])) continue;
            if (o->quick && !first) continue;
            if ((groups[g] == 6 && head_dim != 256) || (groups[g] == 64 && (head_dim != 512 || queries[i] > 1)))
                continue;
            if (queries[i] == 128 && (head_dim != 128 || groups[g] != 2 || n_positions < 4096)) continue;
            run_shape(b, &shape);
        }
    close_streams(b);
}

static void run_decode(bench *b)
{
    static const int contexts[] = {512, 1024, 2048, 4096, 8192, 16384, 32768};
    const options *o = &b->options;
    for (int i = 0; i < COUNT(head_dims); i++)
        for (int j = 0; j < COUNT(contexts); j++) {
            const int n = contexts[j];
            const bool power = (head_dims[i] & (head_dims[i] - 1)) == 0; /* the other sizes have one context */
            const bool between = n != 4096 && (!power || (n != 512 && n != 32768));
            if (!chosen(o->head_dim, head_dims[i]) || !chosen(o->context, n)) continue;
            if (o->quick && (head_dims[i] != 128 || n > 4096)) continue;
            if (between && o->context != n) continue;
            run_context(b, head_dims[i], n);
        }
}

/* ---- Encoding ---- */

/* The source stays in the L2 cache, where a model's projections leave it. */
enum { ENCODE_SOURCE_BYTES = 256 << 10 };

static void print_encoder(const bench *b, const timing *t, const timing_entry *entry, int head_dim, bool ratios)
{
    const timing_entry *copy = timing_find(t, "memcpy");
    const bool own = tqkv_format_from_name(entry->name) != TQKV_FORMAT_DEFAULT;
    const double rate = ENCODE_SOURCE_BYTES / timing_median(entry->cpu, t->n_rounds) * 1e-9;
    char name[64];
    if (!ratios) {
        print_times(t, entry);
        printf(" %8.2f %8.2f\n", rate, timing_ratio(t, entry, copy));
        return;
    }
    for (int i = 0; i < TYPED_ROWS; i++) {
        if (strcmp(entry->name, typed_rows[i].name) != 0) continue;
        snprintf(name, sizeof name, "encode_%s_d%d", entry->name, head_dim);
        const timing_entry *floats = timing_find(t, tqkv_format_name(typed_rows[i].format));
        print_ratio(b, name, "floats", timing_ratio(t, entry, floats));
    }
    if (!own) return;
    snprintf(name, sizeof name, "encode_%s_d%d", entry->name, head_dim);
    print_ratio(b, name, "gb_per_s", rate);
    print_ratio(b, name, "memcpy", timing_ratio(t, entry, copy));
    for (int i = 0; i < t->n_entries; i++)
        if (is_peer(&t->entries[i])) print_ratio(b, name, t->entries[i].name, timing_ratio(t, entry, &t->entries[i]));
}

static void encode_open(encode_work *work, tqkv_format format, tqkv_type type, int head_dim, const void *source)
{
    const int n_tokens = ENCODE_SOURCE_BYTES / 4 / BENCH_KV_HEADS / head_dim;
    work->store =
        (tqkv_store){.format = format, .head_dim = head_dim, .n_kv_heads = BENCH_KV_HEADS, .capacity = n_tokens};
    work->store.type = type;
    work->store.codes_size = tqkv_codes_size(&work->store);
    work->store.norms_size = tqkv_norms_size(&work->store);
    work->store.codes = bench_alloc(work->store.codes_size);
    work->store.norms = (float *)bench_alloc(work->store.norms_size);
    work->source = source;
    work->n_tokens = n_tokens;
}

static void run_encoders(bench *b, int head_dim)
{
    static timing t;
    static encode_work works[FORMATS + TYPED_ROWS];
    const timing_limits limits = limits_of(&b->options);
    float *source = (float *)bench_alloc(ENCODE_SOURCE_BYTES);
    copy_work copy = {bench_alloc(ENCODE_SOURCE_BYTES), source, ENCODE_SOURCE_BYTES};
    bench_fill(source, ENCODE_SOURCE_BYTES / sizeof *source, 4);
    void *halves[TYPES];
    for (int i = 0; i < TYPES; i++) halves[i] = typed_copy((tqkv_type)i, source, ENCODE_SOURCE_BYTES / sizeof *source);
    t.n_entries = 0;
    timing_add(&t, "memcpy", run_copy, &copy);
    for (int i = 0; i < COUNT(pairs); i++) {
        if (pairs[i].keys != pairs[i].values || pairs[i].arithmetic || !wanted(b, &pairs[i])) continue;
        encode_open(&works[pairs[i].keys], pairs[i].keys, TQKV_TYPE_F32, head_dim, source);
        timing_add(&t, pairs[i].name, run_encode, &works[pairs[i].keys]);
    }
    for (int i = 0; i < TYPED_ROWS; i++) {
        encode_work *work = &works[FORMATS + i];
        if (!works[typed_rows[i].format].n_tokens) continue; /* not wanted */
        encode_open(work, typed_rows[i].format, typed_rows[i].type, head_dim, halves[typed_rows[i].type]);
        timing_add(&t, typed_rows[i].name, run_encode, work);
    }
    for (int i = 0; i < COUNT(b->peers); i++)
        if (b->peers[i])
            b->peers[i]->add_encoders(&t, source, ENCODE_SOURCE_BYTES / (int)sizeof *source / head_dim, head_dim);
    timing_run(&t, &limits);
    printf("\nencode: head_dim %d, %d KiB of floats; %d rounds\n", head_dim, ENCODE_SOURCE_BYTES >> 10, t.n_rounds);
    printf("  %-28s %10s %10s %10s %10s %8s %8s\n", "microseconds", "median", "least", "most", "wall", "GB/s",
           "x memcpy");
    for (int i = 0; i < t.n_entries; i++) print_encoder(b, &t, &t.entries[i], head_dim, false);
    for (int i = 0; i < t.n_entries; i++) print_encoder(b, &t, &t.entries[i], head_dim, true);
    fflush(stdout);
    for (int i = 0; i < FORMATS + TYPED_ROWS; i++) {
        free(works[i].store.codes);
        free(works[i].store.norms);
        memset(&works[i], 0, sizeof works[i]);
    }
    for (int i = 0; i < TYPES; i++) free(halves[i]);
    free(source);
    free(copy.to);
}

/* ---- Pages, and several sequences in a call ---- */

enum { PAGE = 64, PAGED_DIM = 128, PAGED_POSITIONS = 16384, PAGED_GROUP = 4, SEQUENCES = 16, SEQUENCE_STEP = 500 };
enum { PAGED_HEADS = BENCH_KV_HEADS * PAGED_GROUP, PAGED_ROW = PAGED_HEADS * PAGED_DIM };

/* [n]: each page once, in random order */
static int32_t *random_pages(int n)
{
    int32_t *pages = (int32_t *)bench_alloc((size_t)n * sizeof *pages);
    uint64_t seed = 5;
    for (int i = 0; i < n; i++) {
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        const int j = (int)((seed >> 33) % (uint64_t)(i + 1));
        pages[i] = pages[j];
        pages[j] = i;
    }
    return pages;
}

/* The layers of a stream with that table over each. The caller frees `layers`. */
static bench_stream with_pages(const bench_stream *linear, const int32_t *pages, int n_pages)
{
    bench_stream paged = *linear;
    paged.layers = (tqkv_store *)bench_alloc((size_t)linear->n_layers * sizeof *paged.layers);
    for (int i = 0; i < linear->n_layers; i++) {
        paged.layers[i] = linear->layers[i];
        paged.layers[i].pages = pages;
        paged.layers[i].n_pages = n_pages;
        paged.layers[i].page_size = PAGE;
    }
    return paged;
}

/* A paged store beside a linear one over the same codes. The ratio: speed over pages, of that without. */
static void run_paged(bench *b, const pair *p, const float *q, float *out, const int32_t *pages)
{
    static timing t;
    const timing_limits limits = limits_of(&b->options);
    const tqkv_attention attention = {.n_heads = PAGED_HEADS, .end = PAGED_POSITIONS};
    const bench_stream *keys = &b->keys[p->keys], *values = &b->values[p->values];
    bench_stream paged_keys = with_pages(keys, pages, PAGED_POSITIONS / PAGE);
    bench_stream paged_values = with_pages(values, pages, PAGED_POSITIONS / PAGE);
    attend_work works[2] = {{attention, keys, values, 0, q, out}, {attention, &paged_keys, &paged_values, 0, q, out}};
    char name[96];
    t.n_entries = 0;
    const timing_entry *linear = timing_add(&t, "linear", run_attend, &works[0]);
    const timing_entry *paged = timing_add(&t, "paged", run_attend, &works[1]);
    timing_run(&t, &limits);
    printf("\n%s: head_dim %d, %d positions, group %d, random pages of %d; %d rounds\n", p->name, PAGED_DIM,
           PAGED_POSITIONS, PAGED_GROUP, PAGE, t.n_rounds);
    print_times(&t, linear);
    printf("\n");
    print_times(&t, paged);
    printf("\n");
    snprintf(name, sizeof name, "paged_%s_d%d_n%d_g%d", p->name, PAGED_DIM, PAGED_POSITIONS, PAGED_GROUP);
    print_ratio(b, name, "linear", timing_ratio(&t, paged, linear));
    free(paged_keys.layers);
    free(paged_values.layers);
}

typedef struct batch_work {
    tqkv_store keys[SEQUENCES], values[SEQUENCES];
    tqkv_attention items[SEQUENCES];
    const void *q[SEQUENCES];
    void *out[SEQUENCES];
} batch_work;

static void run_batch(void *user)
{
    const batch_work *work = (const batch_work *)user;
    bench_check(tqkv_attend_batch(work->items, SEQUENCES, work->q, work->out));
}

static void run_loop(void *user)
{
    const batch_work *work = (const batch_work *)user;
    for (int i = 0; i < SEQUENCES; i++) bench_check(tqkv_attend(&work->items[i], work->q[i], work->out[i]));
}

/* One query of each sequence, which has the next pages of the pool. outs: [SEQUENCES][PAGED_ROW] */
static void open_batch(const bench *b, const pair *p, const int32_t *pages, const float *q, float *outs,
                       batch_work *work)
{
    for (int i = 0; i < SEQUENCES; i++) {
        const int length = (i + 1) * SEQUENCE_STEP;
        tqkv_store *keys = &work->keys[i], *values = &work->values[i];
        *keys = *b->keys[p->keys].layers;
        *values = *b->values[p->values].layers;
        keys->pages = values->pages = pages;
        keys->n_pages = values->n_pages = (length + PAGE - 1) / PAGE;
        keys->page_size = values->page_size = PAGE;
        work->items[i] = (tqkv_attention){.keys = keys, .values = values, .n_heads = PAGED_HEADS, .end = length};
        work->q[i] = q;
        work->out[i] = outs + i * PAGED_ROW;
        pages += keys->n_pages;
    }
}

/* 16 sequences of 500 to 8000 positions, one query each, over random pages: a batch, a loop of calls, and one sequence of
   the same total, paged and as a linear store. The ratios: speed of the batch, of the others'. By wall time if there is a hook:
   `suffix` tells its threads. */
static void run_batches(bench *b, const pair *p, const float *q, float *outs, tqkv_parallel hook, const char *suffix)
{
    double (*ratio)(const timing *, const timing_entry *, const timing_entry *) =
        hook.run ? timing_wall_ratio : timing_ratio;
    static timing t;
    static batch_work work;
    char name[96];
    const timing_limits limits = limits_of(&b->options);
    const int total = SEQUENCE_STEP * SEQUENCES * (SEQUENCES + 1) / 2, n_pages = total / PAGE + SEQUENCES;
    float *source = (float *)bench_alloc(BENCH_SOURCE_TOKENS * BENCH_KV_HEADS * PAGED_DIM * sizeof *source);
    int32_t *pages = random_pages(n_pages);
    bench_fill(source, BENCH_SOURCE_TOKENS * BENCH_KV_HEADS * PAGED_DIM, 1);
    bench_stream_open(&b->keys[p->keys], p->keys, PAGED_DIM, n_pages * PAGE, source);
    bench_stream_open(&b->values[p->values], p->values, PAGED_DIM, n_pages * PAGE, source);
    open_batch(b, p, pages, q, outs, &work);
    for (int i = 0; i < SEQUENCES; i++) work.items[i].parallel = hook;
    const tqkv_attention one = {.n_heads = PAGED_HEADS, .end = total, .parallel = hook};
    bench_stream paged_keys = with_pages(&b->keys[p->keys], pages, n_pages);
    bench_stream paged_values = with_pages(&b->values[p->values], pages, n_pages);
    attend_work wholes[2] = {{one, &paged_keys, &paged_values, 0, q, outs},
                             {one, &b->keys[p->keys], &b->values[p->values], 0, q, outs}};
    t.n_entries = 0;
    const timing_entry *batch = timing_add(&t, "batch", run_batch, &work);
    const timing_entry *loop = timing_add(&t, "loop", run_loop, &work);
    const timing_entry *single = timing_add(&t, "one of the same total", run_attend, &wholes[0]);
    const timing_entry *linear = timing_add(&t, "one, linear", run_attend, &wholes[1]);
    timing_run(&t, &limits);
    printf("\n%s%s: %d sequences, %d positions in all, random pages of %d; %d rounds\n", p->name, suffix, SEQUENCES,
           total, PAGE, t.n_rounds);
    for (int i = 0; i < t.n_entries; i++) {
        print_times(&t, &t.entries[i]);
        printf("\n");
    }
    snprintf(name, sizeof name, "batch_default_s16%s", suffix);
    print_ratio(b, name, "loop", ratio(&t, batch, loop));
    print_ratio(b, name, "one", ratio(&t, batch, single));
    print_ratio(b, name, "linear", ratio(&t, batch, linear));
    free(paged_keys.layers);
    free(paged_values.layers);
    free(source);
    free(pages);
    close_streams(b);
}

static void run_pages(bench *b)
{
    static const char *const names[] = {"f16", "i8", "tq5", "tq4", "default"};
    float *q = (float *)bench_alloc(PAGED_ROW * sizeof *q);
    float *out = (float *)bench_alloc(SEQUENCES * PAGED_ROW * sizeof *out);
    int32_t *pages = random_pages(PAGED_POSITIONS / PAGE);
    bench_fill(q, PAGED_ROW, 6);
    open_streams(b, PAGED_DIM, PAGED_POSITIONS);
    for (int i = 0; i < COUNT(pairs); i++)
        for (int j = 0; j < COUNT(names); j++)
            if (strcmp(pairs[i].name, names[j]) == 0 && wanted(b, &pairs[i])) run_paged(b, &pairs[i], q, out, pages);
    close_streams(b);
    for (int i = 0; i < COUNT(pairs); i++)
        if (strcmp(pairs[i].name, "default") == 0 && wanted(b, &pairs[i]))
            run_batches(b, &pairs[i], q, out, (tqkv_parallel){NULL, NULL}, "");
    fflush(stdout);
    free(q);
    free(out);
    free(pages);
}

/* ---- Latent caches: 64 heads over one stream that is keys and values, without and with a tail of halves ---- */

enum { LATENT_DIM = 512, LATENT_TAIL = 64, LATENT_HEADS = 64, LATENT_POSITIONS = 32768, LATENT_ROWS = 8 };

/* A stream of one KV head. */
static void open_latent(bench_stream *stream, tqkv_format format, int head_dim)
{
    const size_t n = (size_t)BENCH_SOURCE_TOKENS * BENCH_KV_HEADS * (size_t)head_dim;
    float *source = (float *)bench_alloc(n * sizeof *source);
    bench_fill(source, n, 1);
    bench_stream_open(stream, format, head_dim, LATENT_POSITIONS, source);
    for (int i = 0; i < stream->n_layers; i++) stream->layers[i].n_kv_heads = 1;
    free(source);
}

/* Prints the time of each row and its share of the multiply-add peak in the same round. */
static void print_latent(const bench *b, const timing *t, const attend_work *works)
{
    const timing_entry *fma = timing_find(t, "fma");
    printf("\nlatent: %d heads over one stream of %d, %d positions; %d rounds\n", LATENT_HEADS, LATENT_DIM,
           LATENT_POSITIONS, t->n_rounds);
    for (int i = 0; i + 1 < t->n_entries; i++) {
        const timing_entry *entry = &t->entries[i + 1];
        const int dims = 2 * LATENT_DIM + (works[i].attention.tail ? LATENT_TAIL : 0);
        const double macs = (double)LATENT_HEADS * LATENT_POSITIONS * dims;
        const double share = timing_ratio(t, entry, fma) * macs / peak_fma_count(b->peak);
        char name[96];
        print_times(t, entry);
        printf(" %8.2f\n", share);
        snprintf(name, sizeof name, "latent_%s_n%d_g%d", entry->name, LATENT_POSITIONS, LATENT_HEADS);
        print_ratio(b, name, "fma", share);
    }
    fflush(stdout);
}

static void run_latent(bench *b)
{
    static timing t;
    static attend_work works[LATENT_ROWS];
    const timing_limits limits = limits_of(&b->options);
    const size_t n = (size_t)LATENT_HEADS * (LATENT_DIM + LATENT_TAIL);
    float *q = (float *)bench_alloc(n * sizeof *q), *out = (float *)bench_alloc(n * sizeof *out);
    bench_stream tail;
    int n_works = 0;
    bench_fill(q, n, 3);
    open_latent(&tail, TQKV_F16, LATENT_TAIL);
    t.n_entries = 0;
    timing_add(&t, "fma", run_fma, b);
    for (int i = 0; i < COUNT(pairs); i++) {
        const bool rows = pairs[i].keys == TQKV_TQ4 || pairs[i].keys == TQKV_I8;
        if (pairs[i].keys != pairs[i].values || !rows || !wanted(b, &pairs[i])) continue;
        bench_stream *keys = &b->keys[pairs[i].keys];
        if (!keys->layers) open_latent(keys, pairs[i].keys, LATENT_DIM);
        for (int with = 0; with < 2; with++) {
            char name[TIMING_NAME];
            attend_work *work = &works[n_works++];
            *work = (attend_work){{.n_heads = LATENT_HEADS, .end = LATENT_POSITIONS}, keys, keys, 0, q, out};
            work->attention.arithmetic = pairs[i].arithmetic;
            if (with) work->attention.tail = tail.layers;
            snprintf(name, sizeof name, "%s_d%d%s", pairs[i].name, LATENT_DIM, with ? "_t64" : "");
            timing_add(&t, name, run_attend, work);
        }
    }
    timing_run(&t, &limits);
    print_latent(b, &t, works);
    bench_stream_close(&tail);
    close_streams(b);
    free(q);
    free(out);
}

/* ---- Lists of blocks, and the index that chooses them ---- */

enum { LISTED = 2048, LISTED_OF = 32768, INDEX_KEYS = 262144, INDEX_HEADS = 64 };
static const int list_blocks[] = {1, 16, 64};

/* LISTED / block of the blocks at random, ascending, of each of the others' gaps alike. list: [LISTED] */
static void random_list(int block, int32_t *list)
{
    const int n = LISTED / block, every = LISTED_OF / LISTED;
    uint64_t seed = 7;
    for (int i = 0; i < n; i++) {
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        list[i] = i * every + (int)((seed >> 33) % (uint64_t)every);
    }
}

/* A list of 2,048 of 32,768 positions beside all of them. The ratio: speed, of that without a list; by wall time if there is a
   hook. */
static void run_lists(bench *b, const pair *p, const float *q, float *out, tqkv_parallel hook, const char *suffix)
{
    static timing t;
    static int32_t lists[COUNT(list_blocks)][LISTED];
    const timing_limits limits = limits_of(&b->options);
    attend_work works[COUNT(list_blocks) + 1];
    t.n_entries = 0;
    for (int i = 0; i <= COUNT(list_blocks); i++) {
        char name[TIMING_NAME] = "all";
        works[i] = (attend_work){
            {.n_heads = PAGED_HEADS, .end = LISTED_OF}, &b->keys[p->keys], &b->values[p->values], 0, q, out};
        works[i].attention.arithmetic = p->arithmetic;
        works[i].attention.parallel = hook;
        if (i) {
            snprintf(name, sizeof name, "blocks_of_%d", list_blocks[i - 1]);
            random_list(list_blocks[i - 1], lists[i - 1]);
            works[i].attention.list = lists[i - 1];
            works[i].attention.list_block = list_blocks[i - 1];
            works[i].attention.list_length = LISTED / list_blocks[i - 1];
        }
        timing_add(&t, name, run_attend, &works[i]);
    }
    timing_run(&t, &limits);
    printf("\nlists%s: %s, head_dim %d, %d of %d positions, group %d; %d rounds\n", suffix, p->name, PAGED_DIM, LISTED,
           LISTED_OF, PAGED_GROUP, t.n_rounds);
    for (int i = 0; i <= COUNT(list_blocks); i++) {
        char name[96];
        print_times(&t, &t.entries[i]);
        printf("\n");
        snprintf(name, sizeof name, "list_%s_d%d_n%d_%s%s", p->name, PAGED_DIM, LISTED_OF, t.entries[i].name, suffix);
        if (i && hook.run) print_ratio(b, name, "all", timing_wall_ratio(&t, &t.entries[i], &t.entries[0]));
        if (i && !hook.run) print_ratio(b, name, "all", timing_ratio(&t, &t.entries[i], &t.entries[0]));
    }
}

typedef struct index_work {
    tqkv_index index;
    const float *q;
    float *scores;
    int32_t *list;
} index_work;

static void run_index_scores(void *user)
{
    const index_work *work = (const index_work *)user;
    bench_check(tqkv_index_scores(&work->index, work->q, work->scores));
}

static void run_index_choose(void *user)
{
    const index_work *work = (const index_work *)user;
    bench_check(tqkv_index_choose(&work->index, work->scores, LISTED, work->list));
}

static void print_index(const bench *b, const timing *t)
{
    const double products = (double)INDEX_HEADS * PAGED_DIM * INDEX_KEYS;
    const timing_entry *fma = timing_find(t, "fma"), *scores = timing_find(t, "scores"),
                       *choice = timing_find(t, "choice");
    printf("\nindex: tq4, %d heads of %d, %d keys, %d of them chosen; %d rounds\n", INDEX_HEADS, PAGED_DIM, INDEX_KEYS,
           LISTED, t->n_rounds);
    for (int i = 1; i < t->n_entries; i++) {
        char name[96];
        print_times(t, &t->entries[i]);
        printf("\n");
        snprintf(name, sizeof name, "index_tq4_d%d_n%d_%s", PAGED_DIM, INDEX_KEYS, t->entries[i].name);
        if (&t->entries[i] != choice)
            print_ratio(b, name, "fma", products / peak_fma_count(b->peak) * timing_ratio(t, &t->entries[i], fma));
    }
    print_ratio(b, "index_tq4_choice", "scores", timing_ratio(t, choice, scores));
}

/* Scores of one query, in floats and in integers, as a share of the float multiply-add peak, and the choice. */
static void run_index(bench *b, const float *q)
{
    static timing t;
    const timing_limits limits = limits_of(&b->options);
    tqkv_store keys = {.format = TQKV_TQ4, .head_dim = PAGED_DIM, .n_kv_heads = 1, .capacity = INDEX_KEYS};
    index_work works[2];
    keys.codes_size = tqkv_codes_size(&keys);
    keys.norms_size = tqkv_norms_size(&keys);
    keys.codes = bench_alloc(keys.codes_size);
    keys.norms = (float *)bench_alloc(keys.norms_size);
    float *source = (float *)bench_alloc(BENCH_SOURCE_TOKENS * PAGED_DIM * sizeof *source);
    for (int i = 0; i < INDEX_KEYS; i += BENCH_SOURCE_TOKENS) {
        bench_fill(source, BENCH_SOURCE_TOKENS * PAGED_DIM, (uint64_t)i);
        bench_check(tqkv_encode(&keys, source, BENCH_SOURCE_TOKENS, i));
    }
    t.n_entries = 0;
    timing_add(&t, "fma", run_fma, b);
    for (int i = 0; i < 2; i++) {
        works[i] =
            (index_work){{.keys = &keys, .n_heads = INDEX_HEADS, .end = INDEX_KEYS, .relu = true}, q, NULL, NULL};
        works[i].index.arithmetic = i ? TQKV_INTEGER : TQKV_FLOAT;
        works[i].scores = (float *)bench_alloc(INDEX_KEYS * sizeof(float));
        works[i].list = (int32_t *)bench_alloc(LISTED * sizeof(int32_t));
        timing_add(&t, i ? "scores_int" : "scores", run_index_scores, &works[i]);
    }
    timing_add(&t, "choice", run_index_choose, &works[0]);
    run_index_scores(&works[0]);
    timing_run(&t, &limits);
    print_index(b, &t);
    for (int i = 0; i < 2; i++) {
        free(works[i].scores);
        free(works[i].list);
    }
    free(source);
    free(keys.codes);
    free(keys.norms);
}

static void run_sparse(bench *b)
{
    thread_pool pool;
    const size_t n = INDEX_HEADS * PAGED_DIM; /* more than PAGED_ROW */
    float *q = (float *)bench_alloc(n * sizeof *q), *out = (float *)bench_alloc(n * sizeof *out);
    bench_fill(q, n, 3);
    pool_start(&pool, 1);
    open_streams(b, PAGED_DIM, LISTED_OF);
    for (int i = 0; i < COUNT(pairs); i++) {
        if (strncmp(pairs[i].name, "tq4", 3) != 0 || !wanted(b, &pairs[i])) continue;
        run_lists(b, &pairs[i], q, out, (tqkv_parallel){NULL, NULL}, "");
        run_lists(b, &pairs[i], q, out, (tqkv_parallel){pool_run, &pool}, "_t2");
    }
    close_streams(b);
    pool_stop(&pool);
    if (!b->options.format || strcmp(b->options.format, "tq4") == 0) run_index(b, q);
    fflush(stdout);
    free(q);
    free(out);
}

/* ---- Threads ---- */

enum { APPENDED = 4096, APPEND_COUNTS = 3 };

typedef struct append_work {
    thread_pool pool;
    tqkv_cache *cache;
    const float *source; /* [APPENDED][BENCH_KV_HEADS][PAGED_DIM] */
} append_work;

static void run_append(void *user)
{
    const append_work *work = (const append_work *)user;
    bench_check(tqkv_cache_truncate(work->cache, 0));
    bench_check(tqkv_cache_append(work->cache, work->source, work->source, APPENDED));
}

/* A prefill's keys and values, TQ4, by as many threads. The ratios: speed, of one thread's. */
static void run_appends(bench *b)
{
    static timing t;
    static append_work works[APPEND_COUNTS];
    static const int threads[APPEND_COUNTS] = {1, 2, 4};
    const timing_limits limits = limits_of(&b->options);
    const size_t n = (size_t)APPENDED * BENCH_KV_HEADS * PAGED_DIM;
    float *source = (float *)bench_alloc(n * sizeof *source);
    bench_fill(source, n, 1);
    t.n_entries = 0;
    for (int i = 0; i < APPEND_COUNTS; i++) {
        append_work *work = &works[i];
        char name[TIMING_NAME];
        snprintf(name, sizeof name, "%d thread%s", threads[i], i ? "s" : "");
        pool_start(&work->pool, threads[i] - 1);
        work->source = source;
        tqkv_cache_desc desc = {.key_format = TQKV_TQ4, .value_format = TQKV_TQ4, .head_dim = PAGED_DIM};
        desc.n_heads = desc.n_kv_heads = BENCH_KV_HEADS;
        desc.capacity = APPENDED;
        if (i) desc.parallel = (tqkv_parallel){pool_run, &work->pool};
        bench_check(tqkv_cache_create(&desc, &work->cache));
        timing_add(&t, name, run_append, work);
    }
    timing_run(&t, &limits);
    printf("\nappend: %d tokens, tq4, head_dim %d; %d rounds\n", APPENDED, PAGED_DIM, t.n_rounds);
    for (int i = 0; i < APPEND_COUNTS; i++) {
        char name[TIMING_NAME];
        print_times(&t, &t.entries[i]);
        printf("\n");
        tqkv_cache_destroy(works[i].cache);
        pool_stop(&works[i].pool);
        snprintf(name, sizeof name, "append_tq4_d%d_t%d", PAGED_DIM, threads[i]);
        if (i) print_ratio(b, name, "t1", timing_wall_ratio(&t, &t.entries[i], &t.entries[0]));
    }
    free(source);
}

static void run_threads(bench *b)
{
    thread_pool pool;
    float *q = (float *)bench_alloc(PAGED_ROW * sizeof *q);
    float *out = (float *)bench_alloc(SEQUENCES * PAGED_ROW * sizeof *out);
    bench_fill(q, PAGED_ROW, 6);
    run_appends(b);
    pool_start(&pool, 1); /* beside this thread */
    for (int i = 0; i < COUNT(pairs); i++)
        if (strcmp(pairs[i].name, "default") == 0)
            run_batches(b, &pairs[i], q, out, (tqkv_parallel){pool_run, &pool}, "_t2");
    pool_stop(&pool);
    fflush(stdout);
    free(q);
    free(out);
}

/* ---- A whole machine ---- */

enum { MACHINE_DIM = 128, MACHINE_POSITIONS = 32768, MACHINE_GROUP = 2, MACHINE_READS = 64 };

typedef struct machine_read {
    bench *b;
    thread_pool *pool;
    float sums[MACHINE_READS];
} machine_read;

static void read_part(void *context, int i)
{
    machine_read *work = (machine_read *)context;
    const size_t at = (size_t)i * PEAK_READ_BYTES % PEAK_MEMORY_BYTES;
    work->sums[i] = work->b->peak->read(work->b->memory + at / sizeof(float));
}

static void run_machine_read(void *user)
{
    machine_read *work = (machine_read *)user;
    pool_run(work->pool, MACHINE_READS, read_part, work);
}

/* Prints wall times, and the bytes of codes and norms a second, of the read bandwidth of the same threads and rounds. */
static void print_machine(const bench *b, const timing *t, int threads)
{
    const timing_entry *read = timing_find(t, "read");
    const double read_rate = (double)MACHINE_READS * PEAK_READ_BYTES / timing_median(read->wall, t->n_rounds);
    printf("\n%d threads: head_dim %d, %d positions, group %d; read %.1f GB/s; %d rounds\n", threads, MACHINE_DIM,
           MACHINE_POSITIONS, MACHINE_GROUP, 1e-9 * read_rate, t->n_rounds);
    printf("  %-28s %10s %10s %8s\n", "", "wall us", "GB/s", "of read");
    for (int i = 0; i < COUNT(pairs); i++) {
        const timing_entry *entry = timing_find(t, pairs[i].name);
        if (!entry) continue;
        char name[96];
        const double seconds = timing_median(entry->wall, t->n_rounds), rate = stored_bytes(b, &pairs[i]) / seconds;
        printf("  %-28s %10.1f %10.1f %8.2f\n", entry->name, 1e6 * seconds, 1e-9 * rate, rate / read_rate);
        snprintf(name, sizeof name, "threads%d_%s_d%d_n%d_g%d", threads, pairs[i].name, MACHINE_DIM, MACHINE_POSITIONS,
                 MACHINE_GROUP);
        print_ratio(b, name, "read", rate / read_rate);
    }
}

/* One token by all threads, every format, both arithmetics in turns. */
static void run_machine(bench *b, int threads)
{
    static timing t;
    static attend_work works[COUNT(pairs)];
    const int n = BENCH_KV_HEADS * MACHINE_GROUP * MACHINE_DIM;
    float *q = (float *)bench_alloc((size_t)n * sizeof *q), *out = (float *)bench_alloc((size_t)n * sizeof *out);
    const timing_limits limits = limits_of(&b->options);
    thread_pool pool;
    machine_read read = {b, &pool, {0}};
    bench_fill(q, (size_t)n, 3);
    open_streams(b, MACHINE_DIM, MACHINE_POSITIONS);
    pool_start(&pool, threads - 1); /* beside this thread */
    t.n_entries = 0;
    timing_add(&t, "read", run_machine_read, &read);
    for (int i = 0; i < COUNT(pairs); i++) {
        if (!wanted(b, &pairs[i]) || pairs[i].type) continue;
        works[i] = (attend_work){{.n_heads = BENCH_KV_HEADS * MACHINE_GROUP, .end = MACHINE_POSITIONS},
                                 &b->keys[pairs[i].keys],
                                 &b->values[pairs[i].values],
                                 0,
                                 q,
                                 out};
        works[i].attention.arithmetic = pairs[i].arithmetic;
        works[i].attention.parallel = (tqkv_parallel){pool_run, &pool};
        timing_add(&t, pairs[i].name, run_attend, &works[i]);
    }
    timing_run(&t, &limits);
    print_machine(b, &t, threads);
    pool_stop(&pool);
    close_streams(b);
    fflush(stdout);
    free(q);
    free(out);
}

/* ---- The program ---- */

static void print_peaks(bench *b)
{
    static timing t;
    const timing_limits limits = {.min_rounds = 15, .max_rounds = 15, .sample = 1e-3};
    t.n_entries = 0;
    const timing_entry *fma = timing_add(&t, "fma", run_fma, b), *read = timing_add(&t, "read", run_read, b);
    timing_run(&t, &limits);
    printf("\ninstruction set %s%s\n", b->peak->isa, b->best ? "" : ", forced");
    printf("peak: %.1f G float multiply-adds/s (%.1f to %.1f), DRAM read %.1f GB/s (%.1f to %.1f)\n",
           1e-9 * peak_fma_count(b->peak) / timing_median(fma->cpu, t.n_rounds),
           1e-9 * peak_fma_count(b->peak) / timing_quantile(fma->cpu, t.n_rounds, 1),
           1e-9 * peak_fma_count(b->peak) / timing_quantile(fma->cpu, t.n_rounds, 0),
           1e-9 * PEAK_READ_BYTES / timing_median(read->cpu, t.n_rounds),
           1e-9 * PEAK_READ_BYTES / timing_quantile(read->cpu, t.n_rounds, 1),
           1e-9 * PEAK_READ_BYTES / timing_quantile(read->cpu, t.n_rounds, 0));
}

static void run_isa(bench *b, const peak *p)
{
    const options *o = &b->options;
    bench_check(tqkv_isa_force(NULL));
    b->best = strcmp(tqkv_isa_name(), p->isa) == 0;
    bench_check(tqkv_isa_force(p->isa));
    b->peak = p;
    print_peaks(b);
    if (o->threads) {
        run_machine(b, o->threads);
        return;
    }
    for (int i = 0; i < COUNT(head_dims); i++) {
        if (!chosen(o->head_dim, head_dims[i]) || (o->quick && head_dims[i] != 128)) continue;
        if (!o->only || strcmp(o->only, "encode") == 0) run_encoders(b, head_dims[i]);
    }
    if (!o->only || strcmp(o->only, "decode") == 0) run_decode(b);
    if (o->only ? strcmp(o->only, "pages") == 0 : !o->quick) run_pages(b);
    if (o->only ? strcmp(o->only, "latent") == 0 : !o->quick) run_latent(b);
    if (o->only ? strcmp(o->only, "sparse") == 0 : !o->quick) run_sparse(b);
    if (o->only ? strcmp(o->only, "threads") == 0 : !o->quick) run_threads(b);
}

static void print_help(void)
{
    printf("Usage: bench [options]: every shape with each instruction set present but scalar, in about five minutes.\n"
           "  --isa NAME       this instruction set alone: avx512, avx2, neon or scalar\n"
           "  --format NAME    this format, and F16 to compare it with; `default` is I8 keys and TQ4 values\n"
           "  --head-dim N     64, 80, 96, 128, 192, 256 or 512\n"
           "  --context N      512, 1024, 2048, 4096, 8192, 16384 or 32768 positions\n"
           "  --group N        2 or 8 query heads a KV head; 6 at head_dim 256, 64 at 512\n"
           "  --queries N      1, 8 or 128\n"
           "  --only WHAT      encode, decode, pages (and batches), latent, sparse (lists, index) or threads (appends, "
           "batches)\n"
           "  --threads N      only one token by so many threads, of every format, against their read bandwidth\n"
           "  --rounds N       this many rounds, at most %d; else 3 to 15, as many as fit into a second\n"
           "  --quick          one head_dim, short contexts, few rounds\n"
           "  --ggml FILE, --ik FILE  peers: bench/ggml.c as a shared object, see bench/rules.mk\n"
           "Times are processor time of the thread, medians over rounds in which all take turns; the limit is the "
           "larger of\n"
           "multiply-adds over the measured peak and stored bytes over the measured bandwidth, in the same round. "
           "Ratios of "
           "threads\nare of wall times.\n",
           TIMING_MAX_ROUNDS);
}

static bool parse_options(options *o, int argc, char **argv)
{
    const struct {
        const char *name;
        int *number;
        const char **text;
    } known[] = {{"--ggml", NULL, &o->peers[0]},   {"--ik", NULL, &o->peers[1]},    {"--isa", NULL, &o->isa},
                 {"--format", NULL, &o->format},   {"--only", NULL, &o->only},      {"--head-dim", &o->head_dim, NULL},
                 {"--context", &o->context, NULL}, {"--group", &o->group, NULL},    {"--queries", &o->queries, NULL},
                 {"--rounds", &o->rounds, NULL},   {"--threads", &o->threads, NULL}};
    for (int i = 1; i < argc; i++) {
        int k = 0;
        if (strcmp(argv[i], "--quick") == 0) o->quick = 1;
        if (strcmp(argv[i], "--help") == 0) o->help = 1;
        if (strcmp(argv[i], "--quick") == 0 || strcmp(argv[i], "--help") == 0) continue;
        while (k < COUNT(known) && strcmp(argv[i], known[k].name) != 0) k++;
        if (k == COUNT(known) || ++i == argc) return false;
        if (known[k].text) *known[k].text = argv[i];
        if (known[k].number && (*known[k].number = atoi(argv[i])) <= 0) return false;
    }
    const bool format_known = !o->format || strncmp(o->format, "default", 7) == 0 || tqkv_format_from_name(o->format);
    const bool isa_known = !o->isa || tqkv_isa_force(o->isa) == TQKV_OK;
    static const char *const parts[] = {"encode", "decode", "pages", "latent", "sparse", "threads"};
    bool only_known = !o->only;
    for (int i = 0; i < COUNT(parts); i++) only_known = only_known || strcmp(o->only, parts[i]) == 0;
    return o->rounds <= TIMING_MAX_ROUNDS && format_known && isa_known && only_known;
}

/* Each peer's symbols stay its own: both libraries have the same names. */
static const peer_library *load_peer(const char *file)
{
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    const peer_library *exports = library ? (const peer_library *)dlsym(library, "peer_exports") : NULL;
    if (exports) return exports;
    fprintf(stderr, "bench: %s\n", dlerror());
    exit(1);
}

int main(int argc, char **argv)
{
    static bench b;
    if (!parse_options(&b.options, argc, argv)) {
        fprintf(stderr, "bench: an option is unknown, or not one that this processor has; see bench --help\n");
        return 1;
    }
    if (b.options.help) {
        print_help();
        return 0;
    }
    for (int i = 0; i < COUNT(b.peers); i++)
        if (b.options.peers[i]) b.peers[i] = load_peer(b.options.peers[i]);
    b.memory = (float *)bench_alloc(PEAK_MEMORY_BYTES + PEAK_AHEAD);
    for (size_t i = 0; i < PEAK_MEMORY_BYTES / sizeof(float); i++) b.memory[i] = 1.0f;
    for (int i = 0; i < COUNT(peaks); i++) {
        const bool named = b.options.isa && strcmp(b.options.isa, peaks[i].isa) == 0;
        const bool all = !b.options.isa && (strcmp(peaks[i].isa, "scalar") != 0 || COUNT(peaks) == 1);
        if (named || (all && tqkv_isa_force(peaks[i].isa) == TQKV_OK)) run_isa(&b, &peaks[i]);
    }
    free(b.memory);
    return 0;
}
