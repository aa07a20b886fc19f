/* What a scale of channels costs: the same store with a centre, with centre and scale, and with neither. */
#include "bench.h"

enum { SCALE_DIM = 128, SCALE_TOKENS = 64, SCALE_POSITIONS = 4096, SCALE_GROUP = 4, CALIBRATED = 512 };
enum { PLAIN, CENTERED, SCALED, WAYS };

static const char *const ways[WAYS] = {"plain", "center", "scale"};

typedef struct scale_work {
    tqkv_store keys, values;
    tqkv_attention attention;
    tqkv_cache *cache;
    const float *rows; /* [SCALE_POSITIONS][BENCH_KV_HEADS][SCALE_DIM] */
    float *out;
    float center[BENCH_KV_HEADS * SCALE_DIM], scale[BENCH_KV_HEADS * SCALE_DIM];
} scale_work;

static void encode_tokens(void *user)
{
    const scale_work *work = (const scale_work *)user;
    bench_check(tqkv_encode(&work->keys, work->rows, SCALE_TOKENS, 0));
}

static void encode_token(void *user)
{
    const scale_work *work = (const scale_work *)user;
    bench_check(tqkv_encode(&work->keys, work->rows, 1, 0));
}

static void append_token(void *user)
{
    const scale_work *work = (const scale_work *)user;
    bench_check(tqkv_cache_truncate(work->cache, 0));
    bench_check(tqkv_cache_append(work->cache, work->rows, work->rows, 1));
}

static void attend_all(void *user)
{
    const scale_work *work = (const scale_work *)user;
    bench_check(tqkv_attend(&work->attention, work->rows, work->out));
}

static void calibrate(void *user)
{
    scale_work *work = (scale_work *)user;
    bench_check(
        tqkv_calibrate(&work->keys, work->rows, CALIBRATED, NULL, 0, 0, TQKV_PAIRS_NONE, work->center, work->scale));
}

static tqkv_store make_store(tqkv_format format)
{
    tqkv_store s = {.format = format, .head_dim = SCALE_DIM, .n_kv_heads = BENCH_KV_HEADS, .capacity = SCALE_POSITIONS};
    s.codes_size = tqkv_codes_size(&s);
    s.norms_size = tqkv_norms_size(&s);
    s.codes = bench_alloc(s.codes_size);
    s.norms = (float *)bench_alloc(s.norms_size + 1);
    return s;
}

static void open_work(scale_work *work, const pair *p, int way, const float *rows)
{
    tqkv_cache_desc desc = {.head_dim = SCALE_DIM,
                            .n_kv_heads = BENCH_KV_HEADS,
                            .n_heads = BENCH_KV_HEADS,
                            .capacity = SCALE_TOKENS,
                            .key_format = p->keys,
                            .value_format = p->values};
    work->rows = rows;
    work->keys = make_store(p->keys);
    work->values = make_store(p->values);
    calibrate(work);
    if (way != PLAIN) work->keys.center = work->center;
    if (way == SCALED) work->keys.channel_scale = work->scale;
    bench_check(tqkv_encode(&work->keys, rows, SCALE_POSITIONS, 0));
    bench_check(tqkv_encode(&work->values, rows, SCALE_POSITIONS, 0));
    desc.key_center = work->keys.center;
    desc.key_scale = work->keys.channel_scale;
    bench_check(tqkv_cache_create(&desc, &work->cache));
    work->out = (float *)bench_alloc(sizeof(float) * BENCH_KV_HEADS * SCALE_GROUP * SCALE_DIM);
    work->attention = (tqkv_attention){.keys = &work->keys,
                                       .values = &work->values,
                                       .n_heads = BENCH_KV_HEADS * SCALE_GROUP,
                                       .n_queries = 1,
                                       .end = SCALE_POSITIONS};
}

static void close_work(scale_work *work)
{
    tqkv_cache_destroy(work->cache);
    free(work->keys.codes);
    free(work->keys.norms);
    free(work->values.codes);
    free(work->values.norms);
    free(work->out);
}

/* One kind of work, each way: the ratio is the time of the store with a scale by that of the store with a centre, and
   by that of the plain one. */
static void compare(bench *b, const pair *p, const char *name, void (*run)(void *user), scale_work works[WAYS])
{
    static timing t;
    timing_limits limits = limits_of(&b->options);
    char label[64];
    t.n_entries = 0;
    for (int i = 0; i < WAYS; i++) timing_add(&t, ways[i], run, &works[i]);
    if (!b->options.rounds) limits.min_rounds = limits.max_rounds = b->options.quick ? 5 : 45;
    timing_run(&t, &limits);
    printf(" %s %s\n", p->name, name);
    for (int i = 0; i < WAYS; i++) {
        print_times(&t, &t.entries[i]);
        puts("");
    }
    snprintf(label, sizeof label, "scale_%s_%s", p->name, name);
    print_ratio(b, label, "by_center", 1.0 / timing_ratio(&t, &t.entries[SCALED], &t.entries[CENTERED]));
    print_ratio(b, label, "by_plain", 1.0 / timing_ratio(&t, &t.entries[SCALED], &t.entries[PLAIN]));
}

void run_scales(bench *b)
{
    static const struct {
        const char *name;
        void (*run)(void *user);
    } kinds[] = {
        {"encode_64", encode_tokens}, {"encode_1", encode_token}, {"append_1", append_token}, {"attend", attend_all}};
    static scale_work works[WAYS];
    static timing t;
    const timing_limits limits = limits_of(&b->options);
    const size_t n = (size_t)SCALE_POSITIONS * BENCH_KV_HEADS * SCALE_DIM;
    float *rows = (float *)bench_alloc(n * sizeof *rows);
    bench_fill(rows, n, 6);
    printf("\nscales: head_dim %d, %d KV heads; attention of %d heads over %d positions\n", SCALE_DIM, BENCH_KV_HEADS,
           BENCH_KV_HEADS * SCALE_GROUP, SCALE_POSITIONS);
    for (int i = 0; i < COUNT(pairs); i++) {
        const bool here = pairs[i].keys == TQKV_TQ4 || (pairs[i].keys == TQKV_I8 && pairs[i].values == TQKV_TQ4);
        if (!here || pairs[i].type != TQKV_TYPE_F32 || !wanted(b, &pairs[i])) continue;
        for (int way = 0; way < WAYS; way++) open_work(&works[way], &pairs[i], way, rows);
        for (int k = 0; k < COUNT(kinds); k++) compare(b, &pairs[i], kinds[k].name, kinds[k].run, works);
        if (pairs[i].keys == TQKV_TQ4) {
            t.n_entries = 0;
            timing_add(&t, "calibrate", calibrate, &works[PLAIN]);
            timing_run(&t, &limits);
            print_times(&t, &t.entries[0]);
            puts("");
            print_ratio(b, "calibrate_512", "ms", 1e3 * timing_median(t.entries[0].cpu, t.n_rounds));
        }
        for (int way = 0; way < WAYS; way++) close_work(&works[way]);
    }
    fflush(stdout);
    free(rows);
}
