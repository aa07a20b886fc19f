/* Prints tests/goldens.h or, given an argument, tests/attend_goldens.h; `make goldens` runs it. */
#define TQKV_IMPLEMENTATION
#include "attend_golden.h"

enum { WORDS_OF_A_LINE = 9 };

/* Begins a line for a new block, with its name, and for every ninth word. */
static void print_word(uint32_t word, const char *block)
{
    static char last[GOLDEN_NAME_SIZE];
    static int n;
    const int is_new = strcmp(last, block) != 0;
    if (is_new) n = 0;
    if (is_new) printf("%s    /* %s */\n", last[0] ? "\n" : "", block);
    printf("%s0x%08x,", n % WORDS_OF_A_LINE ? " " : n ? "\n    " : "    ", word);
    snprintf(last, sizeof last, "%s", block);
    n++;
}

static int print_codes(void)
{
    golden_case c = golden_first;
    golden_pair p;
    golden made;
    char name[GOLDEN_NAME_SIZE];
    while (golden_next(&c)) {
        if (!golden_make(&c, &made)) return 1;
        snprintf(name, sizeof name, "%s%s", tqkv_format_name((tqkv_format)c.format), golden_suffix(&c));
        print_word(golden_word(&made), name);
    }
    printf("\n};\n\n/* What tqkv_store_convert writes. */\nstatic const uint32_t conversion_goldens[] = {");
    for (int i = 0; golden_pair_find(i, &p); i++) {
        if (!golden_pair_make(&p, &made)) return 1;
        print_word(golden_word(&made), p.head_dim == 80 ? "head_dim 80" : "head_dim 512");
    }
    return 0;
}

static int print_outputs(void)
{
    attend_golden_case c;
    uint32_t word;
    for (int i = 0; attend_golden_find(i, &c); i++) {
        if (!attend_golden_make(&c, &word)) return 1;
        print_word(word, attend_golden_option_name(c.option));
    }
    return 0;
}

int main(int argc, char **argv)
{
    (void)argv;
    printf("/* Made by tests/make_goldens.c (make goldens): a word of the hashes of every case in %sgolden.h, in its "
           "order. "
           "*/\n// clang-format off\nstatic const uint32_t %sgoldens[] = {\n",
           argc > 1 ? "attend_" : "", argc > 1 ? "attend_" : "");
    const int failed = argc > 1 ? print_outputs() : print_codes();
    printf("\n};\n");
    return failed;
}
