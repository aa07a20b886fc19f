/* The tables: hashes, signs, symmetry, midpoints. The implementation under test is compiled here, and the plans. */
#include "data.h"
#include "runner.h"

#define TQKV_EXPLAIN(text) test_explain(text)
#include "tqkv_metal.m"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <math.h>

void test_plan_columns(tqkv_metal_dispatch *d, bool matrix, int columns) { tqkv__plan_columns(d, matrix, columns); }

char test_set_products(char products)
{
#ifdef TQKV__NEON
    const char before = tqkv__products;
    tqkv__products = products;
    return before;
#else
    return products; /* one kind */
#endif
}

const float *test_codebook(int bits)
{
    return bits == 2   ? tqkv__tables.codebook_2
           : bits == 3 ? tqkv__tables.codebook_3
           : bits == 4 ? tqkv__tables.codebook_4
           : bits == 5 ? tqkv__tables.codebook_5
           : bits == 6 ? tqkv__tables.codebook_6
                       : tqkv__tables.codebook_8;
}

const float *test_boundaries(int bits)
{
    return bits == 2   ? tqkv__tables.boundaries_2
           : bits == 3 ? tqkv__tables.boundaries_3
           : bits == 4 ? tqkv__tables.boundaries_4
           : bits == 5 ? tqkv__tables.boundaries_5
           : bits == 6 ? tqkv__tables.boundaries_6
                       : tqkv__tables.boundaries_8;
}

const uint8_t *test_signs(void) { return tqkv__tables.signs; }

const uint8_t *test_hadamard(int m) { return tqkv__matrix_row(m, 0); }

/* XXH3-64 of all tables as little-endian bytes; the floats come first. */
static void check_hash(NO_ROW)
{
    enum { FLOATS = offsetof(tqkv__table_set, signs) / sizeof(float) };
    unsigned char *bytes = (unsigned char *)test_alloc(sizeof tqkv__tables);
    memcpy(bytes, &tqkv__tables, sizeof tqkv__tables);
    data_to_little_endian(bytes, FLOATS);
    const uint64_t hash = XXH3_64bits(bytes, sizeof tqkv__tables);
    free(bytes);
    CHECK(hash == UINT64_C(0x6dd24054fe7884e0), "0x%016llx", (unsigned long long)hash);
}

/* ---- Shape of codebooks and boundaries ---- */

static void check_codebook(const void *parameters)
{
    int bits = *(const int *)parameters, count = 1 << bits;
    const float *codebook = test_codebook(bits);
    for (int i = 0; i < count; i++)
        CHECK(codebook[i] == -codebook[count - 1 - i], "entry %d: %.9g and %.9g", i, (double)codebook[i],
              (double)codebook[count - 1 - i]);
    for (int i = 1; i < count; i++)
        CHECK(codebook[i - 1] < codebook[i], "entry %d: %.9g after %.9g", i, (double)codebook[i],
              (double)codebook[i - 1]);
}

static void check_boundaries(const void *parameters)
{
    int bits = *(const int *)parameters, count = (1 << bits) - 1;
    const float *codebook = test_codebook(bits), *boundaries = test_boundaries(bits);
    for (int i = 0; i < count; i++) {
        CHECK(boundaries[i] == -boundaries[count - 1 - i], "boundary %d: %.9g and %.9g", i, (double)boundaries[i],
              (double)boundaries[count - 1 - i]);
        CHECK(codebook[i] < boundaries[i] && boundaries[i] < codebook[i + 1], "boundary %d: %.9g outside its cell", i,
              (double)boundaries[i]);
    }
    CHECK(boundaries[count / 2] == 0.0f && !signbit(boundaries[count / 2]), "middle boundary %.9g",
          (double)boundaries[count / 2]);
}

/* The decimals with seven places are midpoints to 1e-7. Conversion to float adds half an ulp of each number. */
static void check_midpoints(const void *parameters)
{
    int bits = *(const int *)parameters, count = (1 << bits) - 1;
    const float *codebook = test_codebook(bits), *boundaries = test_boundaries(bits);
    for (int i = 0; i < count; i++) {
        double midpoint = ((double)codebook[i] + (double)codebook[i + 1]) / 2.0;
        double largest = fmax(fabs((double)codebook[i]), fabs((double)codebook[i + 1]));
        double rounding = 2.0 * ldexp(1.0, ilogb(largest) - 24);
        double off = fabs((double)boundaries[i] - midpoint);
        CHECK(off <= 1e-7 + rounding, "boundary %d: %.9g is %.3g from its midpoint", i, (double)boundaries[i], off);
    }
}

/* ---- The rows of formats and codebooks ---- */

/* A tqkv_format without a row is an error here: -Wswitch. */
static int row_of(tqkv_format f)
{
    int row = 0, found = -1;
#define ROW(unused, format, ...) \
    case format: \
        found = (int)format; \
        break;
    switch (f) {
        TQKV__FORMATS(ROW, )
    case TQKV_FORMAT_DEFAULT:
        return 0;
    }
#undef ROW
#define ROW(unused, format, ...) \
    row++; \
    if ((int)format == found) return row;
    TQKV__FORMATS(ROW, )
#undef ROW
    return -1;
}

/* Rows stand in the order of tqkv_format, and say what makes sense. The loops of the sets rely on both. */
static void check_rows(NO_ROW)
{
    int n = 0;
    for (tqkv_format f = TQKV_F16; TQKV__KIND(f); f = (tqkv_format)((int)f + 1), n++) {
        const int main_bits = TQKV__MAIN_BITS(f), upper = TQKV__UPPER_BITS(f), book = TQKV__BOOK_BITS(f);
        CHECK(row_of(f) == (int)f, "%s: row %d for format %d", tqkv_format_name(f), row_of(f), (int)f);
        CHECK(tqkv_format_from_name(tqkv_format_name(f)) == f, "format %d", (int)f);
        CHECK((TQKV__KIND(f) == TQKV__BOOK) == (book != 0) && book <= main_bits + upper, "%s: a codebook of %d bits",
              tqkv_format_name(f), book);
#define KNOWN(bits, number) +((bits) == (number))
        CHECK(!book || (0 TQKV__BOOKS(KNOWN, book)) == 1, "%s: no codebook of %d bits", tqkv_format_name(f), book);
#undef KNOWN
        CHECK(test_row_bytes(f, 128) == (size_t)(16 * (main_bits + upper)), "%s: bytes of a row", tqkv_format_name(f));
    }
    CHECK(n == (int)(sizeof test_formats / sizeof *test_formats), "%d formats, the tests know another number", n);
}

static bool is_negative(int m, int row, int column)
{
    return (test_hadamard(m)[row * ((m + 7) / 8) + column / 8] >> (column % 8) & 1) != 0;
}

/* Symmetric, with orthogonal rows, and no bits beyond a row's end. */
static void check_hadamard(const void *parameters)
{
    const int m = *(const int *)parameters, row_bytes = (m + 7) / 8;
    for (int i = 0; i < m; i++) {
        CHECK(m % 8 == 0 || !(test_hadamard(m)[i * row_bytes + row_bytes - 1] >> m % 8), "row %d is too long", i);
        for (int j = 0; j < m; j++) {
            int product = 0;
            for (int k = 0; k < m; k++) product += is_negative(m, i, k) == is_negative(m, j, k) ? 1 : -1;
            CHECK(is_negative(m, i, j) == is_negative(m, j, i), "elements (%d, %d) and (%d, %d) differ", i, j, j, i);
            CHECK(product == (i == j ? m : 0), "rows %d and %d: product %d", i, j, product);
        }
    }
}

/* The constants of each head_dim, and that the tests know each of them. */
static void check_head_dims(NO_ROW)
{
    int n = 0;
    for (int d = 0; d <= TQKV_MAX_HEAD_DIM; d++) {
        if (!test_row_bytes(TQKV_F16, d)) continue;
        CHECK(n < TEST_ALL_HEAD_DIMS && test_all_head_dims[n] == d, "head_dim %d is not in test_all_head_dims", d);
        CHECK(TQKV__SQRT(d) == (float)sqrt((double)d), "root of %d: %.9g", d, (double)TQKV__SQRT(d));
        CHECK(TQKV__INV_SQRT(d) == (float)(1.0 / sqrt((double)d)), "1/root of %d", d);
        n++;
    }
    CHECK(n == TEST_ALL_HEAD_DIMS, "%d values of head_dim", n);
}

#ifdef TEST_ISAS
/* Each instruction set of tqkv.h is among those that the tests run with. */
static void check_isas(NO_ROW)
{
    for (size_t i = 0; i < TQKV__ISAS; i++)
        CHECK(strstr(" " TEST_ISAS " ", tqkv__isas[i].name), "%s is not in ISAS of tests/rules.mk", tqkv__isas[i].name);
}
#endif

void test_tables_cases(void)
{
#ifdef TEST_ISAS
    test_add(check_isas, NULL, 0, "isa/known");
#endif
    test_add(check_rows, NULL, 0, "tables/rows");
    test_add(check_head_dims, NULL, 0, "tables/head_dims");
    static const int all_bits[6] = {2, 3, 4, 5, 6, 8};
    test_add(check_hash, NULL, 0, "tables/hash");
    for (int i = 0; i < 6; i++) {
        test_add(check_codebook, &all_bits[i], sizeof *all_bits, "tables/codebook/%d", all_bits[i]);
        test_add(check_boundaries, &all_bits[i], sizeof *all_bits, "tables/boundaries/%d", all_bits[i]);
        test_add(check_midpoints, &all_bits[i], sizeof *all_bits, "tables/midpoints/%d", all_bits[i]);
    }
    for (int m = 12; m <= 36; m += 8) test_add(check_hadamard, &m, sizeof m, "tables/hadamard/%d", m);
}
