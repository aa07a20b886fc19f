/* Encoding, against a copy of the same floats. */
#include "bench.h"

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

/* The source stays in the L2 cache, where a model's projections leave it. */
enum { ENCODE_SOURCE_BYTES = 256 << 10 };

static void print_encoder(const bench *b, const timing *t, const timing_entry *entry, int head_dim, bool ratios)
{
    const timing_entry *copy = timing_of(t, "memcpy");
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
        const timing_entry *floats = timing_of(t, tqkv_format_name(typed_rows[i].format));
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

void run_encoders(bench *b, int head_dim)
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
        if (pairs[i].keys != pairs[i].values || !wanted(b, &pairs[i])) continue;
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
