/* What formats lose: of Gaussian rows, and of keys and values of pretrained models. Not a speed: once,
 * for the best set. */
#include "bench.h"

#include "../examples/data_file.h"

enum { ERROR_TOKENS = 2048, MOST_HEADS = 8 };
#define CAPTURE "examples/data/pretrained_kv.bin"

static const tqkv_format formats[] = {TQKV_TQ2, TQKV_TQ3, TQKV_TQ4, TQKV_TQ5, TQKV_TQ6, TQKV_TQ8, TQKV_I8};

/* The mean over heads of |x - x'|^2 / |x - mean|^2, x' decoded. rows: [n_tokens][n_kv_heads][head_dim]; with centre and
   scale of these rows, if `learned` */
static double error_of(tqkv_format format, int head_dim, int n_kv_heads, const float *rows, int n_tokens, bool learned)
{
    tqkv_store shape = {.format = format, .head_dim = head_dim, .n_kv_heads = n_kv_heads, .capacity = n_tokens};
    float center[MOST_HEADS * TQKV_MAX_HEAD_DIM], scale[MOST_HEADS * TQKV_MAX_HEAD_DIM];
    tqkv_quality heads[MOST_HEADS];
    double sum = 0.0;
    if (learned) {
        bench_check(tqkv_calibrate(&shape, rows, n_tokens, NULL, 0, 0, TQKV_PAIRS_NONE, center, scale));
        shape.center = center;
        shape.channel_scale = scale;
    }
    bench_check(tqkv_measure(&shape, rows, n_tokens, heads));
    for (int h = 0; h < n_kv_heads; h++) sum += heads[h].error;
    return sum / n_kv_heads;
}

static void print_errors(const char *name, int head_dim, int n_kv_heads, const float *rows, int n_tokens, bool learned)
{
    printf("  %-28s %8d", name, head_dim);
    for (int i = 0; i < COUNT(formats); i++)
        printf(" %9.3g", error_of(formats[i], head_dim, n_kv_heads, rows, n_tokens, learned));
    printf("\n");
}

/* The same of what attention reads: each position alone has the weight 1, so the output is its value. */
static double error_in_attention(tqkv_format format, int head_dim, const float *rows, int n_tokens)
{
    tqkv_store s = {.format = format, .head_dim = head_dim, .n_kv_heads = 1, .capacity = 1};
    tqkv_attention a = {.keys = &s, .values = &s, .n_heads = 1, .n_queries = 1, .end = 1};
    float q[TQKV_MAX_HEAD_DIM] = {0}, out[TQKV_MAX_HEAD_DIM];
    double error = 0.0, size = 0.0;
    s.codes_size = tqkv_codes_size(&s);
    s.norms_size = tqkv_norms_size(&s);
    s.codes = bench_alloc(s.codes_size);
    s.norms = (float *)bench_alloc(s.norms_size);
    for (int t = 0; t < n_tokens; t++, rows += head_dim) {
        bench_check(tqkv_encode(&s, rows, 1, 0));
        bench_check(tqkv_attend(&a, q, out));
        for (int d = 0; d < head_dim; d++) {
            error += ((double)out[d] - (double)rows[d]) * ((double)out[d] - (double)rows[d]);
            size += (double)rows[d] * (double)rows[d];
        }
    }
    free(s.codes);
    free(s.norms);
    return error / size;
}

/* The layers of a capture; examples/data/README.md has the format. */
static void print_capture(data_file *file)
{
    struct {
        int head_dim, n_heads, n_kv_heads;
    } layers[8];
    data_file_magic(file, "TQKVREAL");
    const int n_layers = data_file_count(file, 1, COUNT(layers)), n_positions = data_file_count(file, 1, 1 << 20);
    const int n_queries = data_file_count(file, 1, 1 << 20);
    data_file_size(file);
    for (int i = 0; i < n_layers; i++) {
        layers[i].head_dim = data_file_count(file, 32, TQKV_MAX_HEAD_DIM);
        layers[i].n_heads = data_file_count(file, 1, 256);
        layers[i].n_kv_heads = data_file_count(file, 1, MOST_HEADS);
        data_file_count(file, 0, 1 << 20); /* the window */
        data_file_f32(file);               /* the softcap */
    }
    for (int i = 0; i < n_layers && !file->failed; i++) {
        const int d = layers[i].head_dim, n_heads = layers[i].n_kv_heads;
        float *keys = data_file_halves(file, n_positions, n_heads * d);
        float *values = data_file_halves(file, n_positions, n_heads * d);
        char name[64];
        free(data_file_halves(file, n_queries, layers[i].n_heads * d));
        for (int kind = 0; kind < 3 && !file->failed; kind++) {
            static const char *const kinds[] = {"keys", "keys, calibrated", "values"};
            snprintf(name, sizeof name, "capture %d, %s", i, kinds[kind]);
            print_errors(name, d, n_heads, kind < 2 ? keys : values, n_positions, kind == 1);
        }
        free(keys);
        free(values);
    }
    if (file->failed) printf("%s is damaged\n", CAPTURE);
    free(file->bytes);
}

void run_errors(void)
{
    data_file file;
    float *rows = (float *)bench_alloc((size_t)ERROR_TOKENS * 256 * sizeof *rows);
    printf("\nerror: |x - x'|^2 / |x - mean|^2\n  %-28s %8s", "rows", "head_dim");
    for (int i = 0; i < COUNT(formats); i++) printf(" %9s", tqkv_format_name(formats[i]));
    printf("\n");
    for (int head_dim = 64; head_dim <= 256; head_dim *= 2) {
        bench_fill(rows, (size_t)(ERROR_TOKENS * head_dim), (uint64_t)head_dim);
        print_errors("gaussian", head_dim, 1, rows, ERROR_TOKENS, false);
        printf("  %-28s %8d", "gaussian, in attention", head_dim);
        for (int i = 0; i < COUNT(formats); i++)
            printf(" %9.3g", error_in_attention(formats[i], head_dim, rows, ERROR_TOKENS));
        printf("\n");
    }
    free(rows);
    if (data_file_open(&file, CAPTURE)) print_capture(&file); /* in the project's folder */
}
