/* A state of llama.cpp is rows of halves, as its own cache has them: it loads into tqkv, and one of tqkv into it. What
 * it would lose, which rows are exact and in which order they came, is in the lowest bits of the first 64 values of a
 * row: a change of at most 1/1024 of a value. A row that came from codes is encoded to the same codes again. */
#pragma once
#include <cstddef>
#include <cstdint>

namespace tqkv_llama
{

struct row_tag {
    uint32_t order = 0; /* later rows of a sequence have larger ones; 0: the row has no tag */
    bool exact = true;  /* it is a half, not decoded from codes */
};

enum { TAG_VALUES = 64, TAG_CHECK = 0x5a17 };

/* Of the order and all bits of the row but those that the tag takes. */
inline uint32_t row_check(const uint16_t *row, size_t n, uint32_t order, bool exact)
{
    uint32_t h = TAG_CHECK + order * 2654435761u + exact;
    for (size_t i = 0; i < n; i++) h = (h ^ (i < TAG_VALUES ? row[i] & 0xfffeu : row[i])) * 16777619u;
    return (h ^ h >> 15) & 0x7fffffffu;
}

inline void write_tag(uint16_t *row, size_t n, row_tag tag)
{
    if (n < TAG_VALUES || tag.order == 0) return;
    const uint64_t bits =
        (uint64_t)tag.order << 32 | (uint64_t)tag.exact << 31 | row_check(row, n, tag.order, tag.exact);
    for (int i = 0; i < TAG_VALUES; i++) row[i] = (uint16_t)((row[i] & 0xfffe) | (bits >> i & 1));
}

inline row_tag read_tag(const uint16_t *row, size_t n)
{
    uint64_t bits = 0;
    for (int i = 0; i < TAG_VALUES && n >= TAG_VALUES; i++) bits |= (uint64_t)(row[i] & 1) << i;
    const row_tag tag = {(uint32_t)(bits >> 32), (bits >> 31 & 1) != 0};
    const bool valid = tag.order > 0 && row_check(row, n, tag.order, tag.exact) == (bits & 0x7fffffffu);
    return valid ? tag : row_tag();
}

} // namespace tqkv_llama
