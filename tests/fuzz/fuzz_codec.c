/* make fuzz FUZZERS=codec SECONDS=60; AFL++: make fuzz-afl FUZZERS=codec. Encodes, converts and
   decodes arbitrary floats in arbitrary shapes; the bytes must be those of the reference, and the same one by one, in
   pages, of rows with gaps and of other types. */
#include "fuzz.h"
#include <fenv.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

enum { MAX_CODES = 1 << 14 };

/* Sometimes any shape, mostly a valid one that is not too large. */
static tqkv_store read_shape(fuzz_input *input)
{
    tqkv_store s;
    memset(&s, 0, sizeof s);
    const uint8_t flags = fuzz_byte(input), odd = flags % 8 == 7 ? fuzz_byte(input) : 0;
    s.format = test_no_format(odd & 1 ? fuzz_int(input) : fuzz_range(input, 1, TEST_FORMATS));
    s.head_dim = odd & 2 ? fuzz_int(input) : fuzz_head_dim(input);
    s.n_kv_heads = odd & 4 ? fuzz_int(input) : fuzz_range(input, 1, 3);
    s.capacity = odd & 8 ? fuzz_int(input) : fuzz_range(input, 1, 70);
    s.block_scale = odd & 16 ? fuzz_float(input) : flags % 16 == 6 ? 1.25f : flags % 16 == 14 ? 2e38f : 0.0f;
    s.ring = (flags & 32) != 0;
    s.rotation = flags & 64 ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
    if (s.format == TQKV_F16 && flags & 64) s.rotation = TQKV_ROTATION_ON;
    if (flags & 64 && s.format != TQKV_F16 && !reference_can_be_unrotated(s.format) && !odd)
        s.rotation = TQKV_ROTATION_DEFAULT;
    if (flags & 128) s.center = (const float *)&s; /* any: check_run reads one */
    if (flags & 16) s.channel_scale = (const float *)&s;
    while (s.capacity > 1 && !odd && tqkv_codes_size(&s) > MAX_CODES) s.capacity = (s.capacity + 1) / 2;
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
    uint64_t seed;
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
    one.channel_scale = reference_scale(s, head);
    reference_encode_row(s, head, source, codes, norms, scaled);
    CHECK_RESULT(tqkv_probe(&one, source, 1, probed), TQKV_OK);
    check_same_floats(probed, scaled, s->head_dim, "scaled value");
    for (int i = 0; s->format == TQKV_F16 && i < s->head_dim; i++)
        if (scaled[i] != scaled[i]) return; /* a rotation that overflows: no half is right */
    CHECK(!memcmp(codes, reference_codes_at(s, head, r->position + token), n_bytes), "codes of token %d, head %d",
          token, head);
    const float *stored = reference_norms_at(s, head, r->position + token);
    if (n_norms) check_same_floats(stored, norms, n_norms, "norm");
    for (int i = 0; i < n_norms && reference_is_codebook(s->format); i++) { /* all have one NaN */
        uint32_t bits;
        memcpy(&bits, stored + i, sizeof bits);
        CHECK(stored[i] == stored[i] || bits == 0x7fc00000u, "norm %d is %08x", i, (unsigned)bits);
    }
}

/* Checks a decoded row against double precision if its numbers have ordinary size. */
static void check_decoded(const run *r, int token, const float *decoded, tqkv_basis basis)
{
    double row[REFERENCE_MAX_DIM];
    const tqkv_store *s = &r->store;
    for (int head = 0; head < s->n_kv_heads; head++, decoded += s->head_dim) {
        double size = 0.0;
        reference_decode(s, head, r->position + token, row);
        if (basis == TQKV_ROTATED) reference_coded_output(s, head, row);
        for (int i = 0; i < s->head_dim; i++) size += row[i] * row[i];
        if (!(size > 1e-60 && size < 1e60)) continue;
        double error = reference_relative_error(decoded, row, (size_t)s->head_dim), center = 0.0;
        for (int i = 0; s->center && i < s->head_dim; i++) center += pow((double)reference_center(s, head)[i], 2.0);
        const double spread = s->channel_scale ? 16.0 : 1.0; /* of scales: each channel has the error of all */
        CHECK(error <= 2e-6 * spread * (1.0 + sqrt(center / size)), "token %d, head %d: relative error %.3g", token,
              head, error);
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

/* ---- The same in other ways ---- */

static tqkv_store new_store(const tqkv_store *shape)
{
    tqkv_store s = *shape;
    s.codes_size = tqkv_codes_size(&s);
    s.norms_size = tqkv_norms_size(&s);
    s.codes = test_alloc_filled(s.codes_size, 0xff);
    s.norms = s.norms_size ? (float *)test_alloc_filled(s.norms_size, 0xff) : NULL;
    return s;
}

static void check_same_store(const tqkv_store *a, const tqkv_store *b, const char *what)
{
    CHECK(!memcmp(a->codes, b->codes, a->codes_size), "%s: other codes", what);
    const bool same = !a->norms_size || (a->norms && b->norms && !memcmp(a->norms, b->norms, a->norms_size));
    CHECK(same, "%s: other norms", what);
}

/* Probes, means and measures of the rows of both stores are the same. */
static void check_looks(const tqkv_store *const stores[2], const void *const sources[2], int n)
{
    const size_t dim = (size_t)stores[0]->head_dim, heads = (size_t)stores[0]->n_kv_heads;
    tqkv_result results[2][3];
    float *looks[2];
    tqkv_quality quality[2][3];
    memset(quality, 0, sizeof quality);
    for (int i = 0; i < 2; i++) {
        looks[i] = (float *)test_alloc_filled(((size_t)n + 2) * heads * dim * sizeof(float), 0xff);
        float *mean = looks[i] + (size_t)n * heads * dim;
        results[i][0] = tqkv_probe(stores[i], sources[i], n, looks[i]);
        results[i][1] = tqkv_measure(stores[i], sources[i], n, quality[i]);
        results[i][2] =
            tqkv_calibrate(stores[i], sources[i], n, NULL, 0, 0, TQKV_PAIRS_HALVES, mean, mean + heads * dim);
    }
    CHECK(!memcmp(results[0], results[1], sizeof results[0]), "other results");
    check_same_floats(looks[0], looks[1], (int)(((size_t)n + 2) * heads * dim), "probe, mean or scale");
    CHECK(!memcmp(quality[0], quality[1], sizeof quality[0]) || !fuzz_is_finite((float)quality[0][0].error), "measure");
    free(looks[0]);
    free(looks[1]);
}

static void check_one_by_one(const run *r)
{
    tqkv_store s = new_store(&r->store);
    const size_t token = (size_t)s.n_kv_heads * (size_t)s.head_dim;
    for (int t = 0; t < r->n_tokens; t++)
        CHECK_RESULT(tqkv_encode(&s, r->source + (size_t)t * token, 1, r->position + t), TQKV_OK);
    check_same_store(&s, &r->store, "one by one");
    test_store_free(&s);
}

/* ---- The caller's floating-point environment ---- */

static unsigned long long read_control(void)
{
#if defined(__SSE__)
    return _mm_getcsr() & ~0x3fu; /* without the sticky exception flags */
#elif defined(__aarch64__)
    unsigned long long control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return control;
#else
    return 0;
#endif
}

/* Denormals as zero, in sources and results. */
static void set_flush_to_zero(void)
{
#if defined(__SSE__)
    _mm_setcsr(_mm_getcsr() | 0x8040u);
#elif defined(__aarch64__)
    unsigned long long control = read_control() | 1ull << 24;
    __asm__ volatile("msr fpcr, %0" : : "r"(control));
#endif
}

/* In another rounding mode, or with denormals flushed: the same bytes, and the environment stays. */
static void check_environment(const run *r)
{
    static const int roundings[4] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    tqkv_store s = new_store(&r->store);
    fenv_t saved;
    fegetenv(&saved);
    fesetround(roundings[r->seed / 2 % 4]);
    if (r->seed & 1) set_flush_to_zero();
    const unsigned long long before = read_control();
    const tqkv_result result = tqkv_encode(&s, r->source, r->n_tokens, r->position);
    const unsigned long long after = read_control();
    fesetenv(&saved);
    CHECK_RESULT(result, TQKV_OK);
    CHECK(before == after, "the control word was %llx, is %llx", before, after);
    check_same_store(&s, &r->store, "in another environment");
    test_store_free(&s);
}

/* ---- The measure ---- */

/* How many values of a row are beyond the last boundary at the factors that encoding chooses; scaled: [head_dim] */
static int count_beyond(const tqkv_store *store, const float *scaled)
{
    const int d = store->head_dim, block = reference_block(store->format, d);
    const float last = reference_last_boundary(store->format);
    uint8_t codes[REFERENCE_MAX_DIM];
    float factor = 1.0f, centroids[REFERENCE_MAX_DIM];
    int beyond = 0;
    for (int first = 0; first < d; first += block) {
        if (reference_is_codebook(store->format))
            factor = reference_search(reference_bits(store->format), scaled, first, block, codes, centroids);
        for (int i = first; i < first + block; i++) beyond += fabsf(reference_multiply(scaled[i], factor)) > last;
    }
    return beyond;
}

/* The measure of one head by plain sums over what encode, decode and probe give; false: rows without one, or whose
   differences rounding decides. */
static bool plain_quality(const run *r, const float *scaled, int head, tqkv_quality *q)
{
    const tqkv_store *s = &r->store;
    const int d = s->head_dim, step = s->n_kv_heads * d, n = r->n_tokens;
    double squares = 0.0, noise = 0.0, mean = 0.0, differs = 0.0, second = 0.0, fourth = 0.0, beyond = 0.0;
    for (int i = head * d; i < (head + 1) * d; i++) {
        double sum = 0.0;
        for (int t = 0; t < n; t++) sum += (double)r->source[t * step + i];
        mean += sum / n * (sum / n);
        for (int t = 0; t < n; t++) {
            const double x = (double)r->source[t * step + i], v = (double)scaled[t * step + i];
            squares += x * x;
            differs += (x - sum / n) * (x - sum / n);
            second += v * v;
            fourth += v * v * v * v;
        }
    }
    for (int t = 0; t < n; t++) {
        double decoded[REFERENCE_MAX_DIM];
        beyond += count_beyond(s, scaled + t * step + head * d);
        reference_decode(s, head, r->position + t, decoded);
        for (int i = 0; i < d; i++) noise += pow(decoded[i] - (double)r->source[t * step + head * d + i], 2.0);
    }
    const double values = (double)n * d;
    const tqkv_quality found = {mean * n / squares, noise / differs, values * fourth / (second * second),
                                beyond / values};
    *q = found;
    return squares > 1e-40 && squares < 1e40 && differs > 1e-3 * squares && noise > 1e-9 * squares && noise < 1e60 &&
           second > 0.0 && fourth < 1e60;
}

static void check_quality(const run *r)
{
    const tqkv_store *s = &r->store;
    tqkv_quality found[3], wanted;
    float *scaled = fuzz_new_floats(r->n_tokens, s->n_kv_heads, s->head_dim);
    CHECK_RESULT(tqkv_probe(s, r->source, r->n_tokens, scaled), TQKV_OK);
    CHECK_RESULT(tqkv_measure(s, r->source, r->n_tokens, found), TQKV_OK);
    for (int head = 0; head < s->n_kv_heads && r->n_tokens <= s->capacity; head++) {
        if (!plain_quality(r, scaled, head, &wanted)) continue;
        CHECK(fabs(found[head].mean_share - wanted.mean_share) <= 1e-3 * wanted.mean_share + 1e-6,
              "mean_share %g, not %g", found[head].mean_share, wanted.mean_share);
        CHECK(fabs(found[head].error - wanted.error) <= 1e-3 * wanted.error, "error %g, not %g", found[head].error,
              wanted.error);
        CHECK(fabs(found[head].kurtosis - wanted.kurtosis) <= 1e-3 * wanted.kurtosis, "kurtosis %g, not %g",
              found[head].kurtosis, wanted.kurtosis);
        CHECK(found[head].beyond == wanted.beyond, "beyond %g, not %g", found[head].beyond, wanted.beyond);
    }
    free(scaled);
}

/* ---- Other places, types and formats ---- */

/* The store's description with pages in a random order. pages: [n_pages] */
static tqkv_store paged(const tqkv_store *s, data_random *random, int page_size, int n_pages, int32_t *pages)
{
    tqkv_store shape = *s;
    shape.ring = false;
    shape.page_size = page_size;
    shape.n_pages = n_pages;
    shape.capacity = n_pages * page_size;
    shape.pages = pages;
    for (int i = 0; i < n_pages; i++) {
        const int j = data_below(random, i + 1);
        if (j < i) pages[i] = pages[j];
        pages[j] = i;
    }
    return shape;
}

/* Pages in a random order hold the same rows, and nothing else is written; of pages of one position some are none. */
static void check_pages(const run *r, uint64_t seed)
{
    enum { MOST = 700 };
    static const int sizes[4] = {1, 16, 48, 64};
    const tqkv_store *s = &r->store;
    data_random random = {seed};
    const int page_size = sizes[data_below(&random, 4)], end = (int)(r->position + r->n_tokens);
    int32_t pages[MOST + 3];
    bool used[MOST + 200] = {false};
    if (r->position + r->n_tokens > MOST) return;
    tqkv_store shape = paged(s, &random, page_size, end / page_size + 2, pages);
    for (int i = 0; page_size == 1 && i < shape.n_pages; i += 7) pages[i] = -1;
    tqkv_store pool = new_store(&shape);
    const size_t codes = reference_row_bytes(s->format, s->head_dim),
                 norms = (size_t)reference_norms_per_row(s->format, s->head_dim) * sizeof(float);
    CHECK_RESULT(tqkv_encode(&pool, r->source, r->n_tokens, r->position), TQKV_OK);
    for (int64_t at = r->position; at < end; at++)
        for (int h = 0; pages[at / page_size] >= 0 && h < s->n_kv_heads; h++) {
            used[reference_slot(&pool, at)] = true;
            if (at < end - s->capacity) continue;
            CHECK(!memcmp(reference_codes_at(&pool, h, at), reference_codes_at(s, h, at), codes), "position %d",
                  (int)at);
            CHECK(!norms || !memcmp(reference_norms_at(&pool, h, at), reference_norms_at(s, h, at), norms), "norms");
        }
    pool.pages = NULL;
    for (int slot = 0; slot < pool.capacity; slot++)
        for (int h = 0; !used[slot] && h < s->n_kv_heads; h++)
            CHECK(test_is_untouched(reference_codes_at(&pool, h, slot), codes), "slot %d was written", slot);
    test_store_free(&pool);
}

/* What a row of a head must be converted to: what is decoded, without the rotation if both have it, is encoded. False:
 * it may be too large for that. */
static bool expect_converted(const tqkv_store *from, const tqkv_store *to, int head, int64_t position, uint8_t *codes,
                             float *norms)
{
    float all[3 * REFERENCE_MAX_DIM], *row = all + head * from->head_dim, scaled[REFERENCE_MAX_DIM];
    tqkv_store plain = *from, target = *to;
    plain.center = target.center = plain.channel_scale = target.channel_scale = NULL;
    const bool rotated = reference_is_rotated(from) && reference_is_rotated(to);
    CHECK_RESULT(tqkv_decode(&plain, position, 1, rotated ? TQKV_ROTATED : TQKV_ORIGINAL, all), TQKV_OK);
    if (rotated) target.rotation = TQKV_ROTATION_OFF;
    for (int i = 0; i < from->head_dim; i++)
        if (!(fabsf(row[i]) < 1e25f)) return false;
    reference_encode_row(&target, head, row, codes, norms, scaled);
    return true;
}

/* A description that the store can be converted to, in the same places or in pages; pages: for positions below `end` */
static tqkv_store read_target(const tqkv_store *from, uint64_t seed, int64_t end, int32_t *pages)
{
    data_random random = {seed};
    tqkv_store to = pages ? paged(from, &random, 16, (int)end / 16 + 2, pages) : *from;
    const tqkv_format format = test_formats[data_below(&random, TEST_FORMATS)];
    const bool other = seed % 3 == 0, off = from->format == TQKV_F16 ? other : !reference_is_rotated(from);
    if (format == TQKV_F16 || !off || reference_can_be_unrotated(format)) to.format = format;
    to.rotation = off ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
    if (to.format == TQKV_F16) to.rotation = other ? TQKV_ROTATION_ON : TQKV_ROTATION_DEFAULT;
    if (off && !reference_can_be_unrotated(to.format) && to.format != TQKV_F16) to.rotation = TQKV_ROTATION_DEFAULT;
    return to;
}

/* Converted, then onto the same memory if rows get no longer. */
static void check_convert(const run *r, uint64_t seed)
{
    enum { MOST = 700 };
    const tqkv_store *from = &r->store;
    int32_t pages[MOST];
    const int64_t end = r->position + r->n_tokens;
    const int n = from->ring && r->n_tokens > from->capacity ? from->capacity : r->n_tokens;
    const bool in_pages = end < MOST - 2 && seed % 2;
    const tqkv_store shape = read_target(from, seed, end, in_pages ? pages : NULL);
    tqkv_store to = new_store(&shape), onto = to;
    const size_t codes = reference_row_bytes(to.format, to.head_dim),
                 norms = (size_t)reference_norms_per_row(to.format, to.head_dim) * sizeof(float);
    const bool same = to.format == from->format && reference_is_rotated(&to) == reference_is_rotated(from);
    const tqkv_result result = tqkv_store_convert(&to, from, end - n, n);
    bool large = false;
    for (int i = 0; i < n * to.n_kv_heads && !same; i++) {
        uint8_t wanted[2 * REFERENCE_MAX_DIM];
        float of_norms[REFERENCE_MAX_DIM / 128] = {0};
        const int64_t at = end - n + i / to.n_kv_heads;
        const int head = i % to.n_kv_heads;
        large = !expect_converted(from, &to, head, at, wanted, of_norms) || large;
        if (result != TQKV_OK || large) continue;
        CHECK(!memcmp(reference_codes_at(&to, head, at), wanted, codes), "codes of %d, converted", (int)at);
        CHECK(!norms || !memcmp(reference_norms_at(&to, head, at), of_norms, norms), "norms of %d, converted", (int)at);
    }
    CHECK(result == TQKV_OK || (result == TQKV_NOT_FINITE && large), "%s", tqkv_result_string(result));
    onto.codes = from->codes;
    onto.norms = from->norms;
    if (result == TQKV_OK && !in_pages && to.codes_size <= from->codes_size && to.norms_size == from->norms_size) {
        CHECK_RESULT(tqkv_store_convert(&onto, from, end - n, n), TQKV_OK);
        for (int64_t at = end - n; at < end; at++)
            CHECK(!memcmp(reference_codes_at(&onto, 0, at), reference_codes_at(&to, 0, at), codes), "onto itself");
    }
    test_store_free(&to);
}

/* Rotating gives the reference's bits, and rotating back the same vector, unless a step can underflow or overflow. */
static void check_rotation(float *rows, int n_rows, int head_dim)
{
    float first[REFERENCE_MAX_DIM];
    double size = 0.0, *before = (double *)test_alloc((size_t)n_rows * (size_t)head_dim * sizeof *before);
    for (int i = 0; i < n_rows * head_dim; i++) {
        before[i] = (double)rows[i];
        size += before[i] * before[i];
    }
    if (n_rows) memcpy(first, rows, (size_t)head_dim * sizeof *rows);
    CHECK_RESULT(tqkv_rotate(rows, n_rows, head_dim, TQKV_ROTATED), TQKV_OK);
    if (n_rows) reference_rotate_row(first, head_dim);
    if (n_rows) check_same_floats(rows, first, head_dim, "rotated value");
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

/* Rows of a type, with gaps token by token or head by head, are encoded as their floats without gaps are, decoded as
   the rounded floats, and looked at as these; nothing is written between them. n: values */
static void check_form(tqkv_type type, const run *r, float *source, size_t n)
{
    const tqkv_store *s = &r->store;
    const size_t dim = (size_t)s->head_dim, heads = (size_t)s->n_kv_heads, tokens = (size_t)r->n_tokens, gap = 16;
    const size_t size = type == TQKV_TYPE_F32 ? sizeof(float) : sizeof(uint16_t),
                 all = (tokens * heads * (dim + gap) + tokens * gap + heads * gap) * size;
    char *packed = (char *)fuzz_typed(type, source, n), *rows = (char *)test_alloc_filled(all, 0xff);
    tqkv_store form = new_store(s);
    form.type = type;
    form.strides.token = r->seed & 1 ? dim + gap : heads * (dim + gap) + gap;
    form.strides.head = r->seed & 1 ? tokens * (dim + gap) + gap : dim + gap;
    for (size_t i = 0; i < tokens * heads; i++)
        memcpy(rows + (i / heads * form.strides.token + i % heads * form.strides.head) * size, packed + i * dim * size,
               dim * size);
    memset(s->codes, 0xff, s->codes_size);
    if (s->norms_size) memset(s->norms, 0xff, s->norms_size);
    const tqkv_result result = tqkv_encode(s, source, r->n_tokens, r->position);
    CHECK_RESULT(tqkv_encode(&form, rows, r->n_tokens, r->position), result);
    check_same_store(s, &form, "in another form");
    const tqkv_store *const stores[2] = {s, &form};
    const void *const sources[2] = {source, rows};
    if (r->n_tokens) check_looks(stores, sources, r->n_tokens);
    if (result == TQKV_OK && r->n_tokens) {
        const int64_t last = r->position + r->n_tokens - 1;
        float *floats = fuzz_new_floats(1, s->n_kv_heads, s->head_dim);
        memset(rows, 0xff, all);
        CHECK_RESULT(tqkv_decode(s, last, 1, TQKV_ORIGINAL, floats), TQKV_OK);
        CHECK_RESULT(tqkv_decode(&form, last, 1, TQKV_ORIGINAL, rows), TQKV_OK);
        for (size_t h = 0; h < heads; h++) {
            const char *row = rows + h * form.strides.head * size;
            CHECK(fuzz_is_rounded(type, row, floats + h * dim, dim), "decoded rows are not the rounded floats");
            CHECK(test_is_untouched(row + dim * size, gap * size), "a gap was written");
        }
        free(floats);
    }
    free(packed);
    free(rows);
    test_store_free(&form);
}

static void check_ways(const run *r)
{
    check_stored(r);
    check_one_by_one(r);
    check_environment(r);
    check_quality(r);
    check_pages(r, r->seed);
    check_convert(r, r->seed); /* changes the store */
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
    float *scale = s->channel_scale ? test_scales(r->seed, s->n_kv_heads, s->head_dim, 4.0) : NULL;
    s->channel_scale = scale;
    bool finite = true;
    for (int i = 0; i < rows * s->head_dim; i++) finite &= fuzz_is_finite(source[i]);
    s->codes = test_alloc_filled(s->codes_size, 0xff);
    if (s->norms_size) s->norms = (float *)test_alloc_filled(s->norms_size, 0xff);
    tqkv_result expected = expected_result(r, finite), result = tqkv_encode(s, source, r->n_tokens, r->position);
    CHECK(result == expected, "%s, not %s", tqkv_result_string(result), tqkv_result_string(expected));
    if (result != TQKV_OK)
        CHECK(test_is_untouched(s->codes, s->codes_size) && test_is_untouched(s->norms, s->norms_size),
              "%s, but written", tqkv_result_string(result));
    else if (r->n_tokens)
        check_ways(r);
    if (finite) check_rotation(source, rows, s->head_dim);
    check_form(test_no_type(fuzz_byte(input) % 3), r, source, (size_t)rows * (size_t)s->head_dim);
    free(source);
    free(center);
    free(scale);
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
        r.store.center = r.store.channel_scale = NULL;
        CHECK(tqkv_encode(&r.store, row, 1, 0) != TQKV_OK, "a store without memory");
        CHECK(tqkv_decode(&r.store, 0, 1, TQKV_ORIGINAL, row) != TQKV_OK, "a store without memory");
        tqkv_rotate(row, 1, r.store.head_dim, TQKV_ROTATED);
        return 0;
    }
    const size_t rows = (size_t)r.store.n_kv_heads * (size_t)r.store.capacity,
                 norms = (size_t)reference_norms_per_row(r.store.format, r.store.head_dim);
    CHECK(r.store.codes_size == rows * reference_row_bytes(r.store.format, r.store.head_dim), "%zu bytes of codes",
          r.store.codes_size);
    CHECK(r.store.norms_size == rows * norms * sizeof(float), "%zu bytes of norms", r.store.norms_size);
    r.n_tokens = fuzz_range(&input, 0, r.store.ring ? 2 * r.store.capacity + 1 : r.store.capacity);
    uint8_t far = fuzz_byte(&input);
    r.position = far < 128 ? far % (r.store.capacity + 1) : (int64_t)fuzz_bits(&input, 8);
    r.seed = fuzz_byte(&input);
    check_run(&input, &r);
    return 0;
}
