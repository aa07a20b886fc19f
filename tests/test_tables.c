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

typedef struct hash_row {
    const void *bytes;
    size_t size, n_floats; /* the floats come first */
    uint64_t expected;
} hash_row;

static void check_hash(const void *parameters)
{
    const hash_row *row = (const hash_row *)parameters;
    unsigned char *bytes = (unsigned char *)test_alloc(row->size);
    memcpy(bytes, row->bytes, row->size);
    data_to_little_endian(bytes, row->n_floats);
    uint64_t hash = XXH3_64bits(bytes, row->size);
    free(bytes);
    CHECK(hash == row->expected, "%016llx, not %016llx", (unsigned long long)hash, (unsigned long long)row->expected);
}

static void add_hash(const char *name, const void *bytes, size_t size, uint64_t expected)
{
    const uint8_t *first = (const uint8_t *)bytes, *signs = tqkv__tables.signs; /* floats stand before the signs */
    const size_t before_signs = first < signs ? (size_t)(signs - first) : 0;
    hash_row row = {bytes, size, (size < before_signs ? size : before_signs) / sizeof(float), expected};
    test_add(check_hash, &row, sizeof row, "tables/hash/%s", name);
}

/* XXH3-64 of each member of tqkv__tables, as little-endian bytes, and of the whole. */
static void add_hashes(void)
{
    const tqkv__table_set *t = &tqkv__tables;
    add_hash("codebook_2", t->codebook_2, sizeof t->codebook_2, 0x35aca42a30059343ULL);
    add_hash("codebook_3", t->codebook_3, sizeof t->codebook_3, 0xad2a3efb9eb356d2ULL);
    add_hash("codebook_4", t->codebook_4, sizeof t->codebook_4, 0x018b5b08c996d16aULL);
    add_hash("codebook_5", t->codebook_5, sizeof t->codebook_5, 0xdbe08401820ec7a9ULL);
    add_hash("codebook_6", t->codebook_6, sizeof t->codebook_6, 0x0eed21c443a21ee3ULL);
    add_hash("codebook_8", t->codebook_8, sizeof t->codebook_8, 0x2d46504f3e168010ULL);
    add_hash("boundaries_2", t->boundaries_2, sizeof t->boundaries_2, 0xee23279c43f8234dULL);
    add_hash("boundaries_3", t->boundaries_3, sizeof t->boundaries_3, 0x6cfbfd534da15352ULL);
    add_hash("boundaries_4", t->boundaries_4, sizeof t->boundaries_4, 0xe3245fbbe3c67d93ULL);
    add_hash("boundaries_5", t->boundaries_5, sizeof t->boundaries_5, 0x6438d6a6c202da58ULL);
    add_hash("boundaries_6", t->boundaries_6, sizeof t->boundaries_6, 0x8f97397fcd5e721bULL);
    add_hash("boundaries_8", t->boundaries_8, sizeof t->boundaries_8, 0x4736f09377a5486cULL);
    add_hash("factors_2", t->factors_2, sizeof t->factors_2, 0xf87b05471331b3aeULL);
    add_hash("factors_3", t->factors_3, sizeof t->factors_3, 0x57998f7e506ae86fULL);
    add_hash("factors_4", t->factors_4, sizeof t->factors_4, 0x54499a187eace895ULL);
    add_hash("factors_5", t->factors_5, sizeof t->factors_5, 0x5fbd13c664752f38ULL);
    add_hash("factors_6", t->factors_6, sizeof t->factors_6, 0x3bd6ab3cea38e4dfULL);
    add_hash("factors_8", t->factors_8, sizeof t->factors_8, 0xfcffc13f72c668deULL);
    add_hash("signs", t->signs, sizeof t->signs, 0xd21b1578e1051b52ULL);
    add_hash("hadamard_12", t->hadamard_12, sizeof t->hadamard_12, 0x64db4ea2842f82acULL);
    add_hash("hadamard_20", t->hadamard_20, sizeof t->hadamard_20, 0x9d22670d3f30f60aULL);
    add_hash("hadamard_28", t->hadamard_28, sizeof t->hadamard_28, 0x81fcf697a2b6f6dcULL);
    add_hash("hadamard_36", t->hadamard_36, sizeof t->hadamard_36, 0xe323d35d74437d58ULL);
    add_hash("all", t, sizeof *t, 0x6dd24054fe7884e0ULL);
}

/* ---- SHA-256 of the signs, by the system's own tool ---- */

typedef struct signs_row {
    size_t bytes;
    const char *sha256;
} signs_row;

static void check_signs(const void *parameters)
{
    const signs_row *row = (const signs_row *)parameters;
    char command[640], output[65] = "";
    int length = snprintf(command, sizeof command, "printf '");
    for (size_t i = 0; i < row->bytes; i++)
        length += snprintf(command + length, sizeof command - (size_t)length, "\\%03o", tqkv__tables.signs[i]);
    snprintf(command + length, sizeof command - (size_t)length,
             "' | if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi");
    FILE *tool = popen(command, "r");
    REQUIRE(tool, "no shell for sha256sum");
    size_t read = fread(output, 1, 64, tool);
    pclose(tool);
    CHECK(read == 64 && !strcmp(output, row->sha256), "SHA-256 %s, not %s", output, row->sha256);
}

static void add_signs(void)
{
    signs_row of_256 = {32, "3ef1038e6c232e9519101daa2d6efd637d4c6bfdb29f4ee7101625c39d0ddc89"};
    signs_row of_512 = {64, "44f13ce9f6db1edac62f558ee054f9de29cd474fd051362cadcaa98a55745f17"};
    test_add(check_signs, &of_256, sizeof of_256, "tables/signs/256");
    test_add(check_signs, &of_512, sizeof of_512, "tables/signs/512");
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
static void check_rows(const void *parameters)
{
    (void)parameters;
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
static void check_head_dims(const void *parameters)
{
    (void)parameters;
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
static void check_isas(const void *parameters)
{
    (void)parameters;
    for (size_t i = 0; i < TQKV__ISAS; i++)
        CHECK(strstr(" " TEST_ISAS " ", tqkv__isas[i]->name), "%s is not in ISAS of tests/rules.mk",
              tqkv__isas[i]->name);
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
    add_hashes();
    add_signs();
    for (int i = 0; i < 6; i++) {
        test_add(check_codebook, &all_bits[i], sizeof *all_bits, "tables/codebook/%d", all_bits[i]);
        test_add(check_boundaries, &all_bits[i], sizeof *all_bits, "tables/boundaries/%d", all_bits[i]);
        test_add(check_midpoints, &all_bits[i], sizeof *all_bits, "tables/midpoints/%d", all_bits[i]);
    }
    for (int m = 12; m <= 36; m += 8) test_add(check_hadamard, &m, sizeof m, "tables/hadamard/%d", m);
}
