/* The weights of the small model in data/tinylm.bin, and the operations of a transformer except attention. */
#ifndef TINYLM_MODEL_H
#define TINYLM_MODEL_H

#include "data_file.h"
#include "thread_pool.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

/* Two of the processor's vector registers. Arrays of sums would stay in memory, which takes twice as long. */
#ifdef __AVX__
typedef float lanes __attribute__((vector_size(32)));
#else
typedef float lanes __attribute__((vector_size(16)));
#endif
enum { PANEL = 2 * (int)(sizeof(lanes) / sizeof(float)), MAX_LAYERS = 8, VOCABULARY = 256 };

/* out = W in. W is stored as [n_out/PANEL][n_in][PANEL]. */
typedef struct linear {
    int n_in, n_out;
    float *panels;
} linear;

typedef struct model_layer {
    int head_dim, n_heads, n_kv_heads, window; /* window 0: all earlier positions */
    float softcap;                             /* 0: off */
    bool qk_norm;
    float *norm_attention, *norm_mlp; /* [d_model] */
    float *q_norm, *k_norm;           /* [head_dim], with qk_norm */
    linear q, k, v, o, gate, up, down;
    float *key_bias;                      /* [n_kv_heads][head_dim] or NULL: see tinylm_bias.h */
    float *key_center, *key_scale;        /* of the keys' channels, likewise: by which the caches store them */
    tqkv_format key_format, value_format; /* of a profile's plan, in place of a preset's; 0: none */
} model_layer;

typedef struct model {
    uint64_t tag; /* the XXH3 of its file */
    int n_layers, d_model, hidden;
    float rope_base, rms_epsilon;
    bool bias_before_rotary;
    model_layer layers[MAX_LAYERS];
    float *embedding; /* [VOCABULARY][d_model], also the output matrix */
    float *norm_out;  /* [d_model] */
    linear logits;
    thread_pool pool;
    int exact_first, exact_last; /* positions that the caches keep as halves, too */
    int batch;                   /* positions that go through together; 0: BATCH */
} model;

/* Reads one matrix with ten bits a weight. A row is a half, the scale; n_in bytes, the low 8 bits of the codes; n_in/4
 * bytes, the upper 2 bits. weight = scale * (code - 512). `rows`, if given, receives the plain matrix too. */
static linear load_linear(data_file *file, int n_in, int n_out, float *rows /* [n_out][n_in] */)
{
    linear matrix = {n_in, n_out, NULL};
    size_t inputs = (size_t)n_in, outputs = (size_t)n_out;
    if (outputs <= file->size / inputs) matrix.panels = (float *)malloc(inputs * outputs * sizeof(float));
    if (!matrix.panels) file->failed = true;
    for (size_t row = 0; row < outputs; row++) {
        const unsigned char *scale = data_file_take(file, 1, 2), *low = data_file_take(file, inputs, 1),
                            *high = data_file_take(file, inputs / 4, 1);
        const float step = high ? half_to_float(scale) : 0;
        for (size_t i = 0; high && i < inputs; i++) {
            int code = low[i] | (high[i / 4] >> i % 4 * 2 & 3) << 8;
            float value = step * (float)(code - 512);
            matrix.panels[(row / PANEL * inputs + i) * PANEL + row % PANEL] = value;
            if (rows) rows[row * inputs + i] = value;
        }
    }
    return matrix;
}

static void load_layer(data_file *file, const model *m, model_layer *layer)
{
    int q_size = layer->n_heads * layer->head_dim, kv_size = layer->n_kv_heads * layer->head_dim;
    layer->norm_attention = data_file_halves(file, 1, m->d_model);
    layer->q = load_linear(file, m->d_model, q_size, NULL);
    layer->k = load_linear(file, m->d_model, kv_size, NULL);
    layer->v = load_linear(file, m->d_model, kv_size, NULL);
    layer->o = load_linear(file, q_size, m->d_model, NULL);
    if (layer->qk_norm) {
        layer->q_norm = data_file_halves(file, 1, layer->head_dim);
        layer->k_norm = data_file_halves(file, 1, layer->head_dim);
    }
    layer->norm_mlp = data_file_halves(file, 1, m->d_model);
    layer->gate = load_linear(file, m->d_model, m->hidden, NULL);
    layer->up = load_linear(file, m->d_model, m->hidden, NULL);
    layer->down = load_linear(file, m->hidden, m->d_model, NULL);
}

static void load_shapes(data_file *file, model *m)
{
    data_file_magic(file, "TQKVTINY");
    m->n_layers = data_file_count(file, 1, MAX_LAYERS);
    m->d_model = data_file_count(file, PANEL, 4096);
    m->hidden = data_file_count(file, PANEL, 16384);
    m->rope_base = data_file_f32(file);
    m->rms_epsilon = data_file_f32(file);
    data_file_size(file);
    if (m->d_model % PANEL != 0 || m->hidden % PANEL != 0) file->failed = true;
    for (int i = 0; i < m->n_layers; i++) {
        model_layer *layer = &m->layers[i];
        layer->head_dim = data_file_count(file, 32, 1024);
        layer->n_heads = data_file_count(file, 1, 64);
        layer->n_kv_heads = data_file_count(file, 1, 64);
        layer->window = data_file_count(file, 0, 1 << 20);
        layer->softcap = data_file_f32(file);
        layer->qk_norm = data_file_count(file, 0, 1) != 0;
        if (layer->head_dim % PANEL != 0 || layer->n_heads % layer->n_kv_heads != 0) file->failed = true;
    }
}

static void model_free(model *m)
{
    for (int i = 0; i < m->n_layers; i++) {
        model_layer *layer = &m->layers[i];
        float *arrays[] = {layer->norm_attention, layer->norm_mlp,  layer->q_norm,      layer->k_norm,
                           layer->q.panels,       layer->k.panels,  layer->v.panels,    layer->o.panels,
                           layer->gate.panels,    layer->up.panels, layer->down.panels, layer->key_bias,
                           layer->key_center,     layer->key_scale};
        for (size_t a = 0; a < sizeof arrays / sizeof *arrays; a++) free(arrays[a]);
    }
    free(m->embedding);
    free(m->norm_out);
    free(m->logits.panels);
    pool_stop(&m->pool);
}

/* False if the file is missing, short or damaged. */
static bool model_load(model *m, const char *path, int n_threads)
{
    data_file file;
    memset(m, 0, sizeof *m);
    if (!data_file_open(&file, path)) return false;
    m->tag = XXH3_64bits(file.bytes, file.size);
    load_shapes(&file, m);
    pool_start(&m->pool, n_threads - 1);
    if (!file.failed && (m->embedding = (float *)malloc(sizeof(float) * VOCABULARY * (size_t)m->d_model))) {
        m->logits = load_linear(&file, m->d_model, VOCABULARY, m->embedding);
        for (int i = 0; i < m->n_layers && !file.failed; i++) load_layer(&file, m, &m->layers[i]);
        m->norm_out = data_file_halves(&file, 1, m->d_model);
    }
    bool good = !file.failed && m->norm_out && file.at == file.size;
    free(file.bytes);
    if (!good) model_free(m);
    return good;
}

static lanes load_lanes(const float *in)
{
    lanes value;
    memcpy(&value, in, sizeof value);
    return value;
}

static void store_panel(float *out, lanes low, lanes high)
{
    memcpy(out, &low, sizeof low);
    memcpy(out + PANEL / 2, &high, sizeof high);
}

/* Reads each weight once for four tokens. */
static void linear_4(const float *w, const float *in, int n_in, float *out, int n_out)
{
    lanes a0 = {0}, a1 = {0}, b0 = {0}, b1 = {0}, c0 = {0}, c1 = {0}, d0 = {0}, d1 = {0};
    const float *in1 = in + n_in, *in2 = in1 + n_in, *in3 = in2 + n_in;
    for (int i = 0; i < n_in; i++, w += PANEL) {
        const lanes low = load_lanes(w), high = load_lanes(w + PANEL / 2);
        a0 += low * in[i], a1 += high * in[i];
        b0 += low * in1[i], b1 += high * in1[i];
        c0 += low * in2[i], c1 += high * in2[i];
        d0 += low * in3[i], d1 += high * in3[i];
    }
    store_panel(out, a0, a1);
    store_panel(out + n_out, b0, b1);
    store_panel(out + 2 * n_out, c0, c1);
    store_panel(out + 3 * n_out, d0, d1);
}

static void linear_1(const float *w, const float *in, int n_in, float *out)
{
    lanes low = {0}, high = {0};
    for (int i = 0; i < n_in; i++, w += PANEL) {
        low += load_lanes(w) * in[i];
        high += load_lanes(w + PANEL / 2) * in[i];
    }
    store_panel(out, low, high);
}

typedef struct linear_job {
    const linear *matrix;
    const float *in;
    float *out;
    int n_tokens;
} linear_job;

static void linear_task(void *context, int panel)
{
    const linear_job *job = (const linear_job *)context;
    int n_in = job->matrix->n_in, n_out = job->matrix->n_out, token = 0;
    const float *w = job->matrix->panels + (size_t)panel * (size_t)n_in * PANEL;
    for (; token + 4 <= job->n_tokens; token += 4)
        linear_4(w, job->in + token * n_in, n_in, job->out + token * n_out + panel * PANEL, n_out);
    for (; token < job->n_tokens; token++)
        linear_1(w, job->in + token * n_in, n_in, job->out + token * n_out + panel * PANEL);
}

/* out[n_tokens][n_out] = in[n_tokens][n_in] W^T. Few tokens run on the calling thread: waking others costs more. */
static void linear_apply(model *m, const linear *matrix, const float *in, int n_tokens, float *out)
{
    linear_job job = {matrix, in, out, n_tokens};
    int n_panels = matrix->n_out / PANEL;
    if (n_tokens >= 8)
        pool_run(&m->pool, n_panels, linear_task, &job);
    else
        for (int panel = 0; panel < n_panels; panel++) linear_task(&job, panel);
}

/* out[row] = in[row] / rms(in[row]) * gain, for rows of `size`. out may be in. */
static void rms_norm(const model *m, const float *in, const float *gain, int n_rows, int size, float *out)
{
    for (int row = 0; row < n_rows; row++, in += size, out += size) {
        float sum = 0;
        for (int i = 0; i < size; i++) sum += in[i] * in[i];
        float scale = 1.0f / sqrtf(sum / (float)size + m->rms_epsilon);
        for (int i = 0; i < size; i++) out[i] = in[i] * scale * gain[i];
    }
}

/* Rotary embedding: rotates element i of each half of a head by the angle position * base^(-2i/D). */
static void rope(const model *m, float *heads /* [n_tokens][n_heads][head_dim] */, int n_tokens, int n_heads,
                 int head_dim, int64_t position)
{
    int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        float frequency = powf(m->rope_base, -2.0f * (float)i / (float)head_dim);
        for (int token = 0; token < n_tokens; token++) {
            float angle = (float)(position + token) * frequency, c = cosf(angle), s = sinf(angle);
            float *head = heads + token * n_heads * head_dim + i;
            for (int h = 0; h < n_heads; h++, head += head_dim) {
                float first = head[0], second = head[half];
                head[0] = first * c - second * s;
                head[half] = second * c + first * s;
            }
        }
    }
}

/* Adds `bias` to each token's row; NULL adds nothing. */
static void add_to_rows(float *rows, const float *bias, int n_tokens, int size)
{
    for (int i = 0; bias && i < n_tokens * size; i++) rows[i] += bias[i % size];
}

/* gate = silu(gate) * up */
static void silu_multiply(float *gate, const float *up, int count)
{
    for (int i = 0; i < count; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

#endif
