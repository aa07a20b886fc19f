/* One context over several machines: each rank of an MPI program keeps a share of the positions in a cache of its own.
 * For a new token every rank attends over its share, and one MPI_Allreduce merges the sums: tqkv_attend_merge is its
 * operation.
 *   mpirun -n 4 build/mpi_context [POSITIONS]
 *   mpirun -n 4 build/mpi_context --fail RANK    the cache of one rank is too small: all ranks stop with its error
 *   mpirun -n 4 build/mpi_context --kill RANK    one rank dies: mpirun ends the others
 *   mpirun -n 4 build/mpi_context --preset 1     caches that learn: 0 is TQKV_SAFE, 1 TQKV_SMALL, 2 TQKV_TINY
 * What a rank sends does not depend on the length of the context: one row of sums a query head. A failure travels in
 * these rows, so no rank waits for one that gave up. Read merge_heads and attend_together first. */
#define _POSIX_C_SOURCE 200809L
#include "tqkv.h"
#include <errno.h>
#include <math.h>
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM = 128, KV_HEADS = 8, HEADS = 32, TOKENS = 24, CHUNK = 256, MAX_RANKS = 4096 };

/* A query head's sums over some positions, and the first failure among those who added to them. */
typedef struct head_sums {
    float out[DIM]; /* not normalised */
    float max, sum;
    int32_t failure; /* 0, or 16 * (rank + 1) + its tqkv_result */
} head_sums;

typedef struct share {
    MPI_Comm ranks; /* those that hold the context */
    int rank, n_ranks;
    tqkv_cache *cache;
    int32_t failure;           /* of this rank, as in head_sums */
    double attending, merging; /* seconds */
} share;

static tqkv_store one_head; /* the shape of a row */
static tqkv_attention one_row;
static MPI_Datatype row_type;
static MPI_Op merge_op;
static int own_rank; /* of all ranks, which is its rank among any first few */

/* ---- Sums of the ranks ---- */

/* in_out += in, row by row. MPI may cut the rows, and merges in any order. */
static void merge_heads(void *in, void *in_out, int *n_rows, MPI_Datatype *type)
{
    const head_sums *from = (const head_sums *)in;
    head_sums *to = (head_sums *)in_out;
    (void)type;
    for (int i = 0; i < *n_rows; i++) {
        tqkv_result result = tqkv_attend_merge(&one_row, to[i].out, &to[i].max, &to[i].sum, &one_row, from[i].out,
                                               &from[i].max, &from[i].sum);
        int32_t failure = result == TQKV_OK ? from[i].failure : 16 * (own_rank + 1) + (int32_t)result;
        if (failure > to[i].failure) to[i].failure = failure;
    }
}

static void merge_open(void)
{
    MPI_Comm_rank(MPI_COMM_WORLD, &own_rank);
    one_head = (tqkv_store){.format = TQKV_TQ4, .head_dim = DIM, .n_kv_heads = 1, .capacity = 1};
    one_row = (tqkv_attention){.keys = &one_head, .values = &one_head, .n_heads = 1, .n_queries = 1};
    MPI_Type_contiguous(sizeof(head_sums), MPI_BYTE, &row_type); /* ranks of one byte order */
    MPI_Type_commit(&row_type);
    MPI_Op_create(merge_heads, 1, &merge_op);
}

static void note(share *s, tqkv_result result)
{
    if (result != TQKV_OK && !s->failure) s->failure = 16 * (s->rank + 1) + (int32_t)result;
}

/* One query token; q, out: [HEADS][DIM], the same on all ranks. A share may be empty. Returns the failure of any rank.
 * */
static int32_t attend_together(share *s, const float *q, float *out)
{
    static float own[HEADS * DIM], max[HEADS], sum[HEADS];
    static head_sums rows[HEADS], merged[HEADS];
    double start = MPI_Wtime();
    tqkv_attention a;
    memset(&a, 0, sizeof a);
    if (!s->failure) note(s, tqkv_cache_view(s->cache, 1, &a)); /* all of its positions are before the query */
    if (!s->failure) note(s, tqkv_attend_partial(&a, q, 0, (int)a.end, own, max, sum));
    memset(rows, 0, sizeof rows);
    for (int h = 0; h < HEADS; h++) {
        rows[h].failure = s->failure;
        rows[h].max = s->failure ? -INFINITY : max[h];
        if (s->failure) continue; /* the others wait for something to add */
        memcpy(rows[h].out, own + h * DIM, sizeof rows[h].out);
        rows[h].sum = sum[h];
    }
    double attended = MPI_Wtime();
    MPI_Allreduce(rows, merged, HEADS, row_type, merge_op, s->ranks);
    for (int h = 0; h < HEADS; h++) {
        if (merged[h].failure) return merged[h].failure;
        memcpy(out + h * DIM, merged[h].out, sizeof merged[h].out);
        max[h] = merged[h].max;
        sum[h] = merged[h].sum;
    }
    note(s, tqkv_attend_finish(&a, out, max, sum)); /* sinks would be added here, once */
    s->attending += attended - start;
    s->merging += MPI_Wtime() - attended;
    return s->failure;
}

/* ---- Rows of a context that every rank can make for itself ---- */

/* Close to Gaussian, of variance 1; the same for the same seed. */
static void fill(uint64_t seed, float *values, int n)
{
    uint64_t state = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    for (int i = 0; i < n; i++) {
        float total = 0.0f;
        for (int part = 0; part < 4; part++) {
            state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            total += (float)(state >> 40) / 16777216.0f - 0.5f;
        }
        values[i] = total * 1.7320508f;
    }
}

/* Appends positions [first, end) of the context. */
static void append(share *s, int64_t first, int64_t end)
{
    static float k[CHUNK * KV_HEADS * DIM], v[CHUNK * KV_HEADS * DIM];
    for (int n; first < end && !s->failure; first += n) {
        n = (int)(end - first < CHUNK ? end - first : CHUNK);
        for (int i = 0; i < n; i++) {
            fill(2 * (uint64_t)(first + i), k + i * KV_HEADS * DIM, KV_HEADS * DIM);
            fill(2 * (uint64_t)(first + i) + 1, v + i * KV_HEADS * DIM, KV_HEADS * DIM);
        }
        note(s, tqkv_cache_append(s->cache, k, v, n));
    }
}

/* ---- The program ---- */

typedef struct options {
    int n_positions, fail, kill; /* ranks, or -1 */
    int preset;                  /* or -1 */
} options;

static void open_share(share *s, const options *o)
{
    int first = (int)((int64_t)o->n_positions * s->rank / s->n_ranks);
    int end = (int)((int64_t)o->n_positions * (s->rank + 1) / s->n_ranks);
    tqkv_cache_desc desc = {0};
    if (o->preset >= 0) desc = tqkv_cache_preset((tqkv_preset)o->preset);
    desc.head_dim = DIM;
    desc.n_kv_heads = KV_HEADS;
    desc.n_heads = HEADS;
    desc.capacity = end - first + TOKENS + (o->preset < 0 ? 0 : 4096); /* a quarter is for what a cache learns from */
    if (s->rank == o->fail) desc.capacity = end - first + 1;           /* full after one token */
    note(s, tqkv_cache_create(&desc, &s->cache));
    append(s, first, end);
}

/* The new tokens one after the other; each joins the share of the next rank. outs: [TOKENS][HEADS][DIM]. */
static int32_t run(share *s, const options *o, float *outs)
{
    static float q[HEADS * DIM];
    int32_t failure = 0;
    for (int t = 0; t < TOKENS && !failure; t++) {
        if (t == TOKENS / 2 && s->rank == o->kill) raise(SIGKILL);
        if (t % s->n_ranks == s->rank) append(s, o->n_positions + t, o->n_positions + t + 1);
        fill((uint64_t)t + 77, q, HEADS * DIM);
        failure = attend_together(s, q, outs + t * HEADS * DIM);
        if (t == 0) s->attending = s->merging = 0.0; /* the first token also opens connections */
    }
    return failure;
}

/* |a - b| / |a|, the worst token. */
static double difference(const float *a, const float *b)
{
    double worst = 0.0;
    for (int t = 0; t < TOKENS; t++) {
        double wrong = 0.0, all = 0.0;
        for (int i = t * HEADS * DIM; i < (t + 1) * HEADS * DIM; i++) {
            wrong += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
            all += (double)a[i] * a[i];
        }
        worst = fmax(worst, sqrt(wrong / all));
    }
    return worst;
}

/* Whether all ranks have the same bits: the next layer's keys must not drift apart. */
static bool same_on_all(const share *s, const float *outs)
{
    uint64_t hash = 14695981039346656037u, least, most;
    for (size_t i = 0; i < TOKENS * HEADS * DIM * sizeof *outs; i++)
        hash = (hash ^ ((const unsigned char *)outs)[i]) * 1099511628211u;
    MPI_Allreduce(&hash, &least, 1, MPI_UINT64_T, MPI_MIN, s->ranks);
    MPI_Allreduce(&hash, &most, 1, MPI_UINT64_T, MPI_MAX, s->ranks);
    return least == most;
}

/* Prints a line for each rank. Returns whether the outputs are those of one rank, to 3e-4, and the same everywhere. By
 * a preset each share has learned on its own: they differ by the formats' errors. */
static bool report(const share *s, const options *o, const float *outs, const float *alone)
{
    static const double limits[4] = {3e-4, 0.2, 0.4, 0.8};
    static double times[2 * MAX_RANKS];
    double own[2] = {s->attending, s->merging}, error = s->rank == 0 ? difference(alone, outs) : 0.0;
    bool same = same_on_all(s, outs), good = same && error <= limits[o->preset + 1];
    MPI_Gather(own, 2, MPI_DOUBLE, times, 2, MPI_DOUBLE, 0, s->ranks);
    for (int i = 0; s->rank == 0 && i < s->n_ranks; i++)
        printf("%5d %5d %12.3f %12.3f\n", s->n_ranks, i, 1e3 * times[2 * i] / (TOKENS - 1),
               1e3 * times[2 * i + 1] / (TOKENS - 1));
    if (s->rank == 0)
        printf("      %d ranks: %s bits on all; from one rank's attention %.1e: %s\n", s->n_ranks,
               same ? "the same" : "OTHER", error, good ? "as expected" : "WRONG");
    fflush(stdout);
    return good;
}

/* The context on the first n_ranks ranks; the others wait. alone: [TOKENS][HEADS][DIM], written by a run of one rank.
 * */
static bool run_on(int n_ranks, const options *o, float *alone)
{
    static float outs[TOKENS * HEADS * DIM];
    share s = {.n_ranks = n_ranks};
    bool good = true;
    MPI_Comm_rank(MPI_COMM_WORLD, &s.rank);
    MPI_Comm_split(MPI_COMM_WORLD, s.rank < n_ranks ? 0 : MPI_UNDEFINED, s.rank, &s.ranks);
    if (s.rank < n_ranks) {
        open_share(&s, o);
        int32_t failure = run(&s, o, outs);
        if (failure && s.rank == 0)
            fprintf(stderr, "mpi_context: rank %d: %s\n", failure / 16 - 1,
                    tqkv_result_string((tqkv_result)(failure % 16)));
        if (n_ranks == 1) memcpy(alone, outs, sizeof outs);
        good = !failure && report(&s, o, outs, alone);
        tqkv_cache_destroy(s.cache);
        MPI_Comm_free(&s.ranks);
    }
    MPI_Allreduce(MPI_IN_PLACE, &good, 1, MPI_C_BOOL, MPI_LAND, MPI_COMM_WORLD);
    return good;
}

/* Whether a run of one rank gave what tqkv_cache_attend gives: with a centre, which a preset learns, but for last
 * bits. */
static bool whole_is(const options *o, const float *alone)
{
    static float q[HEADS * DIM], outs[TOKENS * HEADS * DIM];
    share s = {.n_ranks = 1};
    options whole = {o->n_positions, -1, -1, o->preset};
    open_share(&s, &whole);
    for (int t = 0; t < TOKENS; t++) {
        append(&s, o->n_positions + t, o->n_positions + t + 1);
        fill((uint64_t)t + 77, q, HEADS * DIM);
        note(&s, tqkv_cache_attend(s.cache, q, 1, outs + t * HEADS * DIM));
    }
    bool good = !s.failure && (o->preset < 0 ? memcmp(outs, alone, sizeof outs) == 0 : difference(outs, alone) <= 3e-4);
    tqkv_cache_destroy(s.cache);
    return good;
}

static bool parse(options *o, int argc, char **argv)
{
    *o = (options){16384, -1, -1, -1};
    for (int i = 1; i < argc; i++) {
        int *number = strcmp(argv[i], "--fail") == 0     ? &o->fail
                      : strcmp(argv[i], "--kill") == 0   ? &o->kill
                      : strcmp(argv[i], "--preset") == 0 ? &o->preset
                                                         : NULL;
        char *rest;
        if (number && ++i == argc) return false;
        errno = 0;
        long value = strtol(argv[i], &rest, 10);
        if (errno || *rest || rest == argv[i] || value < (number ? 0 : 1) || value > 1 << 28) return false;
        *(number ? number : &o->n_positions) = (int)value;
    }
    return o->preset <= (int)TQKV_TINY;
}

int main(int argc, char **argv)
{
    static float alone[TOKENS * HEADS * DIM];
    options o, whole;
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (!parse(&o, argc, argv) || size > MAX_RANKS) {
        if (rank == 0)
            fprintf(stderr,
                    "usage: mpirun -n RANKS mpi_context [POSITIONS] [--fail RANK] [--kill RANK] [--preset 0|1|2]\n");
        MPI_Finalize();
        return 2;
    }
    merge_open();
    if (rank == 0)
        printf("%d positions of %d heads of %d; %d query heads; %d new tokens\n"
               "a rank sends %zu bytes a token and step of the reduction, whatever the number of positions\n"
               "ranks  rank    attend ms merge+wait ms\n",
               o.n_positions, KV_HEADS, DIM, HEADS, TOKENS, HEADS * sizeof(head_sums));
    whole = (options){o.n_positions, -1, -1, o.preset};
    bool good = run_on(1, &whole, alone);
    if (rank == 0 && !whole_is(&o, alone)) {
        fprintf(stderr, "mpi_context: one rank does not give what one cache gives\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    for (int n = 2; n <= size && good; n = n < size && 2 * n > size ? size : 2 * n)
        good = run_on(n, n == size ? &o : &whole, alone);
    MPI_Op_free(&merge_op);
    MPI_Type_free(&row_type);
    MPI_Finalize();
    return !good;
}
