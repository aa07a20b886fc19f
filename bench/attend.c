/* Attention: every shape and pair of formats against the limits and the peers, and latent caches. */
#include "bench.h"

/* ---- Shapes: printing ---- */

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
    const timing_entry *fma_entry = timing_of(t, "fma"), *read_entry = timing_of(t, "read");
    for (int i = 0; i < t->n_rounds; i++) {
        const double read = bytes / PEAK_READ_BYTES * read_entry->cpu[i];
        fma[i] = macs / peak_fma_count(b->peak) * fma_entry->cpu[i];
        limits[i] = fma[i] > read ? fma[i] : read;
    }
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
}

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

/* ---- Shapes ---- */

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

void run_decode(bench *b)
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
    const timing_entry *fma = timing_of(t, "fma");
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

void run_latent(bench *b)
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
            *work = (attend_work){
                {.n_heads = LATENT_HEADS, .n_queries = 1, .end = LATENT_POSITIONS}, keys, keys, 0, q, out};
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
