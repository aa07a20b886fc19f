/* encode, probe, decode, rotate, calibrate: the same bytes as C writes, through the Metal API. */
#include "host.h"
#include "tests/data.h"
#include "tests/reference.h"
#include <math.h>

enum { HEADS = 3 };

static const tqkv_metal_buffer none = {nil, 0};

static bool same_bytes(const tqkv_store *a, const tqkv_store *b)
{
    return !memcmp(a->codes, b->codes, a->codes_size) && (!a->norms_size || !memcmp(a->norms, b->norms, a->norms_size));
}

static size_t size_of(tqkv_type type) { return type == TQKV_TYPE_F32 ? sizeof(float) : sizeof(uint16_t); }

/* The floats in the case's type, in their place. */
static void to_type(tqkv_type type, float *floats, size_t n)
{
    uint16_t *halves = (uint16_t *)floats;
    for (size_t i = 0; type != TQKV_TYPE_F32 && i < n; i++) halves[i] = reference_narrow(type, floats[i]);
}

/* Keys or values: the store that C fills and that of the GPU, and rows. */
typedef struct codec_stream {
    tqkv_store expected, got;
    tqkv_metal_store gpu;
    float *rows, *center, *scale;
    tqkv_metal_buffer src;
} codec_stream;

static codec_stream open_stream(tqkv_format format, int head_dim, int n, bool ring, data_random *random)
{
    const tqkv_type types[] = {TQKV_TYPE_F32, TQKV_TYPE_F32, TQKV_TYPE_F16, TQKV_TYPE_BF16};
    const size_t count = (size_t)(n * HEADS * head_dim);
    codec_stream s = {.rows = host_floats(5, count), .center = host_floats(8, (size_t)(HEADS * head_dim))};
    const int capacity = ring ? 1 + data_below(random, 9) : n + 3 + data_below(random, 5);
    s.expected = test_store(format, head_dim, HEADS, capacity, ring);
    s.expected.rotation =
        reference_can_be_unrotated(format) && data_below(random, 3) == 0 ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
    s.expected.block_scale = head_dim >= 512 && data_below(random, 2) ? 1.25f : 0.0f;
    s.expected.type = types[data_below(random, 4)];
    if (data_below(random, 2)) s.expected.center = s.center;
    if (data_below(random, 3) == 0) s.expected.channel_scale = s.scale = test_scales(9, HEADS, head_dim, 6.0);
    to_type(s.expected.type, s.rows, count);
    s.got = test_store(format, head_dim, HEADS, capacity, ring);
    tqkv_store shape = s.expected;
    shape.codes = s.got.codes;
    shape.norms = s.got.norms;
    s.gpu = host_store(&shape);
    s.src = host_buffer(s.rows, count * size_of(s.expected.type));
    return s;
}

static void close_stream(codec_stream *s)
{
    host_store_release(&s->gpu);
    host_release(s->src);
    test_store_free(&s->expected);
    test_store_free(&s->got);
    free(s->rows);
    free(s->center);
    free(s->scale);
}

static void check_decode(const codec_stream *s, int64_t first, int n)
{
    const tqkv_type type = s->expected.type;
    const size_t count = (size_t)(n * HEADS * s->expected.head_dim), size = count * size_of(type);
    float *values = test_alloc(count * sizeof *values);
    for (int basis = TQKV_ORIGINAL; basis <= TQKV_ROTATED; basis++) {
        tqkv_metal_buffer dst = host_buffer(values, size);
        host_work work = host_begin(false);
        CHECK_RESULT(HOST(test_host.metal, work.encoder, decode, &s->gpu, first, n, (tqkv_basis)basis, dst), TQKV_OK);
        host_end(&work);
        CHECK_RESULT(tqkv_decode(&s->expected, first, n, (tqkv_basis)basis, values), TQKV_OK);
        const float *got = host_contents(dst);
        int wrong = type != TQKV_TYPE_F32 && memcmp(got, values, size);
        for (size_t i = 0; type == TQKV_TYPE_F32 && i < count; i++) wrong += !(got[i] == values[i]);
        CHECK(wrong == 0, "basis %d: %d values decoded otherwise", basis, wrong);
        host_release(dst);
    }
    free(values);
}

/* A probe without the store's memory. */
static void check_probe(const codec_stream *s, int n)
{
    const size_t count = (size_t)(n * HEADS * s->expected.head_dim);
    float *expected = test_alloc(count * sizeof *expected);
    tqkv_metal_buffer scaled = host_zeros(count * sizeof *expected);
    tqkv_metal_store store = s->gpu;
    store.codes = store.norms = none;
    host_work work = host_begin(false);
    CHECK_RESULT(HOST(test_host.metal, work.encoder, probe, &store, s->src, n, scaled, none), TQKV_OK);
    host_end(&work);
    CHECK_RESULT(tqkv_probe(&s->expected, s->rows, n, expected), TQKV_OK);
    CHECK(!memcmp(expected, host_contents(scaled), count * sizeof *expected), "probed values differ");
    host_release(scaled);
    free(expected);
}

/* Keys, of odd seeds with values in one dispatch: rows at random, of which one may hold what is not finite: it is
   stored as zeros and raises the flag. */
static void run_rows(const void *parameters)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    const int seed = *(const int *)parameters, d = TQKV__KERNEL_DIM(seed % TQKV__KERNEL_DIMS);
    data_random random = {(uint64_t)seed};
    const int n = 1 + data_below(&random, d > 256 ? 4 : 19), row = HEADS * n - 1;
    const bool ring = data_below(&random, 2), pair = seed % 2;
    const int64_t position = ring ? data_below(&random, 2) ? 1000000000005 : 4 : data_below(&random, 3);
    codec_stream k = open_stream(test_formats[seed % TEST_FORMATS], d, n, ring, &random),
                 v = open_stream(test_formats[seed / TEST_FORMATS % TEST_FORMATS], d == 192 ? 128 : d, n, ring,
                                 &random);
    const bool spoiled = k.expected.type == TQKV_TYPE_F32 && !k.expected.center && data_below(&random, 2);
    tqkv_metal_buffer flag = host_zeros(4);
    if (spoiled) {
        memset(k.rows + row * d, 0, (size_t)d * sizeof(float));
        memset((float *)host_contents(k.src) + row * d, 0, (size_t)d * sizeof(float));
        ((float *)host_contents(k.src))[row * d + 3] = bad[data_below(&random, 3)];
    }
    CHECK_RESULT(tqkv_encode(&k.expected, k.rows, n, position), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&v.expected, v.rows, n, position), TQKV_OK);
    CHECK_RESULT(HOST_PREPARE(test_host.metal, encode, &k.gpu, pair ? &v.gpu : NULL, none, none, n, position, none),
                 TQKV_OK);
    host_work work = host_begin(true);
    host_count_calls();
    CHECK_RESULT(HOST(test_host.metal, work.encoder, encode, &k.gpu, pair ? &v.gpu : NULL, k.src, pair ? v.src : none,
                      n, position, flag),
                 TQKV_OK);
    host_check_no_calls();
    host_end(&work);
    host_store_read(&k.gpu, &k.got);
    host_store_read(&v.gpu, &v.got);
    CHECK(same_bytes(&k.expected, &k.got), "keys differ");
    CHECK(!pair || same_bytes(&v.expected, &v.got), "values differ");
    CHECK(*(uint32_t *)host_contents(flag) == spoiled, "the flag is %u", *(uint32_t *)host_contents(flag));
    const int kept = n < k.expected.capacity ? n : k.expected.capacity;
    check_decode(&k, position + n - kept, kept);
    if (!spoiled) check_probe(&k, n);
    host_release(flag);
    close_stream(&k);
    close_stream(&v);
}

static void run_rotate(const void *parameters)
{
    const int head_dim = *(const int *)parameters, n_rows = 7;
    const size_t count = (size_t)(n_rows * head_dim);
    float *expected = host_floats(10, count);
    tqkv_metal_buffer rows = host_buffer(expected, count * sizeof(float));
    host_work work = host_begin(false);
    CHECK_RESULT(HOST(test_host.metal, work.encoder, rotate, rows, n_rows, head_dim, TQKV_ROTATED), TQKV_OK);
    host_end(&work);
    CHECK_RESULT(tqkv_rotate(expected, n_rows, head_dim, TQKV_ROTATED), TQKV_OK);
    CHECK(!memcmp(expected, host_contents(rows), count * sizeof(float)), "rotated rows differ");
    work = host_begin(false);
    CHECK_RESULT(HOST(test_host.metal, work.encoder, rotate, rows, n_rows, head_dim, TQKV_ORIGINAL), TQKV_OK);
    host_end(&work);
    CHECK_RESULT(tqkv_rotate(expected, n_rows, head_dim, TQKV_ORIGINAL), TQKV_OK);
    CHECK(!memcmp(expected, host_contents(rows), count * sizeof(float)), "un-rotated rows differ");
    host_release(rows);
    free(expected);
}

static tqkv_result encode_call(const tqkv_metal_store *s, tqkv_metal_buffer src, int n_tokens, int64_t position)
{
    host_work work = host_begin(false);
    const tqkv_result r =
        HOST(test_host.metal, work.encoder, encode, s, NULL, src, host_none, n_tokens, position, none);
    host_end(&work);
    return r;
}

/* Wrong sources and positions. */
static void refuse_sources(const tqkv_metal_store *gpu, tqkv_metal_buffer src)
{
    tqkv_metal *m = test_host.metal;
    tqkv_metal_buffer far = src, odd = src;
    far.offset += 4;
    odd.offset -= 2;
    CHECK_REFUSED(m, encode_call(gpu, far, 4, 0), TQKV_INVALID_ARGUMENT, "src: needs");
    CHECK_REFUSED(m, encode_call(gpu, odd, 4, 0), TQKV_INVALID_ARGUMENT, "src: offset");
    far.offset = SIZE_MAX - 3;
    CHECK_REFUSED(m, encode_call(gpu, far, 4, 0), TQKV_INVALID_ARGUMENT, "src: needs");
    CHECK_REFUSED(m, encode_call(gpu, none, 4, 0), TQKV_INVALID_ARGUMENT, "src: no buffer");
    CHECK_REFUSED(m, encode_call(gpu, gpu->codes, 1, 0), TQKV_INVALID_ARGUMENT, "src and codes overlap");
    CHECK_REFUSED(m, encode_call(gpu, src, -1, 0), TQKV_INVALID_ARGUMENT, "encode");
    CHECK_REFUSED(m, encode_call(gpu, src, 4, 5), TQKV_OUT_OF_RANGE, "encode");
    CHECK_REFUSED(m, encode_call(gpu, src, 4, -1), TQKV_OUT_OF_RANGE, "encode");
    CHECK_REFUSED(m, encode_call(gpu, src, 4, INT64_MAX), TQKV_OUT_OF_RANGE, "encode");
}

/* Wrong stores. */
static void refuse_stores(const tqkv_metal_store *gpu, tqkv_metal_buffer src)
{
    tqkv_metal *m = test_host.metal;
    tqkv_metal_store s;
    CHECK_REFUSED(m, encode_call(NULL, src, 4, 0), TQKV_INVALID_ARGUMENT, "encode");
    s = *gpu, s.codes.offset += 16;
    CHECK_REFUSED(m, encode_call(&s, src, 4, 0), TQKV_INVALID_ARGUMENT, "codes: needs");
    s = *gpu, s.codes.offset -= 4;
    CHECK_REFUSED(m, encode_call(&s, src, 4, 0), TQKV_INVALID_ARGUMENT, "codes: offset");
    s = *gpu, s.norms = none;
    CHECK_REFUSED(m, encode_call(&s, src, 4, 0), TQKV_INVALID_ARGUMENT, "norms: no buffer");
    s = *gpu, s.norms = gpu->codes;
    CHECK_REFUSED(m, encode_call(&s, src, 4, 0), TQKV_INVALID_ARGUMENT, "codes and norms overlap");
    s = *gpu, s.shape.head_dim = 112;
    CHECK_REFUSED(m, encode_call(&s, src, 4, 0), TQKV_UNSUPPORTED, "encode");
    s = *gpu, s.shape.format = TQKV_FORMAT_DEFAULT;
    CHECK_REFUSED(m, encode_call(&s, src, 4, 0), TQKV_UNSUPPORTED, "encode");
}

/* Every refusal has a text and leaves the store unchanged. */
static void run_refusals(const void *parameters)
{
    (void)parameters;
    tqkv_store before = test_store(TQKV_I8, 64, HEADS, 8, false), after = test_store(TQKV_I8, 64, HEADS, 8, false);
    tqkv_metal_store gpu = host_store(&before);
    tqkv_metal *m = test_host.metal;
    float *source = host_floats(12, (4 * HEADS * 64));
    tqkv_metal_buffer src = host_buffer(source, (4 * HEADS * 64) * sizeof(float));
    refuse_sources(&gpu, src);
    refuse_stores(&gpu, src);
    CHECK_RESULT(HOST(NULL, nil, encode, &gpu, NULL, src, host_none, 4, 0, none), TQKV_INVALID_ARGUMENT);
    CHECK_REFUSED(m, HOST(m, nil, encode, &gpu, NULL, src, host_none, 4, 0, none), TQKV_INVALID_ARGUMENT, "no encoder");
    CHECK_RESULT(encode_call(&gpu, src, 0, 8), TQKV_OK);
    host_store_read(&gpu, &after);
    CHECK(same_bytes(&before, &after), "a refused call has written");
    host_release(src);
    host_store_release(&gpu);
    test_store_free(&before);
    test_store_free(&after);
    free(source);
}

typedef struct calibrate_case {
    tqkv_type type;
    int head_dim, n_tokens, group, n_queries;
    tqkv_pairs pairs;
} calibrate_case;

/* What lacks a buffer or overlaps is refused. */
static void refuse_calibrate(const calibrate_case *c, tqkv_metal_object encoder, const tqkv_metal_store *shape,
                             tqkv_metal_buffer src, tqkv_metal_buffer q, tqkv_metal_buffer center,
                             tqkv_metal_buffer scale)
{
    tqkv_metal *m = test_host.metal;
    const int heads = HEADS * c->group, n = c->n_tokens, n_queries = c->n_queries;
    tqkv_metal_buffer far = center;
    far.offset += 4;
    CHECK_REFUSED(m, HOST(m, encoder, calibrate, shape, src, n, q, heads, n_queries, c->pairs, far, scale),
                  TQKV_INVALID_ARGUMENT, "center: needs");
    CHECK_REFUSED(m, HOST(m, encoder, calibrate, shape, src, n, q, heads, n_queries, c->pairs, center, center),
                  TQKV_INVALID_ARGUMENT, "overlap");
    CHECK_REFUSED(m, HOST(m, encoder, calibrate, shape, none, n, q, heads, n_queries, c->pairs, center, scale),
                  TQKV_INVALID_ARGUMENT, "src: no buffer");
    CHECK_REFUSED(m, HOST(m, encoder, calibrate, NULL, src, 1, q, heads, 0, c->pairs, center, scale),
                  TQKV_INVALID_ARGUMENT, "calibrate");
    CHECK_REFUSED(m, HOST(m, encoder, calibrate, shape, src, 1, src, 0, 1, c->pairs, center, scale),
                  TQKV_INVALID_ARGUMENT, "calibrate");
    CHECK_RESULT(HOST(NULL, nil, calibrate, shape, src, 1, none, 0, 0, c->pairs, center, scale), TQKV_INVALID_ARGUMENT);
}

/* The processor's bits, with queries and without; refused calls change nothing. */
static void run_calibrate(const void *parameters)
{
    const calibrate_case *c = parameters;
    const size_t each = (size_t)(HEADS * c->head_dim), n_rows = (size_t)c->n_tokens * each,
                 n_queries = (size_t)(c->n_queries * c->group) * each, size = each * sizeof(float);
    tqkv_store store = test_store(TQKV_TQ4, c->head_dim, HEADS, 1, false);
    store.type = c->type;
    float *rows = host_floats(21, n_rows), *queries = host_floats(22, n_queries + 1), *expected = test_alloc(2 * size);
    to_type(c->type, rows, n_rows);
    to_type(c->type, queries, n_queries);
    const int heads = HEADS * c->group;
    CHECK_RESULT(tqkv_calibrate(&store, rows, c->n_tokens, c->n_queries ? queries : NULL, heads, c->n_queries, c->pairs,
                                expected, expected + each),
                 TQKV_OK);
    tqkv_metal *m = test_host.metal;
    const tqkv_metal_store shape = {.shape = store};
    tqkv_metal_buffer src = host_buffer(rows, n_rows * size_of(c->type)),
                      q = c->n_queries ? host_buffer(queries, n_queries * size_of(c->type)) : none,
                      center = host_zeros(size), scale = host_zeros(size);
    host_work w = host_begin(true);
    CHECK_RESULT(
        HOST(m, w.encoder, calibrate, &shape, src, c->n_tokens, q, heads, c->n_queries, c->pairs, center, scale),
        TQKV_OK);
    refuse_calibrate(c, w.encoder, &shape, src, q, center, scale);
    host_end(&w);
    CHECK(!memcmp(host_contents(center), expected, size), "another centre");
    CHECK(!memcmp(host_contents(scale), expected + each, size), "another scale");
    host_release(src);
    if (q.buffer) host_release(q);
    host_release(center);
    host_release(scale);
    test_store_free(&store);
    free(rows);
    free(queries);
    free(expected);
}

/* 8 tokens of halves fit into b, from its beginning on. */
static void refuse_halves(const tqkv_metal_store *gpu, tqkv_metal_object encoder, tqkv_metal_buffer b)
{
    tqkv_metal *m = test_host.metal;
    tqkv_metal_store s = *gpu;
    s.shape.type = TQKV_TYPE_F16;
    b.offset += 2;
    CHECK_REFUSED(m, HOST(m, encoder, encode, &s, NULL, b, host_none, 8, 0, none), TQKV_INVALID_ARGUMENT, "src: needs");
    b.offset += 1;
    CHECK_REFUSED(m, HOST(m, encoder, encode, &s, NULL, b, host_none, 4, 0, none), TQKV_INVALID_ARGUMENT,
                  "is not a multiple of 2");
}

/* The buffers of the other calls: too small, missing or overlapping. */
static void run_other_refusals(const void *parameters)
{
    (void)parameters;
    tqkv_store store = test_store(TQKV_TQ4, 64, HEADS, 8, false),
               narrow_store = test_store(TQKV_TQ4, 32, HEADS, 8, false);
    tqkv_metal_store gpu = host_store(&store), narrow = host_store(&narrow_store);
    tqkv_metal *m = test_host.metal;
    const size_t size = (4 * HEADS * 64) * sizeof(float);
    tqkv_metal_buffer a = host_zeros(size), b = host_zeros(size), far = b;
    far.offset += 4;
    host_work w = host_begin(false);
    CHECK_REFUSED(m, HOST(m, w.encoder, decode, &gpu, 0, 4, TQKV_ORIGINAL, far), TQKV_INVALID_ARGUMENT, "dst: needs");
    CHECK_REFUSED(m, HOST(m, w.encoder, decode, &gpu, 6, 4, TQKV_ORIGINAL, b), TQKV_OUT_OF_RANGE, "decode");
    CHECK_REFUSED(m, HOST(m, w.encoder, decode, &gpu, 0, 1, TQKV_ORIGINAL, gpu.codes), TQKV_INVALID_ARGUMENT,
                  "overlap");
    CHECK_REFUSED(m, HOST(m, w.encoder, decode, &gpu, 0, 4, test_no_basis(2), b), TQKV_INVALID_ARGUMENT, "decode");
    CHECK_REFUSED(m, HOST(m, w.encoder, probe, &gpu, a, 4, far, none), TQKV_INVALID_ARGUMENT, "scaled: needs");
    CHECK_REFUSED(m, HOST(m, w.encoder, probe, &gpu, a, 4, a, none), TQKV_INVALID_ARGUMENT, "overlap");
    CHECK_REFUSED(m, HOST(m, w.encoder, probe, NULL, a, 4, b, none), TQKV_INVALID_ARGUMENT, "probe");
    CHECK_REFUSED(m, HOST(m, w.encoder, rotate, far, 12, 64, TQKV_ROTATED), TQKV_INVALID_ARGUMENT, "rows: needs");
    CHECK_REFUSED(m, HOST(m, w.encoder, rotate, a, 1, 112, TQKV_ROTATED), TQKV_UNSUPPORTED,
                  "a GPU takes head_dim 32, 48, 64, 80, 96, 128, 192, 256, 448, 512, 1024, and keys of 192 with values "
                  "of 128, of 448 or "
                  "512 with a tail of 64");
    CHECK_REFUSED(m, HOST(m, w.encoder, rotate, a, -1, 64, TQKV_ORIGINAL), TQKV_INVALID_ARGUMENT, "rotate");
    CHECK_REFUSED(m, HOST(m, w.encoder, encode, &gpu, &narrow, a, b, 2, 0, none), TQKV_UNSUPPORTED, "encode: ");
    refuse_halves(&gpu, w.encoder, b);
    CHECK_REFUSED(m, HOST(m, w.encoder, encode, &gpu, &gpu, a, b, 2, 0, none), TQKV_INVALID_ARGUMENT, "overlap");
    CHECK_REFUSED(m, HOST(m, w.encoder, encode, NULL, &gpu, a, b, 2, 0, none), TQKV_INVALID_ARGUMENT, "encode: ");
    CHECK_RESULT(HOST(NULL, w.encoder, rotate, a, 1, 64, TQKV_ROTATED), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(HOST(m, w.encoder, rotate, a, 0, 64, TQKV_ROTATED), TQKV_OK);
    host_end(&w);
    host_release(a);
    host_release(b);
    host_store_release(&gpu);
    host_store_release(&narrow);
    test_store_free(&store);
    test_store_free(&narrow_store);
}

void codec_host_cases(void)
{
    for (int seed = 0; seed < 110; seed++) test_add(run_rows, &seed, sizeof seed, "encode/%d", seed);
    for (int d = 0; d < TQKV__KERNEL_DIMS; d++) {
        const int head_dim = TQKV__KERNEL_DIM(d);
        test_add(run_rotate, &head_dim, sizeof head_dim, "rotate/d%d", head_dim);
    }
    const calibrate_case learns[] = {{TQKV_TYPE_F32, 64, 40, 1, 0, TQKV_PAIRS_NONE},
                                     {TQKV_TYPE_F16, 128, 17, 2, 5, TQKV_PAIRS_HALVES},
                                     {TQKV_TYPE_BF16, 1024, 3, 1, 1, TQKV_PAIRS_NEIGHBOURS}};
    for (int i = 0; i < 3; i++) test_add(run_calibrate, &learns[i], sizeof learns[i], "calibrate/%d", i);
    test_add(run_refusals, NULL, 0, "refusals/encode");
    test_add(run_other_refusals, NULL, 0, "refusals/others");
}
