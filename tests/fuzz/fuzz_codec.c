/* make fuzz FUZZERS=codec SECONDS=60; AFL++: make fuzz-afl FUZZERS=codec. Encodes and decodes
   arbitrary floats in arbitrary shapes; the bytes must be those of the reference. */
#include "fuzz.h"

enum { MAX_CODES = 1 << 14 };

/* Any shape; most are valid. */
static tqkv_store read_shape(fuzz_input *input)
{
    tqkv_store s;
    memset(&s, 0, sizeof s);
    uint8_t odd = fuzz_byte(input);
    s.format = test_no_format(odd & 1 ? fuzz_int(input) : fuzz_range(input, 1, TEST_FORMATS));
    s.head_dim = odd & 2 ? fuzz_int(input) : fuzz_head_dim(input);
    s.n_kv_heads = odd & 4 ? fuzz_int(input) : fuzz_range(input, 1, 3);
    s.capacity = odd & 8 ? fuzz_int(input) : fuzz_range(input, 1, 70);
    s.block_scale = odd & 16 ? fuzz_float(input) : 0.0f;
    s.ring = (odd & 32) != 0;
    s.rotation = (odd & 64) != 0 ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
    if (odd & 128) s.center = (const float *)&s; /* any: check_run reads one */
    return s;
}

static void check_same_floats(const float *a, const float *b, int n, const char *what)
{
    for (int i = 0; i < n; i++)
        CHECK(!memcmp(a + i, b + i, sizeof *a) || (a[i] != a[i] && b[i] != b[i]), "%s %d: %.9g, not %.9g", what, i,
              (double)a[i], (double)b[i]);
}

typedef struct run {
    tqkv_store store;
    bool center_is_finite;
    const float *source; /* [n_tokens][n_kv_heads][head_dim] */
    int n_tokens;
    int64_t position;
} run;

/* Compares the slots of the tokens that were not overwritten with the reference. */
static void check_row(const run *r, int token, int head)
{
    uint8_t codes[2 * REFERENCE_MAX_DIM];
    float norms[REFERENCE_MAX_DIM / 128], scaled[REFERENCE_MAX_DIM], probed[REFERENCE_MAX_DIM];
    const tqkv_store *s = &r->store;
    const float *source = r->source + ((size_t)token * (size_t)s->n_kv_heads + (size_t)head) * (size_t)s->head_dim;
    int n_norms = reference_norms_per_row(s->format, s->head_dim);
    size_t n_bytes = reference_row_bytes(s->format, s->head_dim);
    tqkv_store one = *s;
    one.n_kv_heads = 1;
    one.center = reference_center(s, head);
    reference_encode_row(s, head, source, codes, norms, scaled);
    CHECK_RESULT(tqkv_probe(&one, source, 1, probed), TQKV_OK);
    check_same_floats(probed, scaled, s->head_dim, "scaled value");
    CHECK(!memcmp(codes, reference_codes_at(s, head, r->position + token), n_bytes), "codes of token %d, head %d",
          token, head);
    if (n_norms) check_same_floats(reference_norms_at(s, head, r->position + token), norms, n_norms, "norm");
}

/* Checks a decoded row against double precision if its numbers have ordinary size. */
static void check_decoded(const run *r, int token, const float *decoded, tqkv_basis basis)
{
    double row[REFERENCE_MAX_DIM];
    const tqkv_store *s = &r->store;
    for (int head = 0; head < s->n_kv_heads; head++, decoded += s->head_dim) {
        double size = 0.0;
        reference_decode(s, head, r->position + token, row);
        if (basis == TQKV_ROTATED && reference_is_rotated(s)) reference_rotate_double(row, s->head_dim);
        for (int i = 0; i < s->head_dim; i++) size += row[i] * row[i];
        if (!(size > 1e-60 && size < 1e60)) continue;
        double error = reference_relative_error(decoded, row, (size_t)s->head_dim), center = 0.0;
        for (int i = 0; s->center && i < s->head_dim; i++) center += pow((double)reference_center(s, head)[i], 2.0);
        CHECK(error <= 2e-6 * (1.0 + sqrt(center / size)), "token %d, head %d: relative error %.3g", token, head,
              error);
    }
}

static void check_stored(const run *r)
{
    const tqkv_store *s = &r->store;
    int first = s->ring && r->n_tokens > s->capacity ? r->n_tokens - s->capacity : 0, n = r->n_tokens - first;
    for (int t = first; t < r->n_tokens; t++)
        for (int h = 0; h < s->n_kv_heads; h++) check_row(r, t, h);
    float *decoded = fuzz_new_floats(n, s->n_kv_heads, s->head_dim);
    for (int basis = 0; basis < 2; basis++) {
        CHECK_RESULT(tqkv_decode(s, r->position + first, n, test_no_basis(basis), decoded), TQKV_OK);
        for (int t = first; t < r->n_tokens; t++)
            check_decoded(r, t, decoded + (size_t)(t - first) * (size_t)s->n_kv_heads * (size_t)s->head_dim,
                          test_no_basis(basis));
    }
    free(decoded);
}

/* Rotating and rotating back gives the same vector, unless a step can underflow or overflow. */
static void check_rotation(float *rows, int n_rows, int head_dim)
{
    double size = 0.0, *before = (double *)test_alloc((size_t)n_rows * (size_t)head_dim * sizeof *before);
    for (int i = 0; i < n_rows * head_dim; i++) {
        before[i] = (double)rows[i];
        size += before[i] * before[i];
    }
    CHECK_RESULT(tqkv_rotate(rows, n_rows, head_dim, TQKV_ROTATED), TQKV_OK);
    CHECK_RESULT(tqkv_rotate(rows, n_rows, head_dim, TQKV_ORIGINAL), TQKV_OK);
    double error = reference_relative_error(rows, before, (size_t)(n_rows * head_dim));
    CHECK(!(size > 1e-40 && size < 1e66) || error <= 2e-6, "relative error %.3g", error);
    free(before);
}

static tqkv_result expected_result(const run *r, bool finite)
{
    const tqkv_store *s = &r->store;
    if (!r->center_is_finite) return TQKV_NOT_FINITE;
    if (r->position < 0 || r->position > INT64_MAX - r->n_tokens) return TQKV_OUT_OF_RANGE;
    if (!s->ring && r->position + r->n_tokens > s->capacity) return TQKV_OUT_OF_RANGE;
    return finite ? TQKV_OK : TQKV_NOT_FINITE;
}

/* Typed rows are encoded as their floats are. */
static void check_types(tqkv_type type, const run *r, float *source, size_t n)
{
    const tqkv_store *s = &r->store;
    tqkv_store typed = *s;
    void *rows = fuzz_typed(type, source, n);
    typed.type = type;
    typed.codes = test_alloc_filled(s->codes_size, 0xff);
    if (s->norms_size) typed.norms = (float *)test_alloc(s->norms_size);
    memset(s->codes, 0xff, s->codes_size);
    if (s->norms_size) memset(s->norms, 0xff, s->norms_size);
    if (s->norms_size) memset(typed.norms, 0xff, s->norms_size);
    const tqkv_result result = tqkv_encode(s, source, r->n_tokens, r->position);
    CHECK_RESULT(tqkv_encode(&typed, rows, r->n_tokens, r->position), result);
    CHECK(!memcmp(s->codes, typed.codes, s->codes_size), "codes differ");
    CHECK(!s->norms_size || !memcmp(s->norms, typed.norms, s->norms_size), "norms differ");
    if (result == TQKV_OK && r->n_tokens) {
        const int64_t last = r->position + r->n_tokens - 1;
        const size_t n_last = (size_t)s->n_kv_heads * (size_t)s->head_dim;
        float *floats = fuzz_new_floats(1, s->n_kv_heads, s->head_dim);
        void *decoded = test_alloc(n_last * (type == TQKV_TYPE_F32 ? sizeof(float) : sizeof(uint16_t)));
        CHECK_RESULT(tqkv_decode(s, last, 1, TQKV_ORIGINAL, floats), TQKV_OK);
        CHECK_RESULT(tqkv_decode(&typed, last, 1, TQKV_ORIGINAL, decoded), TQKV_OK);
        CHECK(fuzz_is_rounded(type, decoded, floats, n_last), "decoded rows are not the rounded floats");
        free(floats);
        free(decoded);
    }
    free(rows);
    test_store_free(&typed);
}

static void check_run(fuzz_input *input, run *r)
{
    tqkv_store *s = &r->store;
    int rows = r->n_tokens * s->n_kv_heads;
    float *source = fuzz_new_floats(r->n_tokens, s->n_kv_heads, s->head_dim);
    fuzz_rows(input, source, rows, s->head_dim);
    r->source = source;
    r->center_is_finite = true;
    float *center = s->center ? fuzz_new_floats(1, s->n_kv_heads, s->head_dim) : NULL;
    if (center) fuzz_rows(input, center, s->n_kv_heads, s->head_dim);
    for (int i = 0; center && i < s->n_kv_heads * s->head_dim; i++) r->center_is_finite &= fuzz_is_finite(center[i]);
    s->center = center;
    bool finite = true;
    for (int i = 0; i < rows * s->head_dim; i++) finite &= fuzz_is_finite(source[i]);
    s->codes = test_alloc_filled(s->codes_size, 0xff);
    if (s->norms_size) s->norms = (float *)test_alloc_filled(s->norms_size, 0xff);
    tqkv_result expected = expected_result(r, finite), result = tqkv_encode(s, source, r->n_tokens, r->position);
    CHECK(result == expected, "%s, not %s", tqkv_result_string(result), tqkv_result_string(expected));
    if (result != TQKV_OK)
        CHECK(fuzz_is_untouched(s->codes, s->codes_size) && fuzz_is_untouched(s->norms, s->norms_size),
              "%s, but written", tqkv_result_string(result));
    else if (r->n_tokens)
        check_stored(r);
    if (finite) check_rotation(source, rows, s->head_dim);
    check_types(test_no_type(fuzz_byte(input) % 3), r, source, (size_t)rows * (size_t)s->head_dim);
    free(source);
    free(center);
    test_store_free(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    test_failure_aborts = true;
    fuzz_input input = {bytes, size};
    fuzz_choose_isa(fuzz_byte(&input));
    run r;
    memset(&r, 0, sizeof r);
    r.store = read_shape(&input);
    r.store.codes_size = tqkv_codes_size(&r.store);
    r.store.norms_size = tqkv_norms_size(&r.store);
    if (r.store.codes_size == 0 || r.store.codes_size > MAX_CODES || r.store.norms_size > MAX_CODES) {
        float row[REFERENCE_MAX_DIM] = {0};
        r.store.center = NULL;
        CHECK(tqkv_encode(&r.store, row, 1, 0) != TQKV_OK, "a store without memory");
        CHECK(tqkv_decode(&r.store, 0, 1, TQKV_ORIGINAL, row) != TQKV_OK, "a store without memory");
        tqkv_rotate(row, 1, r.store.head_dim, TQKV_ROTATED);
        return 0;
    }
    r.n_tokens = fuzz_range(&input, 0, r.store.ring ? 2 * r.store.capacity + 1 : r.store.capacity);
    uint8_t far = fuzz_byte(&input);
    r.position = far < 128 ? far % (r.store.capacity + 1) : (int64_t)fuzz_bits(&input, 8);
    check_run(&input, &r);
    return 0;
}
