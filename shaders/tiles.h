// Which query rows and which tiles of the context a threadgroup of attend works on. Positions are counted from the
// oldest resident one. A tile is a range of 32 slots, not of positions, so a ring does not wrap inside a tile. Only the
// mask knows positions.
#ifndef TQKV_TILES_H
#define TQKV_TILES_H
#include "common.h"

constant uint columns [[function_constant(TQKV_FC_COLUMNS)]];
constant bool many_queries [[function_constant(TQKV_FC_MANY_QUERIES)]];
constant bool same_slots [[function_constant(TQKV_FC_SAME_SLOTS)]];
constant bool short_store [[function_constant(TQKV_FC_SHORT_STORE)]];

inline int position_of_slot(constant tqkv__attend_args &args, uint slot)
{
    int position = int(slot) - args.key_oldest_slot;
    return position < 0 ? position + args.key_capacity : position;
}

// Row r of a tile, or the last row of a store that is shorter than a tile.
inline uint existing_row(constant tqkv__attend_args &args, uint r)
{
    return short_store ? min(r, uint(args.key_capacity) - 1u) : r;
}

// The values' slot of the position at this slot of the keys. Where the slot has no position: any slot of the store.
inline uint value_slot_of(constant tqkv__attend_args &args, uint slot)
{
    if (same_slots) return slot;
    int at = args.value_oldest_slot + min(position_of_slot(args, slot), args.kv_len - 1);
    return uint(at < args.value_capacity ? at : at - args.value_capacity);
}

// The query row of a column. A column beyond the last row repeats the last row, and is not written.
struct query_row {
    int query, head; // head of the group
};

inline query_row row_of_column(constant tqkv__attend_args &args, uint column)
{
    uint row = min(column, uint(args.n_queries) * uint(args.group) - 1u);
    query_row result;
    result.query = many_queries ? int(row / uint(args.group)) : 0;
    result.head = many_queries ? int(row % uint(args.group)) : int(row);
    return result;
}

// The newest position that a query sees; negative if it sees none.
inline int newest_seen(constant tqkv__attend_args &args, int query) { return args.kv_len - args.n_queries + query; }

// The tiles of a split, [begin, end). Tile 0 holds the oldest position that the threadgroup's columns see.
struct tile_range {
    uint begin, end;
    uint first; // number of tile 0 in the store
    uint total; // tiles of the store; after the last comes the first
};

inline tile_range tiles_of_split(constant tqkv__attend_args &args, uint first_column, uint split)
{
    int newest = newest_seen(args, row_of_column(args, first_column + columns - 1u).query);
    int oldest = newest_seen(args, row_of_column(args, first_column).query) - args.window + 1;
    if (args.window == 0 || oldest < 0) oldest = 0;
    tile_range range;
    uint capacity = uint(args.key_capacity), slot = uint(args.key_oldest_slot) + uint(oldest);
    slot = slot < capacity ? slot : slot - capacity;
    uint before_end = capacity - slot, n = newest < oldest ? 0u : uint(newest - oldest) + 1u;
    range.first = slot / 32u;
    range.total = (capacity + 31u) / 32u;
    uint wrapped = range.total - range.first + (n - before_end + 31u) / 32u;
    uint count = n <= before_end ? (slot % 32u + n + 31u) / 32u : min(wrapped, range.total);
    count = n == 0 ? 0u : count;
    range.begin = uint(ulong(count) * ulong(split) / ulong(args.n_splits));
    range.end = uint(ulong(count) * ulong(split + 1u) / ulong(args.n_splits));
    return range;
}

struct tile_place {
    uint base;    // slot of the tile's row 0
    uint row;     // of this lane
    uint slot;    // of the lane's row
    int position; // of the lane's row; newer than all queries if the row belongs to another tile
};

// A tile always loads 32 rows. The last tile of the store is moved back to end with it: its first rows then belong to
// the tile before. The rows that a short store lacks belong to no tile.
inline tile_place open_tile(constant tqkv__attend_args &args, tile_range range, uint number, uint row)
{
    uint nth = range.first + number, start = (nth < range.total ? nth : nth - range.total) * 32u;
    tile_place result;
    result.base = short_store ? 0u : min(start, uint(args.key_capacity) - 32u);
    result.row = row;
    result.slot = result.base + existing_row(args, row);
    bool own = result.base + row >= start && result.base + row < uint(args.key_capacity);
    result.position = own ? position_of_slot(args, result.slot) : 0x7fffffff;
    return result;
}

#endif
