// Which query rows and which tiles of the context a threadgroup of attend works on. Positions are counted from the
// oldest resident one. A tile is a range of 32 slots, not of positions, so a ring does not wrap inside a tile. Only the
// mask knows positions. With page tables a slot here is what it would be in a linear store,
// and a tile lies in one page:
// only tile_memory knows where.
// Pages that end within tiles, and lists, make rows lie anywhere: then each lane finds where one row of the tile is,
// and all read its slot from threadgroup memory, or ask the lane.
// With a list of blocks the positions of the blocks have ranks 0, 1, 2 .., and take the slots from list_base on, one
// after the other: a tile is 32 of these slots, whose rows may lie anywhere. A list of all blocks gives the tiles that
// there are without one.
#ifndef TQKV_TILES_H
#define TQKV_TILES_H
#include "common.h"

constant uint columns [[function_constant(TQKV_FC_COLUMNS)]];
constant bool many_queries [[function_constant(TQKV_FC_MANY_QUERIES)]];
constant bool same_slots [[function_constant(TQKV_FC_SAME_SLOTS)]];
constant bool short_store [[function_constant(TQKV_FC_SHORT_STORE)]];
constant bool paged [[function_constant(TQKV_FC_PAGES)]];
constant bool has_tree [[function_constant(TQKV_FC_TREE)]];
constant bool batch [[function_constant(TQKV_FC_BATCH)]];
constant bool has_list [[function_constant(TQKV_FC_LIST)]];
constant bool small_pages [[function_constant(TQKV_FC_SMALL_PAGES)]];
constant bool tail_elsewhere [[function_constant(TQKV_FC_TAIL_ELSEWHERE)]];
constant uint halves [[function_constant(TQKV_FC_HALVES)]];

// Whether rows of a tile lie anywhere: of the keys and values, and of the tail.
inline bool rows_apart() { return has_list || small_pages; }
inline bool tail_rows_apart() { return rows_apart() || tail_elsewhere; }

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
    if (same_slots || paged) return slot;
    int at = args.value_oldest_slot + max(min(position_of_slot(args, slot), args.slice_end - 1), 0);
    return uint(at < args.value_capacity ? at : at - args.value_capacity);
}

// The tail's slot of a position. Of one that no query sees: any slot of the store.
inline uint tail_slot_of(constant tqkv__attend_args &args, int position)
{
    int at = args.tail_oldest_slot + max(min(position, args.slice_end - 1), 0);
    return uint(at < args.tail_capacity ? at : at - args.tail_capacity);
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

inline query_row next_row(constant tqkv__attend_args &args, query_row row)
{
    row.head++;
    if (row.head < args.group) return row;
    row.head = 0;
    row.query++;
    return row;
}

// The newest position that a query sees; negative if it sees none.
inline int newest_seen(constant tqkv__attend_args &args, int query) { return args.first_newest + query; }

// Whether a query that sees up to `newest` reads a position in this part of the context: of the newest halves those of
// its own, of the codes those before. So what it reads does not depend on the other queries of the call.
inline bool reads_here(constant tqkv__attend_args &args, int newest, int position)
{
    if (halves == TQKV__ALL_POSITIONS) return true;
    bool before = position < halves_begin(args, newest);
    return halves == TQKV__BEFORE_HALVES ? before : !before;
}

// Whether the tree shows a position to the query that sees up to `newest`. tree: [n_queries][2], lower words first
inline bool tree_shows(constant tqkv__attend_args &args, device const uint *tree, int newest, int position)
{
    if (position < args.first_of_tree) return true;
    uint query = uint(newest - args.first_of_tree), bit = uint(position - args.first_of_tree);
    return (tree[query * 2u + bit / 32u] >> (bit % 32u) & 1u) != 0;
}

// A row that attend_list wrote, of the query of a threadgroup.
struct listed_blocks {
    device const int *blocks; // [n_before], then all from `recent` on, whose positions before `hidden` are not seen
    int n_ranks, n_before, recent, hidden;
    int base; // slot of rank 0
};

inline void open_list(constant tqkv__attend_args &args, device const int *rows, uint query, uint kv_head,
                      thread listed_blocks &list)
{
    uint heads = uint(args.list_heads), head = heads > 1u ? kv_head : 0u;
    device const int *row = rows + row_offset(query * heads + head, uint(args.list_row));
    list.blocks = row + TQKV__LIST_HEADER;
    list.n_ranks = row[0];
    list.n_before = row[1];
    list.recent = row[2];
    list.hidden = row[3];
    list.base = args.list_base + row[4];
}

// The position of row `row` of a tile; newer than all queries if it is not seen, or in another tile.
inline int listed_position(constant tqkv__attend_args &args, thread const listed_blocks &list, uint tile, uint row)
{
    uint slots = uint(args.list_slots), slot = (slots < 32u ? 0u : min(tile * 32u, slots - 32u)) + row;
    int rank = int(slot) - list.base;
    if (slot < tile * 32u || rank < 0 || rank >= list.n_ranks) return 0x7fffffff;
    int entry = rank >> args.list_shift, from = entry - list.n_before;
    int block = from < 0 ? list.blocks[entry] : list.recent + from;
    int position = (block << args.list_shift) + (rank & ((1 << args.list_shift) - 1)) - args.list_inside;
    return position < 0 || (from >= 0 && position < list.hidden) ? 0x7fffffff : position;
}

// The tiles of the store that some of the threadgroup's columns sees: [begin, end) without [gap_begin, gap_end). A ring
// that wraps has a gap if its newest positions, in the first slots, do not meet the oldest ones.
struct tile_range {
    uint begin, end, gap_begin, gap_end;
};

inline tile_range tiles_seen(constant tqkv__attend_args &args, uint first_column, thread const listed_blocks &list)
{
    if (has_list) {
        uint first = uint(list.base);
        tile_range listed = {first / 32u, (first + uint(list.n_ranks) + 31u) / 32u, 0u, 0u};
        return listed;
    }
    int last = newest_seen(args, row_of_column(args, first_column + columns - 1u).query);
    int first = newest_seen(args, row_of_column(args, first_column).query), newest = min(last, args.slice_end - 1);
    int oldest = args.window == 0 ? 0 : max(first - args.window + 1, 0);
    if (halves == TQKV__BEFORE_HALVES) newest = min(newest, halves_begin(args, last) - 1);
    if (halves == TQKV__NEWEST_HALVES) oldest = max(oldest, halves_begin(args, first));
    uint capacity = uint(args.key_capacity), slot = uint(args.key_oldest_slot) + uint(oldest);
    slot = slot < capacity ? slot : slot - capacity;
    uint before_end = capacity - slot, n = newest < oldest ? 0u : uint(newest - oldest) + 1u;
    bool wraps = n > before_end;
    tile_range seen;
    seen.begin = wraps ? 0u : slot / 32u;
    seen.end = n == 0 ? seen.begin : ((wraps ? capacity : slot + n) + 31u) / 32u;
    seen.gap_begin = wraps ? (n - before_end + 31u) / 32u : 0u;
    seen.gap_end = wraps ? max(slot / 32u, seen.gap_begin) : 0u;
    return seen;
}

// The first tile from `tile` on that is the simdgroup's. The number of a tile decides that alone, so a row's sums do
// not depend on what the threadgroup's other columns see.
inline uint own_tile(uint tile, uint simdgroup, uint n_simdgroups)
{
    return tile + (simdgroup + n_simdgroups - tile % n_simdgroups) % n_simdgroups;
}

inline uint stretch_of_tile(constant tqkv__attend_args &args, uint tile)
{
    return TQKV__STRETCH_OF_TILE(tile, uint(args.stretch_tiles), uint(args.n_short));
}

inline uint first_tile_of_stretch(constant tqkv__attend_args &args, uint stretch)
{
    uint n_short = min(stretch, uint(args.n_short));
    return (n_short + (stretch - n_short) * TQKV__STRETCH_GROWTH) * uint(args.stretch_tiles);
}

// The stretches that a threadgroup sums up, [begin, end): at least one, perhaps without a tile that it sees.
struct stretch_range {
    uint begin, end;
};

inline stretch_range stretches_of_threadgroup(constant tqkv__attend_args &args, tile_range seen, uint split)
{
    stretch_range own;
    own.begin = uint(args.first_stretch) + split;
    own.end = own.begin + 1u;
    if (args.sections_each == 0) return own;
    own.begin = (uint(args.first_stretch) / TQKV__SECTION + split * uint(args.sections_each)) * TQKV__SECTION;
    own.end = own.begin + 1u;
    uint limit = own.begin + uint(args.sections_each) * TQKV__SECTION, first = stretch_of_tile(args, seen.begin);
    uint end = seen.begin < seen.end ? stretch_of_tile(args, seen.end - 1u) + 1u : 0u;
    if (first >= limit || end <= own.begin) return own;
    own.begin = max(own.begin, first);
    own.end = min(limit, end);
    return own;
}

// A tile always loads 32 rows. The last tile of the store is moved back to end with it: its first rows then belong to
// the tile before. The rows that a short store lacks belong to no tile.
inline uint first_slot_of_tile(constant tqkv__attend_args &args, uint number)
{
    return short_store && args.key_capacity < 32 ? 0u : min(number * 32u, uint(args.key_capacity) - 32u);
}

// The position of a tile's row; newer than all queries if the row belongs to another tile or slice.
inline int position_in_tile(constant tqkv__attend_args &args, uint number, uint row)
{
    uint first = first_slot_of_tile(args, number);
    int position = position_of_slot(args, first + existing_row(args, row));
    bool own = first + row >= number * 32u && first + row < uint(args.key_capacity) && position < args.slice_end;
    return own ? position : 0x7fffffff;
}

// The tiles of one simdgroup, one after another.
struct tile_steps {
    uint tile;                 // the next one
    uint gap_begin, after_gap; // from gap_begin on it goes on with tile after_gap
};

inline uint step_over(uint tile, uint gap_begin, uint after_gap)
{
    return tile < gap_begin ? tile : max(tile, after_gap);
}

// From the first tile of the stretches on.
inline tile_steps open_steps(constant tqkv__attend_args &args, tile_range seen, stretch_range own, uint simdgroup,
                             uint n_simdgroups)
{
    tile_steps steps;
    uint first = own_tile(max(seen.begin, first_tile_of_stretch(args, own.begin)), simdgroup, n_simdgroups);
    steps.gap_begin = seen.gap_begin;
    steps.after_gap = own_tile(seen.gap_end, simdgroup, n_simdgroups);
    steps.tile = step_over(first, steps.gap_begin, steps.after_gap);
    return steps;
}

inline void next_tile(thread tile_steps &steps, uint n_simdgroups)
{
    steps.tile = step_over(steps.tile + n_simdgroups, steps.gap_begin, steps.after_gap);
}

// The sums of a stretch go to the partial result of its section and, at the section's end, with those to the result of
// all, partial result 0. So every way to share the stretches among threadgroups does the same
// additions in the same order.
inline uint partial_of_section(constant tqkv__attend_args &args, uint split)
{
    return args.sections_each > 1 ? 1u : split;
}

// Then the sums are copied, not added.
inline bool begins_section(stretch_range own, uint stretch)
{
    return stretch == own.begin || stretch % TQKV__SECTION == 0;
}

// Whether the section ends and is not itself the result of all.
inline bool ends_section(constant tqkv__attend_args &args, stretch_range own, uint stretch)
{
    bool last = stretch + 1u == own.end || (stretch + 1u) % TQKV__SECTION == 0;
    return args.sections_each > 1 && last;
}

// Then the section is copied to the result of all, not added.
inline bool in_first_section(stretch_range own, uint stretch)
{
    return stretch / TQKV__SECTION == own.begin / TQKV__SECTION;
}

// Lists of slots that a tile has where its rows lie apart: of keys and, if they differ, of values and of the tail.
inline uint slot_lists() { return uint(TQKV__SLOT_LISTS(rows_apart(), same_slots, tail_elsewhere)); }

struct page_tables {
    device const int *keys, *values; // [n_pages]
    listed_blocks list;
    uint lane;
    bool shared, shared_values; // slots go through `slots`: shuffles by differing lanes are slow on Apple's GPUs
    threadgroup uint *slots;    // [2][slot_lists()][32]: of two tiles of the simdgroup, one after the other
};

// Slots in memory of a tile's row 0. That of the values is theirs only where value_slot_of gives the slot itself. Where
// rows lie apart those of the row with the lane's number, or after share_slots where their list begins; with a list of
// blocks also the row's position. The tail's: that of the keys or, if it lies elsewhere, likewise.
struct tile_memory {
    uint keys, values;
    int position;
    uint tail;
};

// Where rows lie apart, the slot of one. All lanes of the simdgroup must come here together.
inline uint slot_apart(thread const page_tables &pages, bool shared, uint base, uint row)
{
    return shared ? pages.slots[base + row] : simd_shuffle(base, ushort(row));
}

// Slots in memory of a row of a tile. apart: rows_apart() or, of a tail, tail_rows_apart(). As slot_apart.
inline uint key_slot(constant tqkv__attend_args &args, thread const page_tables &pages, bool apart, uint base, uint row)
{
    return apart ? slot_apart(pages, pages.shared, base, row) : base + existing_row(args, row);
}

inline uint value_slot(constant tqkv__attend_args &args, thread const page_tables &pages, uint base, uint row)
{
    if (rows_apart()) return slot_apart(pages, pages.shared_values, base, row);
    return value_slot_of(args, base + existing_row(args, row));
}

// Codes of such a row, of `bytes` each. As one sum, so that the part of all rows is computed once.
inline device const uchar *key_codes(constant tqkv__attend_args &args, thread const page_tables &pages, bool apart,
                                     device const uchar *codes, uint bytes, uint base, uint row)
{
    if (apart) return codes + ulong(slot_apart(pages, pages.shared, base, row)) * ulong(bytes);
    return codes + ulong(base) * ulong(bytes) + existing_row(args, row) * bytes;
}

inline device const uchar *value_codes(constant tqkv__attend_args &args, thread const page_tables &pages,
                                       device const uchar *codes, uint bytes, uint base, uint row)
{
    if (rows_apart() || !(same_slots || paged)) return codes + ulong(value_slot(args, pages, base, row)) * ulong(bytes);
    return codes + ulong(base) * ulong(bytes) + existing_row(args, row) * bytes;
}

// A tile is opened before it is known whether some query sees it: its entry may be anything.
inline uint slot_in_pages(device const int *pages, int page_size, uint factor, int shift, int last_page, uint tile)
{
    uint at = uint((ulong(tile) * ulong(factor)) >> 32) >> uint(shift);
    uint page = min(uint(pages[at]), uint(last_page));
    return (page - at) * uint(page_size) + tile * 32u;
}

// Through the tables: where the rows of the tile with slot `first` begin.
inline tile_memory find_in_pages(constant tqkv__attend_args &args, thread const page_tables &pages, uint first)
{
    tile_memory result = {0u, 0u, 0, 0u};
    result.keys = slot_in_pages(pages.keys, args.key_page_size, args.key_page_factor, args.key_page_shift,
                                args.key_last_page, first / 32u);
    first = min(first, uint(args.value_capacity) - 32u); // a longer table of the keys
    result.values = same_slots ? result.keys
                               : slot_in_pages(pages.values, args.value_page_size, args.value_page_factor,
                                               args.value_page_shift, args.value_last_page, first / 32u);
    return result;
}

// The slot in memory of one slot of a linear store.
inline uint slot_of_row(device const int *pages, int page_size, int last_page, uint slot)
{
    uint size = uint(page_size), page = min(uint(pages[slot / size]), uint(last_page));
    return page * size + slot % size;
}

// Through the tables: where a row lies. row: of its tile
inline tile_memory find_row(constant tqkv__attend_args &args, thread const page_tables &pages, uint slot, uint row)
{
    tile_memory result = {0u, 0u, 0, 0u};
    if (small_pages) {
        result.keys = slot_of_row(pages.keys, args.key_page_size, args.key_last_page, slot);
        slot = min(slot, uint(args.value_capacity) - 1u);
        result.values =
            same_slots ? result.keys : slot_of_row(pages.values, args.value_page_size, args.value_last_page, slot);
    } else {
        result = find_in_pages(args, pages, slot - row);
        result.keys += row;
        result.values += row;
    }
    return result;
}

// The keys' slot of a position in a list. One that is not seen lies where the oldest position does.
inline uint listed_slot(constant tqkv__attend_args &args, int position)
{
    uint slot = uint(args.key_oldest_slot) + (position == 0x7fffffff ? 0u : uint(position));
    return slot < uint(args.key_capacity) ? slot : slot - uint(args.key_capacity);
}

// Without the tail. Where rows lie apart, of the row with the lane's number.
inline tile_memory find_keys(constant tqkv__attend_args &args, thread const page_tables &pages, uint number)
{
    int position = has_list ? listed_position(args, pages.list, number, pages.lane) : 0;
    uint slot = has_list ? listed_slot(args, position) : first_slot_of_tile(args, number);
    if (small_pages && !has_list) slot += existing_row(args, pages.lane);
    tile_memory result = {slot, slot, 0, 0u};
    if (paged)
        result = find_row(args, pages, slot, has_list ? slot % 32u : 0u);
    else if (has_list)
        result.values = value_slot_of(args, slot);
    result.position = position;
    return result;
}

inline tile_memory find_tile(constant tqkv__attend_args &args, thread const page_tables &pages, uint number)
{
    tile_memory result = find_keys(args, pages, number);
    result.tail = result.keys;
    if (!tail_elsewhere) return result;
    uint slot = first_slot_of_tile(args, number) + existing_row(args, pages.lane);
    result.tail = tail_slot_of(args, has_list ? result.position : position_of_slot(args, slot));
    return result;
}

// The tiles of a simdgroup one after another, where their slots are shared:
// what lanes found of the one behind the next.
// So nothing waits for tables and lists when it is stored.
struct tile_search {
    tile_memory ahead;
    uint parity; // of the next tile's memory of slots
};

inline bool shares_slots(thread const page_tables &pages) { return pages.shared && tail_rows_apart(); }

// Stores what the lanes found of a tile for all to read. parity: 0 or 1, another one than that of the tile before,
// which may be in use still.
inline tile_memory share_slots(thread const page_tables &pages, tile_memory found, uint parity)
{
    const uint first = parity * slot_lists() * 32u, last = first + (slot_lists() - 1u) * 32u;
    tile_memory result = found;
    simdgroup_barrier(mem_flags::mem_threadgroup); // the tile before that one is done
    if (rows_apart()) {
        result.keys = result.tail = first;
        result.values = same_slots ? first : first + 32u;
        pages.slots[result.keys + pages.lane] = found.keys;
        if (!same_slots) pages.slots[result.values + pages.lane] = found.values;
    }
    if (tail_elsewhere) {
        result.tail = last;
        pages.slots[last + pages.lane] = found.tail;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    return result;
}

// The memory of the next tile.
inline tile_memory find_next(constant tqkv__attend_args &args, thread const page_tables &pages, tile_steps steps,
                             uint n_simdgroups, thread tile_search &search)
{
    if (!shares_slots(pages)) return find_tile(args, pages, steps.tile);
    search.parity = 1u - search.parity;
    tile_memory result = share_slots(pages, search.ahead, search.parity);
    next_tile(steps, n_simdgroups);
    search.ahead = find_tile(args, pages, steps.tile);
    return result;
}

// Likewise, of the first one.
inline tile_memory find_first(constant tqkv__attend_args &args, thread const page_tables &pages, tile_steps steps,
                              uint n_simdgroups, thread tile_search &search)
{
    search.parity = 1u;
    if (shares_slots(pages)) search.ahead = find_tile(args, pages, steps.tile);
    return find_next(args, pages, steps, n_simdgroups, search);
}

// The position of row `row` of a tile that was found; newer than all queries if it belongs to another tile.
inline int position_of_row(constant tqkv__attend_args &args, tile_memory base, uint number, uint row)
{
    return has_list ? int(simd_shuffle(uint(base.position), ushort(row))) : position_in_tile(args, number, row);
}

struct tile_place {
    tile_memory base;
    uint row;     // of this lane
    int position; // of the lane's row
};

// base: of tile `number`
inline tile_place open_tile(constant tqkv__attend_args &args, tile_memory base, uint number, uint row)
{
    tile_place result;
    result.base = base;
    result.row = row;
    result.position = position_of_row(args, base, number, row);
    return result;
}

#endif
