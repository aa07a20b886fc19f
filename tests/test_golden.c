/* In every build codes, norms and outputs in integers hash to the words of goldens.h. */
#include "attend_golden.h"
#include "goldens.h"

enum { ENCODED, CONVERTED, ATTENDED, KINDS, WORDS = sizeof goldens / sizeof *goldens };

/* A case of one kind, and what its hash must come to. */
typedef struct golden_row {
    int kind;
    golden_case encoded;
    golden_pair converted;
    attend_golden_case attended;
    uint32_t wanted;
} golden_row;

static bool make(const golden_row *row, uint32_t *word)
{
    return row->kind == ENCODED     ? golden_make(&row->encoded, word)
           : row->kind == CONVERTED ? golden_pair_make(&row->converted, word)
                                    : attend_golden_make(&row->attended, word);
}

/* Case number `index` of row->kind, and its name. False past the last. */
static bool find(int index, golden_row *row, char *name)
{
    switch (row->kind) {
    case ENCODED:
        if (!golden_find(index, &row->encoded)) return false;
        golden_name(&row->encoded, name);
        return true;
    case CONVERTED:
        if (!golden_pair_find(index, &row->converted)) return false;
        golden_pair_name(&row->converted, name);
        return true;
    default:
        if (!attend_golden_find(index, &row->attended)) return false;
        attend_golden_name(&row->attended, name);
        return true;
    }
}

static void check_with(const golden_row *row, char products)
{
    uint32_t word;
    REQUIRE(make(row, &word), "a call failed");
    CHECK(word == row->wanted, "with products %d the hash is %08x, not %08x", products, word, row->wanted);
}

/* With the best products of integers that the processor has, and some with all others. */
static void check_golden(const void *parameters)
{
    const golden_row *row = (const golden_row *)parameters;
    check_with(row, 0);
    if (row->kind != ATTENDED || row->wanted % 16) return;
    const char best = test_set_products(1);
    for (char products = 1; products < best; products++) {
        test_set_products(products);
        check_with(row, products);
    }
    test_set_products(best);
}

static void check_complete(const void *parameters)
{
    const int n = *(const int *)parameters;
    CHECK(n == WORDS, "%d cases, %d words", n, (int)WORDS);
}

void test_golden_cases(void)
{
    golden_row row;
    char name[GOLDEN_NAME_SIZE];
    int n = 0;
    memset(&row, 0, sizeof row);
    for (row.kind = 0; row.kind < KINDS; row.kind++)
        for (int i = 0; find(i, &row, name); i++, n++) {
            row.wanted = n < WORDS ? goldens[n] : 0; /* a case too many fails */
            test_add(check_golden, &row, sizeof row, "golden/%s", name);
        }
    test_add(check_complete, &n, sizeof n, "golden/complete");
}
