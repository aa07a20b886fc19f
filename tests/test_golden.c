/* In every build codes, norms and outputs in integers hash to the values of goldens.h and attend_goldens.h. */
#include "attend_golden.h"
#include "attend_goldens.h"
#include "goldens.h"
#include "runner.h"

/* A case, of one of four kinds, and what its hashes must come to. */
typedef struct golden_row {
    golden_case encoded;
    golden_pair converted;
    golden_calibration calibrated;
    attend_golden_case attended;
    uint32_t wanted;
} golden_row;

static void compare(bool made, const golden *hashes, const golden_row *row)
{
    REQUIRE(made, "a call failed");
    CHECK(golden_word(hashes) == row->wanted, "hashes of %016llx and %016llx give %08x, not %08x",
          (unsigned long long)hashes->codes, (unsigned long long)hashes->norms, golden_word(hashes), row->wanted);
}

static void check_golden(const void *parameters)
{
    const golden_row *row = (const golden_row *)parameters;
    golden made;
    compare(golden_make(&row->encoded, &made), &made, row);
}

static void check_converted(const void *parameters)
{
    const golden_row *row = (const golden_row *)parameters;
    golden made;
    compare(golden_pair_make(&row->converted, &made), &made, row);
}

static void check_calibrated(const void *parameters)
{
    const golden_row *row = (const golden_row *)parameters;
    golden made; /* centre and scale in the place of codes and norms */
    compare(golden_calibration_make(&row->calibrated, &made), &made, row);
}

static void check_output(const golden_row *row, char products)
{
    uint32_t word;
    REQUIRE(attend_golden_make(&row->attended, &word), "attention failed");
    CHECK(word == row->wanted, "with products %d the output hashes to %08x, not %08x", products, word, row->wanted);
}

/* With the best products of integers that the processor has, and some with all others. */
static void check_attended(const void *parameters)
{
    const golden_row *row = (const golden_row *)parameters;
    check_output(row, 0);
    if (row->wanted % 16) return;
    const char best = test_set_products(1);
    for (char products = 1; products < best; products++) {
        test_set_products(products);
        check_output(row, products);
    }
    test_set_products(best);
}

static void check_complete(const void *parameters)
{
    const int n = *(const int *)parameters, n_goldens = (int)(sizeof goldens / sizeof *goldens);
    const int n_converted = (int)(sizeof conversion_goldens / sizeof *conversion_goldens);
    const int n_calibrated = (int)(sizeof calibration_goldens / sizeof *calibration_goldens);
    const int n_attended = (int)(sizeof attend_goldens / sizeof *attend_goldens);
    const int n_words = n_goldens + n_converted + n_calibrated + n_attended;
    CHECK(n == n_words, "%d cases, but %d words", n, n_words);
}

/* The word with that number, or 0: a case too many fails. */
#define WORD(words, i) ((size_t)(i) < sizeof(words) / sizeof *(words) ? (words)[i] : 0)

void test_golden_cases(void)
{
    golden_row row = {{0, 0, 0, 0}, {TQKV_F16, TQKV_F16, 0}, {0, 0, 0}, {TQKV_F16, TQKV_F16, 0, 0}, 0};
    char name[GOLDEN_NAME_SIZE];
    int n = 0, i = 0;
    for (row.encoded = golden_first; golden_next(&row.encoded); i++, n++) {
        row.wanted = WORD(goldens, i);
        golden_name(&row.encoded, name);
        test_add(check_golden, &row, sizeof row, "golden/%s", name);
    }
    for (i = 0; golden_pair_find(i, &row.converted); i++, n++) {
        row.wanted = WORD(conversion_goldens, i);
        golden_pair_name(&row.converted, name);
        test_add(check_converted, &row, sizeof row, "golden/%s", name);
    }
    for (i = 0; golden_calibration_find(i, &row.calibrated); i++, n++) {
        row.wanted = WORD(calibration_goldens, i);
        golden_calibration_name(&row.calibrated, name);
        test_add(check_calibrated, &row, sizeof row, "golden/%s", name);
    }
    for (i = 0; attend_golden_find(i, &row.attended); i++, n++) {
        row.wanted = WORD(attend_goldens, i);
        attend_golden_name(&row.attended, name);
        test_add(check_attended, &row, sizeof row, "golden/%s", name);
    }
    test_add(check_complete, &n, sizeof n, "golden/complete");
}
