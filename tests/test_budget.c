/* examples/plan.h: what a plan takes is what its caches take, and no step that fits is left. */
#include "examples/plan.h"
#include "tests/runner.h"

typedef struct plan_shape {
    int head_dim, value_dim, n_kv_heads, context, window, chunk;
} plan_shape;

/* Every pair of formats of a shape: the cache's own bytes. */
static void run_bytes(const void *row)
{
    const plan_shape *p = (const plan_shape *)row;
    const tqkv_cache_desc desc = plan_cache(p->head_dim, p->value_dim, p->n_kv_heads, p->context, p->window, p->chunk);
    plan_stream streams[2];
    memset(streams, 0, sizeof streams);
    REQUIRE(plan_measure_bytes(&desc, streams), "no bytes");
    for (int k = 0; k < PLAN_FORMATS; k++)
        for (int v = 0; v < PLAN_FORMATS; v++) {
            tqkv_cache_desc both = desc;
            tqkv_cache *cache = NULL;
            both.key_format = plan_formats[k];
            both.value_format = plan_formats[v];
            CHECK_RESULT(tqkv_cache_create(&both, &cache), TQKV_OK);
            streams[0].chosen = k;
            streams[1].chosen = v;
            CHECK(plan_bytes(streams, 2) == (double)tqkv_cache_bytes(cache), "%s/%s: %.0f bytes, not %.0f",
                  tqkv_format_name(plan_formats[k]), tqkv_format_name(plan_formats[v]), plan_bytes(streams, 2),
                  (double)tqkv_cache_bytes(cache));
            tqkv_cache_destroy(cache);
        }
}

/* Streams of random weight whose loss falls by about four with each bit. */
static void fill(plan_stream *streams, int n, uint32_t seed)
{
    static const double bits[PLAN_FORMATS] = {2, 3, 4, 5, 6, 8, 16};
    for (int i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        const double loss = (double)(seed >> 16 & 255) + 1, weight = 1 + (double)(seed >> 28);
        for (int f = 0; f < PLAN_FORMATS; f++) {
            streams[i].loss[f] = f == PLAN_FORMATS - 1 ? 0 : loss * pow(4, -bits[f]);
            streams[i].bytes[f] = weight * bits[f];
        }
    }
}

static void run_chosen(const void *row)
{
    enum { N = 24 };
    const double share = *(const double *)row; /* of the bytes between the shortest and the longest formats */
    plan_stream streams[N];
    fill(streams, N, 7);
    double least = 0, most = 0;
    for (int i = 0; i < N; i++) {
        least += streams[i].bytes[0];
        most += streams[i].bytes[PLAN_FORMATS - 1];
    }
    const double room = least + share * (most - least);
    CHECK(plan_choose(streams, N, room), "the shortest do not fit");
    const double taken = plan_bytes(streams, N);
    CHECK(taken <= room, "%g bytes of %g", taken, room);
    for (int i = 0; i < N; i++)
        for (int f = streams[i].chosen + 1; f < PLAN_FORMATS; f++)
            CHECK(taken + streams[i].bytes[f] - streams[i].bytes[streams[i].chosen] > room,
                  "stream %d has room for a longer format", i);
    /* Against one format for all of as many bytes. */
    for (int f = 0; f < PLAN_FORMATS; f++) {
        double bytes = 0, loss = 0;
        for (int i = 0; i < N; i++) {
            bytes += streams[i].bytes[f];
            loss += streams[i].loss[f];
        }
        if (bytes <= room)
            CHECK(plan_loss(streams, N) <= loss, "%g, one format for all %g", plan_loss(streams, N), loss);
    }
}

static void run_none(const void *row)
{
    (void)row;
    plan_stream streams[3];
    fill(streams, 3, 9);
    plan_choose(streams, 3, 1e9);
    CHECK(streams[0].chosen == PLAN_FORMATS - 1 && plan_loss(streams, 3) == 0, "all bytes are not halves");
    CHECK(!plan_choose(streams, 3, 5) && streams[0].chosen == 0, "a plan that does not fit");
    CHECK(!plan_choose(streams, 3, NAN), "a plan of no number");
}

void test_budget_cases(void)
{
    static const plan_shape shapes[] = {
        {64, 0, 3, 4096, 0, 512},    {256, 0, 1, 4096, 512, 512}, {128, 0, 8, 300, 1024, 512},
        {192, 128, 2, 1000, 0, 512}, {80, 0, 4, 100000, 300, 64}, {32, 0, 1, 16, 0, 512},
    };
    static const double shares[] = {0, 0.1, 0.17, 0.3, 0.5, 1};
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++)
        test_add(run_bytes, &shapes[i], sizeof shapes[i], "budget/bytes/%d", i);
    for (int i = 0; i < (int)(sizeof shares / sizeof *shares); i++)
        test_add(run_chosen, &shares[i], sizeof shares[i], "budget/chosen/%d", i);
    test_add(run_none, NULL, 0, "budget/none");
}
