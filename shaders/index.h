// What a query of an index sees.
#ifndef TQKV_INDEX_H
#define TQKV_INDEX_H
#include "common.h"

// How many keys from key 0 on query `query` sees, resident or not.
inline uint keys_seen(int seen, int rest, int ratio, int end, uint query)
{
    uint more = uint(rest) + query; // a division takes tens of instructions
    long keys = long(seen) + long(ratio == 1 ? more : more / uint(ratio));
    return keys < 0 ? 0u : keys < long(end) ? uint(keys) : uint(end);
}

inline uint blocks_seen(uint keys, uint block)
{
    return block == 1u ? keys : keys / block + (keys % block != 0u ? 1u : 0u);
}

#endif
