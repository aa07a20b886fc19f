/* Measures tqkv against this core's limits and against peers. `bench --help` names the options. */
#include "bench.h"

#include <dlfcn.h>

/* ---- What is chosen ---- */

bool wanted(const bench *b, const pair *p)
{
    const char *format = b->options.format;
    return !format || strcmp(format, p->name) == 0 || p->keys == TQKV_F16; /* the others are compared with F16 */
}

bool chosen(int option, int value) { return option == 0 || option == value; }

timing_limits limits_of(const options *o)
{
    timing_limits limits = {.min_rounds = 3, .max_rounds = 15, .seconds = o->quick ? 0.3 : 1.0, .sample = 1e-3};
    if (o->rounds > 0) limits.min_rounds = limits.max_rounds = o->rounds;
    return limits;
}

/* ---- Streams ---- */

void open_streams(bench *b, int head_dim, int n_positions)
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

void close_streams(bench *b)
{
    for (int i = 0; i < FORMATS; i++) {
        bench_stream_close(&b->keys[i]);
        bench_stream_close(&b->values[i]);
    }
}

double stored_bytes(const bench *b, const pair *p)
{
    const tqkv_store *keys = b->keys[p->keys].layers, *values = b->values[p->values].layers;
    return (double)(keys->codes_size + keys->norms_size + values->codes_size + values->norms_size);
}

/* By way of halves, in rows of 32. */
void *typed_copy(tqkv_type type, const float *values, size_t n)
{
    void *typed = bench_alloc(n * sizeof *values);
    tqkv_store rows = {.format = TQKV_F16, .head_dim = 32, .n_kv_heads = 1, .capacity = (int)(n / 32)};
    rows.codes_size = tqkv_codes_size(&rows);
    rows.codes = bench_alloc(rows.codes_size);
    bench_check(tqkv_encode(&rows, values, rows.capacity, 0));
    rows.type = type;
    bench_check(tqkv_decode(&rows, 0, rows.capacity, TQKV_ORIGINAL, typed));
    free(rows.codes);
    return typed;
}

/* ---- Work ---- */

void run_fma(void *user)
{
    bench *b = (bench *)user;
    b->sink += b->peak->fma();
}

void run_read(void *user)
{
    bench *b = (bench *)user;
    b->sink += b->peak->read(b->memory + b->read_at / sizeof(float));
    b->read_at = (b->read_at + PEAK_READ_BYTES) % PEAK_MEMORY_BYTES;
}

void run_attend(void *user)
{
    attend_work *work = (attend_work *)user;
    if (work->attention.n_queries < 1) { /* a call that does nothing is valid, and takes no time */
        fprintf(stderr, "bench: attention without queries\n");
        exit(1);
    }
    work->attention.keys = &work->keys->layers[work->layer];
    work->attention.values = &work->values->layers[work->layer];
    const int n_layers = work->keys->n_layers < work->values->n_layers ? work->keys->n_layers : work->values->n_layers;
    work->layer = (work->layer + 1) % n_layers;
    bench_check(tqkv_attend(&work->attention, work->q, work->out));
}

/* ---- Printing ---- */

void print_ratio(const bench *b, const char *name, const char *to, double value)
{
    printf("ratio %s_%s%s%s %.4g\n", name, to, b->best ? "" : "_", b->best ? "" : b->peak->isa, value);
}

void print_times(const timing *t, const timing_entry *entry)
{
    const int n = t->n_rounds;
    printf("  %-28s %10.1f %10.1f %10.1f %10.1f", entry->name, 1e6 * timing_median(entry->cpu, n),
           1e6 * timing_quantile(entry->cpu, n, 0), 1e6 * timing_quantile(entry->cpu, n, 1),
           1e6 * timing_median(entry->wall, n));
}

bool is_peer(const timing_entry *entry) { return strstr(entry->name, "ggml_") != NULL; }

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
    if (o->only ? strcmp(o->only, "scale") == 0 : !o->quick) run_scales(b);
    if (o->only ? strcmp(o->only, "ends") == 0 : !o->quick) run_ends(b);
    if (o->only && strcmp(o->only, "presets") == 0) run_presets(b);
    if (o->only ? strcmp(o->only, "error") == 0 : !o->quick && b->best) run_errors();
    if (o->only ? strcmp(o->only, "threads") == 0 : !o->quick) run_threads(b);
}

static void print_help(void)
{
    printf(
        "Usage: bench [options]: every shape with each instruction set present but scalar, in about five minutes.\n"
        "  --isa NAME       this instruction set alone: avx512, avx2, neon or scalar\n"
        "  --format NAME    this format, and F16 to compare it with; `default` is I8 keys and TQ4 values\n"
        "  --head-dim N     64, 80, 96, 128, 192, 256 or 512\n"
        "  --context N      512, 1024, 2048, 4096, 8192, 16384 or 32768 positions\n"
        "  --group N        2 or 8 query heads a KV head; 6 at head_dim 256, 64 at 512\n"
        "  --queries N      1, 8 or 128\n"
        "  --only WHAT      encode, decode, pages (and batches), latent, sparse (lists, index), scale (of channels), "
        "ends (exact ones), presets, error or threads (appends, batches)\n"
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
    static const char *const parts[] = {"encode", "decode", "pages",   "latent", "sparse",
                                        "scale",  "ends",   "presets", "error",  "threads"};
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
