/* tqkv_store_convert: bytes against the reference encoder, which takes decoded rows without the rotation; in place;
 * rings and pages; rows that cannot be converted. */
#include "data.h"
#include "reference.h"

enum { HEADS = 2, CAPACITY = 20, FIRST = 3, COUNT = 15 }; /* more rows than are converted at a time at 512 */

typedef struct convert_row {
    tqkv_format from, to;
    int head_dim;
    bool ring;                         /* with positions around its end */
    bool channels, unrotated, rotated; /* channels: a centre and a scale; unrotated: TQ formats; rotated: F16 */
    float block_scale;                 /* of `to` */
} convert_row;

/* Positions that both stores hold; a ring's are around its end. */
static int64_t first_of(const convert_row *row) { return row->ring ? 2 * CAPACITY - 8 : FIRST; }

static tqkv_store make_source(const convert_row *row, const float *center, const float *scales)
{
    const int64_t first = first_of(row);
    const int earlier = row->ring ? CAPACITY - COUNT : FIRST; /* a ring is full */
    tqkv_store s = test_store(row->from, row->head_dim, HEADS, CAPACITY, row->ring);
    float *rows = test_rows(9, DATA_STUDENT, (COUNT + earlier) * HEADS, row->head_dim);
    s.center = center;
    s.channel_scale = scales;
    s.rotation = (row->unrotated && row->from != TQKV_F16) ? TQKV_ROTATION_OFF
                 : (row->rotated && row->from == TQKV_F16) ? TQKV_ROTATION_ON
                                                           : TQKV_ROTATION_DEFAULT;
    CHECK_RESULT(tqkv_encode(&s, rows, COUNT + earlier, first - earlier), TQKV_OK);
    free(rows);
    return s;
}

/* Where the other store is described, but not its memory. */
static tqkv_store shape_of_target(const convert_row *row, const tqkv_store *source)
{
    tqkv_store s = *source;
    s.format = row->to;
    s.rotation = (row->unrotated && row->to != TQKV_F16) ? TQKV_ROTATION_OFF
                 : (row->rotated && row->to == TQKV_F16) ? TQKV_ROTATION_ON
                                                         : TQKV_ROTATION_DEFAULT;
    s.block_scale = row->block_scale;
    s.codes_size = tqkv_codes_size(&s);
    s.norms_size = tqkv_norms_size(&s);
    return s;
}

/* What the position of the head must be converted to. */
static void expect_row(const tqkv_store *from, const tqkv_store *to, int head, int64_t position, uint8_t *codes,
                       float *norms)
{
    float all[HEADS * REFERENCE_MAX_DIM], *row = all + head * from->head_dim, scaled[REFERENCE_MAX_DIM];
    tqkv_store plain = *from, target = *to;
    plain.center = target.center = plain.channel_scale = target.channel_scale = NULL;
    const bool rotated = reference_is_rotated(from) && reference_is_rotated(to);
    CHECK_RESULT(tqkv_decode(&plain, position, 1, rotated ? TQKV_ROTATED : TQKV_ORIGINAL, all), TQKV_OK);
    if (rotated) target.rotation = TQKV_ROTATION_OFF;
    reference_encode_row(&target, head, row, codes, norms, scaled);
}

static void check_rows(const tqkv_store *from, const tqkv_store *to, int64_t first, const tqkv_store *expected_of)
{
    const size_t row_bytes = reference_row_bytes(to->format, to->head_dim);
    const size_t norm_bytes = sizeof(float) * (size_t)reference_norms_per_row(to->format, to->head_dim);
    for (int64_t p = first; p < first + COUNT; p++)
        for (int h = 0; h < HEADS; h++) {
            uint8_t codes[2 * REFERENCE_MAX_DIM];
            float norms[8] = {0};
            if (expected_of) {
                memcpy(codes, reference_codes_at(expected_of, h, p), row_bytes);
                if (norm_bytes) memcpy(norms, reference_norms_at(expected_of, h, p), norm_bytes);
            } else {
                expect_row(from, to, h, p, codes, norms);
            }
            CHECK(!memcmp(reference_codes_at(to, h, p), codes, row_bytes), "head %d of %d: codes", h, (int)p);
            CHECK(!norm_bytes || !memcmp(reference_norms_at(to, h, p), norms, norm_bytes), "head %d of %d: norms", h,
                  (int)p);
        }
}

/* Each pair: into other memory, then onto the same memory if rows get no longer. */
static void check_pair(const void *parameters)
{
    const convert_row *row = (const convert_row *)parameters;
    float *center = row->channels ? test_rows(10, DATA_GAUSSIAN, HEADS, row->head_dim) : NULL;
    float *scales = row->channels ? test_scales(11, HEADS, row->head_dim, 10.0) : NULL;
    tqkv_store from = make_source(row, center, scales), to = shape_of_target(row, &from), in_place = to;
    to.codes = test_alloc_filled(to.codes_size, 0xff);
    to.norms = (float *)test_alloc_filled(to.norms_size + 4, 0xff);
    CHECK_RESULT(tqkv_store_convert(&to, &from, first_of(row), COUNT), TQKV_OK);
    check_rows(&from, &to, first_of(row), row->from == row->to && row->block_scale == 0.0f ? &from : NULL);
    if (reference_row_bytes(row->to, row->head_dim) <= reference_row_bytes(row->from, row->head_dim)) {
        const bool stay = in_place.norms_size <= from.norms_size;
        if (!stay) in_place.norms = (float *)test_alloc(in_place.norms_size);
        CHECK_RESULT(tqkv_store_convert(&in_place, &from, first_of(row), COUNT), TQKV_OK);
        check_rows(&from, &in_place, first_of(row), &to);
        if (!stay) free(in_place.norms);
    }
    free(to.norms);
    free(to.codes);
    test_store_free(&from);
    free(center);
    free(scales);
}

/* From a linear store to pages and on to a ring; no other row is written. */
static void check_places(const void *parameters)
{
    enum { PAGE = 64, N = 100, AT = 20 };
    static const int32_t pages[2] = {3, 1};
    (void)parameters;
    float *rows = test_rows(11, DATA_STUDENT, (AT + N) * HEADS, 64);
    tqkv_store linear = test_store(TQKV_TQ6, 64, HEADS, AT + N, false), ring = test_store(TQKV_TQ3, 64, HEADS, N, true);
    tqkv_store pool = test_store(TQKV_I8, 64, HEADS, 4 * PAGE, false),
               alone = test_store(TQKV_I8, 64, HEADS, AT + N, false);
    pool.pages = pages;
    pool.n_pages = 2;
    pool.page_size = PAGE;
    CHECK_RESULT(tqkv_encode(&linear, rows, AT + N, 0), TQKV_OK);
    CHECK_RESULT(tqkv_store_convert(&pool, &linear, AT, N), TQKV_OK);
    CHECK_RESULT(tqkv_store_convert(&alone, &linear, AT, N), TQKV_OK);
    for (int p = AT; p < AT + N; p++)
        CHECK(!memcmp(reference_codes_at(&pool, 1, p), reference_codes_at(&alone, 1, p), 64), "position %d", p);
    for (int slot = 0; slot < 4 * PAGE; slot++) {
        const int position = slot >= 3 * PAGE ? slot - 3 * PAGE : slot < PAGE || slot >= 2 * PAGE ? -1 : slot;
        const bool written = position >= AT && position < AT + N;
        CHECK(((uint32_t *)(void *)pool.norms)[slot] == 0xffffffffu || written, "slot %d was written", slot);
    }
    CHECK_RESULT(tqkv_store_convert(&ring, &pool, AT, N), TQKV_OK);
    for (int p = AT; p < AT + N; p++) {
        uint8_t codes[REFERENCE_MAX_DIM];
        float norm;
        expect_row(&alone, &ring, 0, p, codes, &norm);
        CHECK(!memcmp(reference_codes_at(&ring, 0, p), codes, 24), "position %d of the ring", p);
    }
    test_store_free(&linear);
    test_store_free(&pool);
    test_store_free(&alone);
    test_store_free(&ring);
    free(rows);
}

/* Positions [first, end) of two stores have the same codes and norms. */
static void check_same_rows(const tqkv_store *a, const tqkv_store *b, int first, int end, const char *what)
{
    const size_t bytes = reference_row_bytes(a->format, a->head_dim),
                 norms = (size_t)reference_norms_per_row(a->format, a->head_dim) * sizeof(float);
    for (int p = first; p < end; p++)
        for (int h = 0; h < HEADS; h++)
            CHECK(!memcmp(reference_codes_at(a, h, p), reference_codes_at(b, h, p), bytes) &&
                      (!norms || !memcmp(reference_norms_at(a, h, p), reference_norms_at(b, h, p), norms)),
                  "position %d %s", p, what);
}

/* A sequence copied inside its pool: to pages that it does not have, of as many bytes a row.
 * Nothing is written by a refused call. */
static void check_pool(const void *parameters)
{
    enum { PAGE = 16, PAGES = 8, N = 40, AT = 20, DIM = 64 };
    const tqkv_format format = *(const tqkv_format *)parameters;
    static const int32_t from_pages[4] = {5, 2, 7, 0}, apart[4] = {2, 4, 1, 3}, shared[4] = {6, 4, 1, 7},
                         wide[4] = {3, 1, 0, 2};
    float *rows = test_rows(12, DATA_STUDENT, AT + N, HEADS * DIM);
    tqkv_store from = test_store(format, DIM, HEADS, PAGES * PAGE, false), to;
    from.pages = from_pages;
    from.n_pages = 4;
    from.page_size = PAGE;
    CHECK_RESULT(tqkv_encode(&from, rows, AT + N, 0), TQKV_OK);
    void *before = test_alloc(from.codes_size);
    memcpy(before, from.codes, from.codes_size);
    to = from;
    to.pages = shared; /* page 7 has the last of the positions */
    CHECK_RESULT(tqkv_store_convert(&to, &from, AT, N), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_store_convert(&to, &from, AT, 0), TQKV_OK);
    to.pages = from_pages;
    CHECK_RESULT(tqkv_store_convert(&to, &from, AT, N), TQKV_INVALID_ARGUMENT);
    to.pages = wide; /* of another size */
    to.page_size = 2 * PAGE;
    CHECK_RESULT(tqkv_store_convert(&to, &from, AT, N), TQKV_INVALID_ARGUMENT);
    to.pages = apart;
    to.page_size = PAGE;
    CHECK(!memcmp(before, from.codes, from.codes_size), "a refused call has written");
    CHECK_RESULT(tqkv_store_convert(&to, &from, AT, N), TQKV_OK); /* page 2 of both is of positions that stay */
    tqkv_store original = from;                                   /* the rows of the source are as they were */
    original.codes = before;
    check_same_rows(&original, &from, 0, AT + N, "of the source");
    check_same_rows(&to, &from, AT, AT + N, "of the copy");
    free(before);
    free(rows);
    test_store_free(&from);
}

/* Rows that hold no finite values: refused before the first write if they are encoded anew, else copied. */
static void check_not_finite(const void *parameters)
{
    static const float bad[] = {(float)NAN, (float)INFINITY, 2e31f};
    (void)parameters;
    for (int i = 0; i < 3; i++) {
        const convert_row row = {TQKV_TQ4, TQKV_TQ2, 64, false, false, false, false, 0.0f};
        tqkv_store from = make_source(&row, NULL, NULL), to = test_store(TQKV_TQ2, 64, HEADS, CAPACITY, false);
        tqkv_store copy = test_store(TQKV_TQ4, 64, HEADS, CAPACITY, false);
        from.norms[CAPACITY + FIRST + COUNT - 1] = bad[i];
        CHECK_RESULT(tqkv_store_convert(&to, &from, FIRST, COUNT), TQKV_NOT_FINITE);
        for (size_t b = 0; b < to.codes_size; b++) CHECK(((uint8_t *)to.codes)[b] == 0xff, "byte %d", (int)b);
        CHECK_RESULT(tqkv_store_convert(&to, &from, FIRST, COUNT - 1), TQKV_OK);
        CHECK_RESULT(tqkv_store_convert(&copy, &from, FIRST, COUNT), TQKV_OK);
        test_store_free(&copy);
        test_store_free(&to);
        test_store_free(&from);
    }
    const convert_row halves = {TQKV_F16, TQKV_TQ2, 64, false, false, false, false, 0.0f};
    tqkv_store from = make_source(&halves, NULL, NULL), to = test_store(TQKV_TQ2, 64, HEADS, CAPACITY, false);
    ((uint8_t *)from.codes)[128 * FIRST + 1] = 0x7c; /* infinity */
    ((uint8_t *)from.codes)[128 * FIRST] = 0;
    CHECK_RESULT(tqkv_store_convert(&to, &from, FIRST, COUNT), TQKV_NOT_FINITE);
    test_store_free(&to);
    test_store_free(&from);
}

void test_convert_cases(void)
{
    for (int i = 0; i < TEST_FORMATS; i++)
        test_add(check_pool, &test_formats[i], sizeof *test_formats, "convert/pool/%s",
                 tqkv_format_name(test_formats[i]));
    static const int head_dims[] = {48, 128, 512};
    convert_row row;
    memset(&row, 0, sizeof row);
    for (int d = 0; d < 3; d++)
        for (int f = 0; f < TEST_FORMATS; f++)
            for (int t = 0; t < TEST_FORMATS; t++) {
                row.head_dim = head_dims[d];
                row.from = test_formats[f];
                row.to = test_formats[t];
                row.ring = (f + t) % 2;
                row.channels = (f + t) % 3 == 0;
                row.block_scale = d == 2 && f == t && f % 2 ? 0.75f : 0.0f;
                test_add(check_pair, &row, sizeof row, "convert/%s-%s/%d", tqkv_format_name(row.from),
                         tqkv_format_name(row.to), row.head_dim);
            }
    row.unrotated = true;
    row.from = TQKV_TQ8;
    row.to = TQKV_TQ5;
    test_add(check_pair, &row, sizeof row, "convert/unrotated");
    row.to = TQKV_F16;
    test_add(check_pair, &row, sizeof row, "convert/unrotated_f16");
    row.unrotated = false;
    row.rotated = true;
    test_add(check_pair, &row, sizeof row, "convert/rotated_f16");
    row.from = TQKV_F16;
    row.to = TQKV_TQ3;
    test_add(check_pair, &row, sizeof row, "convert/from_rotated_f16");
    test_add(check_places, NULL, 0, "convert/places");
    test_add(check_not_finite, NULL, 0, "convert/not_finite");
}
