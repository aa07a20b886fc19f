/* Prints tests/goldens.h; `make goldens` runs it. */
#include "test_golden.c"

enum { WORDS_OF_A_LINE = 9 };

/* Begins a block for each new last part of a name. */
int main(void)
{
    char name[GOLDEN_NAME_SIZE], block[GOLDEN_NAME_SIZE] = "";
    golden_row row;
    printf("/* Made by tests/make_goldens.c (make goldens): a word of the hash of every case, in the order of "
           "test_golden.c. */\n// clang-format off\nstatic const uint32_t goldens[] = {");
    for (row.kind = 0; row.kind < KINDS; row.kind++)
        for (int i = 0, n = 0; find(i, &row, name); i++) {
            uint32_t word;
            if (!make(&row, &word)) return 1;
            if (strcmp(block, strrchr(name, '/')) != 0) printf("\n    /* %s */", strrchr(name, '/') + 1), n = 0;
            printf("%s0x%08x,", n++ % WORDS_OF_A_LINE ? " " : "\n    ", word);
            snprintf(block, sizeof block, "%s", strrchr(name, '/'));
        }
    return puts("\n};") < 0;
}
