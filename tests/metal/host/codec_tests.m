/* encode, encode_kv, probe, decode, rotate: the same bytes as C writes, through the Metal API. */
#include "host.h"
#include "tests/data.h"
#include "tests/reference.h"
#include <math.h>

enum { HEADS = 3 };

static const tqkv_metal_buffer none = {nil, 0};

typedef struct codec_case {
    tqkv_format format;
    int head_dim, capacity;
    bool ring, unrotated;
    int n_tokens;
    int64_t position;
    float block_scale;
    tqkv_format value_format; /* encode_kv */
    tqkv_type type;
} codec_case;

static bool same_bytes(const tqkv_store *a, const tqkv_store *b)
{
    return !memcmp(a->codes, b->codes, a->codes_size) && (!a->norms_size || !memcmp(a->norms, b->norms, a->norms_size));
}

static tqkv_store make_store(const codec_case *c)
{
    tqkv_store s = test_store(c->format, c->head_dim, HEADS, c->capacity, c->ring);
    s.rotation = c->unrotated ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
    s.block_scale = c->block_scale;
    s.type = c->type;
    return s;
}

static size_t size_of(tqkv_type type) { return type == TQKV_TYPE_F32 ? sizeof(float) : sizeof(uint16_t); }

/* The floats in the case's type, in their place. */
static void to_type(tqkv_type type, float *floats, size_t n)
{
    uint16_t *halves = (uint16_t *)floats;
    for (size_t i = 0; type != TQKV_TYPE_F32 && i < n; i++) halves[i] = reference_narrow(type, floats[i]);
}

static size_t source_count(const codec_case *c) { return (size_t)c->n_tokens * HEADS * (size_t)c->head_dim; }

static void check_decode(const codec_case *c, const tqkv_store *expected, const tqkv_metal_store *gpu)
{
    const int n = c->n_tokens < c->capacity ? c->n_tokens : c->capacity;
    const size_t size = (size_t)n * HEADS * (size_t)c->head_dim * size_of(c->type);
    float *values = test_alloc(size + 1);
    for (int basis = TQKV_ORIGINAL; basis <= TQKV_ROTATED; basis++) {
        const int64_t first = c->position + c->n_tokens - n;
        tqkv_metal_buffer dst = host_buffer(values, size);
        host_work work = host_begin(false);
        CHECK_RESULT(HOST(test_host.metal, work.encoder, decode, gpu, first, n, (tqkv_basis)basis, dst), TQKV_OK);
        host_end(&work);
        CHECK_RESULT(tqkv_decode(expected, first, n, (tqkv_basis)basis, values), TQKV_OK);
        const float *got = host_contents(dst);
        int wrong = c->type != TQKV_TYPE_F32 && memcmp(got, values, size);
        for (size_t i = 0; c->type == TQKV_TYPE_F32 && i < size / sizeof(float); i++) wrong += !(got[i] == values[i]);
        CHECK(wrong == 0, "basis %d: %d values decoded otherwise", basis, wrong);
        host_release(dst);
    }
    free(values);
}

static void run_codec(const void *parameters)
{
    const codec_case *c = parameters;
    tqkv_store expected = make_store(c), got = make_store(c);
    float *source = host_floats(5, source_count(c));
    to_type(c->type, source, source_count(c));
    tqkv_metal_store gpu = host_store(&got);
    tqkv_metal_buffer src = host_buffer(source, source_count(c) * size_of(c->type)), flag = host_zeros(4);
    CHECK_RESULT(tqkv_encode(&expected, source, c->n_tokens, c->position), TQKV_OK);
    host_work work = host_begin(false);
    CHECK_RESULT(
        HOST(test_host.metal, work.encoder, encode, &gpu, NULL, src, host_none, c->n_tokens, c->position, flag),
        TQKV_OK);
    host_end(&work);
    host_store_read(&gpu, &got);
    CHECK(same_bytes(&expected, &got), "codes or norms differ");
    CHECK(*(uint32_t *)host_contents(flag) == 0, "the flag is raised");
    check_decode(c, &expected, &gpu);
    host_release(src);
    host_release(flag);
    host_store_release(&gpu);
    test_store_free(&expected);
    test_store_free(&got);
    free(source);
}

/* A probe without the store's memory, and with a centre. */
static void run_probe(const void *parameters)
{
    const codec_case *c = parameters;
    tqkv_store shape = make_store(c);
    float *source = host_floats(6, source_count(c)), *expected = host_floats(7, source_count(c)),
          *center = host_floats(8, (size_t)(HEADS * c->head_dim));
    const size_t size = source_count(c) * sizeof(float);
    to_type(c->type, source, source_count(c));
    tqkv_metal_buffer src = host_buffer(source, source_count(c) * size_of(c->type)), scaled = host_zeros(size);
    tqkv_metal_store store = {.shape = shape,
                              .center = host_buffer(center, (size_t)(HEADS * c->head_dim) * sizeof(float))};
    shape.center = center;
    host_work work = host_begin(false);
    CHECK_RESULT(HOST(test_host.metal, work.encoder, probe, &store, src, c->n_tokens, scaled, none), TQKV_OK);
    host_end(&work);
    CHECK_RESULT(tqkv_probe(&shape, source, c->n_tokens, expected), TQKV_OK);
    CHECK(!memcmp(expected, host_contents(scaled), size), "probed values differ");
    host_release(src);
    host_release(scaled);
    host_release(store.center);
    test_store_free(&shape);
    free(source);
    free(expected);
    free(center);
}

/* Attention by the Metal API agrees with double precision. */
static void check_attend(tqkv_store *const expected[2], const tqkv_metal_store *keys, const tqkv_metal_store *values,
                         int64_t end, int n)
{
    enum { GROUP = 2, QUERIES = 2 };
    const int d = expected[0]->head_dim;
    const size_t count = (size_t)(QUERIES * GROUP * HEADS * d), size = count * sizeof(float);
    tqkv_attention c = {.keys = expected[0], .values = expected[1], .n_heads = GROUP * HEADS, .n_queries = QUERIES};
    c.end = end;
    c.kv_len = n;
    tqkv_metal_attention a = {.attention = c, .keys = keys, .values = values};
    float *q = host_floats(12, count);
    double *out = test_alloc(count * sizeof *out);
    size_t scratch_size = 0;
    CHECK_RESULT(HOST_SCRATCH(&scratch_size, attend, &a, host_none, host_none, host_none), TQKV_OK);
    tqkv_metal_buffer qb = host_buffer(q, size), ob = host_zeros(size), scratch = host_zeros(scratch_size);
    host_work work = host_begin(true);
    CHECK_RESULT(HOST(test_host.metal, work.encoder, attend, &a, qb, scratch, ob), TQKV_OK);
    host_end(&work);
    reference_attend_as(REFERENCE_FLOATS, &c, q, out);
    const float *got = host_contents(ob);
    const double error = reference_relative_error(got, out, count);
    CHECK(error <= 2e-5, "attention: relative error %g", error);
    host_release(qb);
    host_release(ob);
    host_release(scratch);
    free(q);
    free(out);
}

/* One pair of formats and capacities: one dispatch for both streams writes the bytes of two calls in C. Then both
   streams are decoded and attended over, in the buffers that the GPU wrote. */
static void run_pair(const void *parameters)
{
    const codec_case *c = parameters;
    codec_case values_case = *c;
    values_case.format = c->value_format;
    values_case.unrotated = c->format == TQKV_F16 && c->value_format == TQKV_TQ8; /* the hybrid mode */
    values_case.capacity = c->capacity + (c->ring ? 2 : 5);
    tqkv_store k = make_store(c), v = make_store(&values_case), ke = make_store(c), ve = make_store(&values_case);
    float *ks = host_floats(8, source_count(c)), *vs = host_floats(9, source_count(c));
    const size_t size = source_count(c) * sizeof(float);
    tqkv_metal_store kg = host_store(&k), vg = host_store(&v);
    tqkv_metal_buffer kb = host_buffer(ks, size), vb = host_buffer(vs, size);
    host_work work = host_begin(true);
    CHECK_RESULT(HOST(test_host.metal, work.encoder, encode, &kg, &vg, kb, vb, c->n_tokens, c->position, none),
                 TQKV_OK);
    host_end(&work);
    CHECK_RESULT(tqkv_encode(&ke, ks, c->n_tokens, c->position), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&ve, vs, c->n_tokens, c->position), TQKV_OK);
    host_store_read(&kg, &k);
    host_store_read(&vg, &v);
    CHECK(same_bytes(&k, &ke), "keys differ");
    CHECK(same_bytes(&v, &ve), "values differ");
    check_decode(c, &ke, &kg);
    check_decode(&values_case, &ve, &vg);
    check_attend((tqkv_store *const[2]){&ke, &ve}, &kg, &vg, c->position + c->n_tokens,
                 c->n_tokens < c->capacity ? c->n_tokens : c->capacity);
    host_release(kb);
    host_release(vb);
    host_store_release(&kg);
    host_store_release(&vg);
    tqkv_store *const stores[] = {&k, &v, &ke, &ve};
    for (int i = 0; i < 4; i++) test_store_free(stores[i]);
    free(ks);
    free(vs);
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

/* A row with NaN or Inf is stored as zeros and raises the flag; the rows beside it are unaffected. */
static void run_not_finite(const void *parameters)
{
    const float bad = *(const float *)parameters;
    codec_case c = {TQKV_TQ4, 64, 8, false, false, 4, 0, 0.0f, TQKV_TQ4, 0};
    tqkv_store expected = make_store(&c), got = make_store(&c);
    float *source = host_floats(11, source_count(&c));
    memset(source + 5 * 64, 0, 64 * sizeof(float));
    CHECK_RESULT(tqkv_encode(&expected, source, c.n_tokens, 0), TQKV_OK);
    source[5 * 64 + 3] = bad;
    tqkv_metal_store gpu = host_store(&got);
    tqkv_metal_buffer src = host_buffer(source, source_count(&c) * sizeof(float)), flag = host_zeros(4);
    host_work work = host_begin(false);
    CHECK_RESULT(HOST(test_host.metal, work.encoder, encode, &gpu, NULL, src, host_none, c.n_tokens, 0, flag), TQKV_OK);
    host_end(&work);
    host_store_read(&gpu, &got);
    CHECK(*(uint32_t *)host_contents(flag) == 1, "the flag is %u", *(uint32_t *)host_contents(flag));
    CHECK(same_bytes(&expected, &got), "the row is not stored as zeros");
    host_release(src);
    host_release(flag);
    host_store_release(&gpu);
    test_store_free(&expected);
    test_store_free(&got);
    free(source);
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
    codec_case c = {TQKV_I8, 64, 8, false, false, 4, 0, 0.0f, TQKV_I8, 0};
    tqkv_store before = make_store(&c), after = make_store(&c);
    tqkv_metal_store gpu = host_store(&before);
    tqkv_metal *m = test_host.metal;
    float *source = host_floats(12, source_count(&c));
    tqkv_metal_buffer src = host_buffer(source, source_count(&c) * sizeof(float));
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
    codec_case c = {TQKV_TQ4, 64, 8, false, false, 4, 0, 0.0f, TQKV_TQ4, 0};
    tqkv_store store = make_store(&c), narrow_store = test_store(TQKV_TQ4, 32, HEADS, 8, false);
    tqkv_metal_store gpu = host_store(&store), narrow = host_store(&narrow_store);
    tqkv_metal *m = test_host.metal;
    const size_t size = source_count(&c) * sizeof(float);
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

static void add(void (*run)(const void *), codec_case c, const char *what)
{
    test_add(run, &c, sizeof c, "%s/%s/d%d/n%d%s%s", what, tqkv_format_name(c.format), c.head_dim, c.n_tokens,
             c.ring ? "/ring" : "", c.unrotated ? "/unrotated" : "");
}

void codec_host_cases(void)
{
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int f = 0; f < TEST_FORMATS; f++) {
        const tqkv_format format = test_formats[f];
        const bool can_be_unrotated = reference_can_be_unrotated(format);
        for (int d = f % 2; d < TQKV__KERNEL_DIMS; d += 2)
            add(run_codec, (codec_case){format, TQKV__KERNEL_DIM(d), 9, false, false, 5, 3, 0.0f, format, 0}, "encode");
        add(run_codec, (codec_case){format, 128, 7, true, false, 5, 1000000000005, 0.0f, format, 0}, "encode");
        add(run_codec, (codec_case){format, 64, 7, true, false, 19, 4, 0.0f, format, 0}, "encode");
        add(run_codec, (codec_case){format, 512, 3, false, false, 2, 1, 1.25f, format, 0}, "encode");
        if (can_be_unrotated)
            add(run_codec, (codec_case){format, 256, 4, false, true, 3, 0, 0.0f, format, 0}, "encode");
        add(run_probe, (codec_case){format, 128, 4, false, false, 6, 0, 0.0f, format, 0}, "probe");
        for (int v = 0; v < TEST_FORMATS; v++) {
            const tqkv_format values = test_formats[v];
            codec_case c = {format, 64, 9, false, false, 4, 2, 0.0f, values, 0};
            if (v % 2) c = (codec_case){format, 32, 5, true, false, 13, 99, 0.0f, values, 0};
            test_add(run_pair, &c, sizeof c, "pair/%s_%s", tqkv_format_name(format), tqkv_format_name(values));
        }
    }
    for (int d = 0; d < TQKV__KERNEL_DIMS; d++) {
        const int head_dim = TQKV__KERNEL_DIM(d);
        test_add(run_rotate, &head_dim, sizeof head_dim, "rotate/d%d", head_dim);
    }
    for (int type = TQKV_TYPE_F16; type <= TQKV_TYPE_BF16; type++) {
        const codec_case c = {TQKV_TQ5, type == TQKV_TYPE_F16 ? 80 : 128, 7, true, false, 9, 4, 0.0f, TQKV_TQ5, type};
        test_add(run_codec, &c, sizeof c, "encode/types/%d", type);
        test_add(run_probe, &c, sizeof c, "probe/types/%d", type);
    }
    const calibrate_case learns[] = {{TQKV_TYPE_F32, 64, 40, 1, 0, TQKV_PAIRS_NONE},
                                     {TQKV_TYPE_F16, 128, 17, 2, 5, TQKV_PAIRS_HALVES},
                                     {TQKV_TYPE_BF16, 1024, 3, 1, 1, TQKV_PAIRS_NEIGHBOURS}};
    for (int i = 0; i < 3; i++) test_add(run_calibrate, &learns[i], sizeof learns[i], "calibrate/%d", i);
    for (int i = 0; i < 3; i++) test_add(run_not_finite, &bad[i], sizeof(float), "not_finite/%d", i);
    test_add(run_refusals, NULL, 0, "refusals/encode");
    test_add(run_other_refusals, NULL, 0, "refusals/others");
}
