/* One token over caches as presets make them, and over what a preset could have in their place: equal bits,
 * other formats. */
#include "bench.h"

enum { PRESET_GROUP = 2, PRESET_CHUNK = 256 };

typedef struct preset_row {
    const char *name, *beside; /* beside: the preset of as many bits */
    tqkv_format keys, values;
} preset_row;

static const preset_row preset_rows[] = {
    {"i8_tq4", NULL, TQKV_I8, TQKV_TQ4},   {"tq6_tq6", "i8_tq4", TQKV_TQ6, TQKV_TQ6},
    {"tq4_tq4", NULL, TQKV_TQ4, TQKV_TQ4}, {"tq5_tq3", "tq4_tq4", TQKV_TQ5, TQKV_TQ3},
    {"tq3_tq2", NULL, TQKV_TQ3, TQKV_TQ2},
};

typedef struct preset_work {
    tqkv_cache **caches; /* [n_caches]: as many layers as leave none in a CPU cache */
    int n_caches, next;
    const float *q;
    float *out;
} preset_work;

static void attend_next(void *user)
{
    preset_work *work = (preset_work *)user;
    bench_check(tqkv_cache_attend(work->caches[work->next], work->q, 1, work->out));
    work->next = (work->next + 1) % work->n_caches;
}

/* rows: [PRESET_CHUNK][BENCH_KV_HEADS][head_dim], appended again and again */
static void open_work(preset_work *work, const preset_row *row, int head_dim, int n_positions, const float *rows)
{
    tqkv_cache_desc desc = tqkv_cache_preset(TQKV_SAFE);
    tqkv_cache *first;
    desc.key_format = row->keys;
    desc.value_format = row->values;
    desc.head_dim = head_dim;
    desc.n_kv_heads = BENCH_KV_HEADS;
    desc.n_heads = BENCH_KV_HEADS * PRESET_GROUP;
    desc.capacity = n_positions;
    bench_check(tqkv_cache_create(&desc, &first));
    for (int i = 0; i < n_positions; i += PRESET_CHUNK) bench_check(tqkv_cache_append(first, rows, rows, PRESET_CHUNK));
    work->n_caches = bench_layers(tqkv_cache_bytes(first) / 2);
    work->next = 0;
    work->caches = (tqkv_cache **)bench_alloc((size_t)work->n_caches * sizeof *work->caches);
    work->caches[0] = first;
    for (int i = 1; i < work->n_caches; i++) bench_check(tqkv_cache_fork(first, NULL, &work->caches[i]));
}

static void close_work(preset_work *work)
{
    for (int i = 0; i < work->n_caches; i++) tqkv_cache_destroy(work->caches[i]);
    free(work->caches);
}

static void print_presets(const bench *b, const timing *t, int head_dim, int n_positions)
{
    printf("\npresets: head_dim %d, %d positions, group %d, 1 query; %d rounds\n", head_dim, n_positions, PRESET_GROUP,
           t->n_rounds);
    for (int i = 0; i < COUNT(preset_rows); i++) {
        print_times(t, &t->entries[i]);
        puts("");
    }
    for (int i = 0; i < COUNT(preset_rows); i++) {
        char name[64];
        snprintf(name, sizeof name, "preset_%s_d%d_n%d", preset_rows[i].name, head_dim, n_positions);
        print_ratio(b, name, "us", 1e6 * timing_median(t->entries[i].cpu, t->n_rounds));
        if (!preset_rows[i].beside) continue;
        const timing_entry *beside = timing_of(t, preset_rows[i].beside);
        print_ratio(b, name, "time", 1.0 / timing_ratio(t, &t->entries[i], beside));
    }
    fflush(stdout);
}

static void run_size(bench *b, int head_dim, int n_positions, const float *rows)
{
    static timing t;
    static preset_work works[COUNT(preset_rows)];
    timing_limits limits = limits_of(&b->options);
    float *out = (float *)bench_alloc(sizeof *out * BENCH_KV_HEADS * PRESET_GROUP * (size_t)head_dim);
    t.n_entries = 0;
    for (int i = 0; i < COUNT(preset_rows); i++) {
        works[i].q = rows;
        works[i].out = out;
        open_work(&works[i], &preset_rows[i], head_dim, n_positions, rows);
        timing_add(&t, preset_rows[i].name, attend_next, &works[i]);
    }
    if (!b->options.rounds) limits.min_rounds = limits.max_rounds = b->options.quick ? 3 : 31;
    timing_run(&t, &limits);
    print_presets(b, &t, head_dim, n_positions);
    for (int i = 0; i < COUNT(preset_rows); i++) close_work(&works[i]);
    free(out);
}

void run_presets(bench *b)
{
    static const int dims[] = {64, 128, 256}, sizes[] = {4096, 32768};
    const size_t n = (size_t)PRESET_CHUNK * BENCH_KV_HEADS * 256;
    float *rows = (float *)bench_alloc(n * sizeof *rows);
    bench_fill(rows, n, 9);
    for (int i = 0; i < COUNT(dims); i++)
        for (int j = 0; j < COUNT(sizes); j++)
            if (chosen(b->options.head_dim, dims[i]) && chosen(b->options.context, sizes[j]))
                run_size(b, dims[i], sizes[j], rows);
    free(rows);
}
