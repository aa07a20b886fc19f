/* In every build codes, norms and outputs in integers hash to the values of goldens.h and attend_goldens.h. */
#include "attend_golden.h"
#include "attend_goldens.h"
#include "goldens.h"
#include "runner.h"

/* A case, of one of three kinds, and what its hashes must come to. */
typedef struct golden_row {
    golden_case encoded;
    golden_pair converted;
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

/* Each kind: the next case of a row and its name, or false past the last; what checks it; the words. */

static bool next_encoded(int index, golden_row *row, char *name)
{
    if (index == 0) row->encoded = golden_first;
    if (!golden_next(&row->encoded)) return false;
    golden_name(&row->encoded, name);
    return true;
}

static bool next_converted(int index, golden_row *row, char *name)
{
    if (!golden_pair_find(index, &row->converted)) return false;
    golden_pair_name(&row->converted, name);
    return true;
}

static bool next_attended(int index, golden_row *row, char *name)
{
    if (!attend_golden_find(index, &row->attended)) return false;
    attend_golden_name(&row->attended, name);
    return true;
}

#define WORDS(words) words, (int)(sizeof(words) / sizeof *(words))

static const struct {
    bool (*next)(int index, golden_row *row, char *name);
    void (*check)(const void *row);
    const uint32_t *words;
    int n;
} kinds[3] = {{next_encoded, check_golden, WORDS(goldens)},
              {next_converted, check_converted, WORDS(conversion_goldens)},
              {next_attended, check_attended, WORDS(attend_goldens)}};

static void check_complete(const void *parameters)
{
    const int *counts = (const int *)parameters;
    for (int k = 0; k < 3; k++) CHECK(counts[k] == kinds[k].n, "kind %d: %d cases, %d words", k, counts[k], kinds[k].n);
}

void test_golden_cases(void)
{
    golden_row row = {{0, 0, 0, 0}, {TQKV_F16, TQKV_F16, 0}, {TQKV_F16, TQKV_F16, 0, 0}, 0};
    char name[GOLDEN_NAME_SIZE];
    int counts[3] = {0, 0, 0};
    for (int k = 0; k < 3; k++)
        for (; kinds[k].next(counts[k], &row, name); counts[k]++) {
            row.wanted = counts[k] < kinds[k].n ? kinds[k].words[counts[k]] : 0; /* a case too many fails */
            test_add(kinds[k].check, &row, sizeof row, "golden/%s", name);
        }
    test_add(check_complete, counts, sizeof counts, "golden/complete");
}
