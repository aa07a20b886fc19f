/* Prints a hash of the codes and norms of each format, which compile.sh compares between compiler flags,
 * and the set in use. */
#define TQKV_IMPLEMENTATION
#include "tqkv.h"
#include <stdio.h>

int main(void)
{
    enum { ROWS = 100 };
    static float x[ROWS * TQKV_MAX_HEAD_DIM], norms[ROWS * 8];
    static unsigned char codes[ROWS * TQKV_MAX_HEAD_DIM * 2];
    uint32_t random = 1;
    for (int i = 0; i < ROWS * TQKV_MAX_HEAD_DIM; i++) {
        random = random * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)random * (1.0f / 1073741824.0f); /* exact: the same under all flags */
    }
    for (int f = TQKV_F16; f <= (int)TQKV_TQ2; f++)
        for (int d = 32; d <= TQKV_MAX_HEAD_DIM; d += 16) {
            tqkv_store s;
            memset(&s, 0, sizeof s);
            s.format = (tqkv_format)f;
            s.head_dim = d;
            s.n_kv_heads = 1;
            s.capacity = ROWS;
            if (tqkv_codes_size(&s) == 0) continue; /* no head_dim */
            s.codes = codes;
            s.codes_size = sizeof codes;
            s.norms = norms;
            s.norms_size = sizeof norms;
            if (tqkv_encode(&s, x, ROWS, 0) != TQKV_OK) return 1;
            printf("%s %d %016llx %016llx\n", tqkv_format_name(s.format), d,
                   (unsigned long long)XXH3_64bits(codes, tqkv_codes_size(&s)),
                   (unsigned long long)XXH3_64bits(norms, tqkv_norms_size(&s)));
        }
    fprintf(stderr, "%s\n", tqkv_isa_name());
    return 0;
}
