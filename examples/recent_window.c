/* The newest positions exact, the older ones quantised: two caches a layer, attended as two slices and merged.
 *   recent_window [WINDOWS]    the score of tinylm for several pairs of formats, then what the second cache costs
 * The values of the two caches may have different formats, hence different bases: tqkv_attend_merge_slice converts. */
#define _POSIX_C_SOURCE  200809L
#define _DARWIN_C_SOURCE /* the number of processors, which POSIX does not give */
#include "../tqkv.h"
#include "tinylm_score.h"

enum { RECENT = 64 };

/* ---- attention over two caches ---- */

/* The newest n_queries positions of a cache. */
static tqkv_attention view(const tqkv_cache *cache, int n_heads, int n_queries)
{
    tqkv_attention a = {.keys = tqkv_cache_keys(cache), .values = tqkv_cache_values(cache), .n_heads = n_heads};
    a.n_queries = n_queries;
    a.end = tqkv_cache_end(cache);
    return a;
}

/* Query i of n stands at the newest positions of both caches. `recent` is a ring with a window of RECENT. `old` has every
 * position, too: queries see it as if they stood RECENT positions earlier, so each position is seen once.
 * q, out: [n][n_heads][head_dim]; scratch: n * n_heads * (head_dim + 4) floats */
static tqkv_result attend_both(const tqkv_cache *old, const tqkv_cache *recent, int n_heads, int n, int window,
                               float softcap, const tqkv_parallel *parallel, const float *q, float *out, float *scratch)
{
    tqkv_attention a = view(recent, n_heads, n), b = view(old, n_heads, n);
    int rows = n * n_heads, resident = b.end < b.keys->capacity ? (int)b.end : b.keys->capacity;
    float *max = scratch, *sum = max + rows, *old_max = sum + rows, *old_sum = old_max + rows,
          *old_out = old_sum + rows;
    int64_t first = a.end > a.keys->capacity ? a.end - a.keys->capacity : 0;
    a.softcap = b.softcap = softcap;
    a.parallel = b.parallel = *parallel;
    a.window = RECENT;
    tqkv_result result = tqkv_attend_partial(&a, q, first, (int)(a.end - first), out, max, sum);
    if (result == TQKV_OK && b.end > RECENT) {
        b.end -= RECENT;
        b.kv_len = resident - RECENT;
        b.window = window > 0 ? window - RECENT : 0;
        result = tqkv_attend_partial(&b, q, b.end - b.kv_len, b.kv_len, old_out, old_max, old_sum);
        if (result == TQKV_OK) result = tqkv_attend_merge_slice(&a, out, max, sum, &b, old_out, old_max, old_sum);
    }
    return result == TQKV_OK ? tqkv_attend_finish(&a, out, max, sum) : result;
}

/* ---- in a transformer ---- */

typedef struct recent_caches {
    tqkv_cache *layers[MAX_LAYERS]; /* F16 rings */
    float *scratch;
} recent_caches;

static void attend_with_recent(session *s, int index, int n)
{
    const model_layer *layer = &s->m->layers[index];
    recent_caches *r = (recent_caches *)s->user;
    tqkv_parallel parallel = {pool_run, &s->m->pool};
    check(tqkv_cache_truncate(r->layers[index], s->end), "truncate"); /* follows session_truncate */
    check(tqkv_cache_append(r->layers[index], s->k, s->v, n), "append");
    check(tqkv_cache_append(s->caches[index], s->k, s->v, n), "append");
    check(attend_both(s->caches[index], r->layers[index], layer->n_heads, n, layer->window, layer->softcap, &parallel,
                      s->q, s->wide, r->scratch),
          "attend");
}

/* A ring of RECENT positions is enough for one query; a batch of n needs n - 1 more. */
static void recent_open(recent_caches *r, session *s)
{
    size_t widest = 0;
    for (int i = 0; i < s->m->n_layers; i++) {
        const model_layer *layer = &s->m->layers[i];
        tqkv_cache_desc desc = {.head_dim = layer->head_dim, .n_kv_heads = layer->n_kv_heads, .ring = true};
        desc.n_heads = layer->n_heads;
        desc.capacity = RECENT + BATCH - 1;
        desc.key_format = desc.value_format = TQKV_F16;
        check(tqkv_cache_create(&desc, &r->layers[i]), "cache");
        size_t row = (size_t)layer->n_heads * (size_t)(layer->head_dim + 4);
        widest = row > widest ? row : widest;
    }
    r->scratch = floats(BATCH * widest);
    s->attend = attend_with_recent;
    s->user = r;
}

static void recent_close(recent_caches *r)
{
    for (int i = 0; i < MAX_LAYERS; i++) tqkv_cache_destroy(r->layers[i]);
    free(r->scratch);
}

/* The KL divergence of a pair, with or without recent positions in F16. */
static double divergence(scoring *job, const char *const pair[2], bool recent)
{
    session s;
    recent_caches r = {{NULL}, NULL};
    double means[3];
    session_create(&s, job->m, find_format(pair[0]), find_format(pair[1]), WINDOW_BYTES);
    if (recent) recent_open(&r, &s);
    score_windows(job, &s, job->logits, pair[0]);
    compare(job->logits, job->reference, job->text, job->n_windows * WINDOW_BYTES, means);
    recent_close(&r);
    session_destroy(&s);
    return means[1];
}

static void print_scores(int n_windows)
{
    static const char *const pairs[][2] = {{"f16", "f16"}, {"i8", "tq4"}, {"tq4", "tq4"}, {"tq3", "tq3"}};
    options o = parse(2, (char *[]){"recent_window", "score", NULL});
    model m;
    session s;
    if (!model_load(&m, o.model_path, o.n_threads)) stop(o.model_path, "is no model, or damaged");
    scoring job = scoring_open(&m, o.file, n_windows);
    session_create(&s, &m, find_format("f32"), find_format("f32"), WINDOW_BYTES);
    score_windows(&job, &s, job.reference, "f32");
    session_destroy(&s);
    printf("KL divergence from the f32 cache, nats a byte, %d windows of %d bytes; the newest %d positions in F16\n",
           n_windows, WINDOW_BYTES, RECENT);
    printf("%-6s %-6s %11s %11s %7s\n", "#keys", "values", "without", "with", "ratio");
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        double without = divergence(&job, pairs[i], false), with = divergence(&job, pairs[i], true);
        printf("%-6s %-6s %11.7f %11.7f %7.2f\n", pairs[i][0], pairs[i][1], without, with, with / without);
        fflush(stdout);
    }
    scoring_close(&job);
    model_free(&m);
}

/* ---- what it costs ---- */

enum { DIM = 128, KV_HEADS = 8, HEADS = 16, CHUNK = 512, ROUNDS = 9 };

static tqkv_cache *filled_cache(tqkv_format keys, tqkv_format values, int capacity, int positions, const float *rows)
{
    tqkv_cache_desc desc = {.head_dim = DIM, .n_kv_heads = KV_HEADS, .n_heads = HEADS, .capacity = capacity};
    tqkv_cache *cache;
    desc.ring = true;
    desc.key_format = keys;
    desc.value_format = values;
    check(tqkv_cache_create(&desc, &cache), "cache");
    for (int i = 0; i < positions; i += CHUNK) check(tqkv_cache_append(cache, rows, rows, CHUNK), "append");
    return cache;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Microseconds of processor time: other programs move it less than they move the clock. */
static double processor_time(void) { return 1e6 * (double)clock() / CLOCKS_PER_SEC; }

/* One token, one thread. Both ways take turns; medians. */
static void print_cost(int positions, const float *rows)
{
    static float out[HEADS * DIM], scratch[HEADS * (DIM + 4)];
    double times[2][ROUNDS];
    tqkv_parallel alone = {NULL, NULL};
    tqkv_cache *old = filled_cache(TQKV_I8, TQKV_TQ4, positions, positions, rows);
    tqkv_cache *recent = filled_cache(TQKV_F16, TQKV_F16, RECENT, positions, rows);
    for (int round = 0; round < ROUNDS; round++) {
        double start = processor_time();
        check(tqkv_cache_attend(old, rows, 1, out), "attend");
        double middle = processor_time();
        check(attend_both(old, recent, HEADS, 1, 0, 0, &alone, rows, out, scratch), "attend");
        times[0][round] = middle - start;
        times[1][round] = processor_time() - middle;
    }
    for (int way = 0; way < 2; way++) qsort(times[way], ROUNDS, sizeof(double), by_size);
    double one = times[0][ROUNDS / 2], both = times[1][ROUNDS / 2];
    double old_bytes = (double)tqkv_cache_bytes(old), recent_bytes = (double)tqkv_cache_bytes(recent);
    printf("%9d %9.0f %9.0f %+6.1f%% %9.0f %9.0f %+6.1f%%\n", positions, one, both, 100 * (both / one - 1),
           old_bytes / 1024, (old_bytes + recent_bytes) / 1024, 100 * recent_bytes / old_bytes);
    tqkv_cache_destroy(old);
    tqkv_cache_destroy(recent);
}

int main(int argc, char **argv)
{
    uint64_t seed = 1;
    size_t count = (size_t)CHUNK * KV_HEADS * DIM;
    float *rows = floats(count);
    print_scores(argc > 1 ? number("windows", argv[1], 1, 1 << 16) : 1);
    for (size_t i = 0; i < count; i++) rows[i] = (float)(2 * random_unit(&seed) - 1);
    printf("\ncost for one token, i8 keys and tq4 values, head_dim %d, %d query heads, %d KV heads, one thread\n", DIM,
           HEADS, KV_HEADS);
    printf("%9s %9s %9s %7s %9s %9s %7s\n", "positions", "us", "with", "", "KiB", "with", "");
    for (int positions = 1024; positions <= 16384; positions *= 4) print_cost(positions, rows);
    free(rows);
    return 0;
}
