/* A second translation unit: the header twice, no implementation. */
#include "tqkv.h"
#include "tqkv.h"

#ifdef TQKV_TABLE
#error "the shared section shows without the implementation"
#endif

int main(void)
{
    float row[32] = {1.0f};
    tqkv_format format = tqkv_format_from_name("tq5");
    int ok = tqkv_rotate(row, 1, 32, TQKV_ROTATED) == TQKV_OK && row[0] < 0.9f;
    ok = ok && tqkv_rotate(row, 1, 32, TQKV_ORIGINAL) == TQKV_OK && row[0] > 0.9f;
    return ok && format == TQKV_TQ5 && tqkv_codes_size(NULL) == 0 ? 0 : 1;
}
