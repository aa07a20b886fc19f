/* tqkv_store_convert inside a pool. test_codec_history.c has formats and places. */
#include "data.h"
#include "reference.h"

enum { HEADS = 2 };

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

void test_convert_cases(void)
{
    for (int i = 0; i < TEST_FORMATS; i++)
        test_add(check_pool, &test_formats[i], sizeof *test_formats, "convert/pool/%s",
                 tqkv_format_name(test_formats[i]));
}
