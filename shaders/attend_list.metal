// attend_list: the caller's lists of blocks as attention takes them: without bad entries, and without blocks that the
// query does not see. Nothing else reads the caller's lists. Threadgroups: x rows of the lists.
#include "scan.h"

constant bool has_tree [[function_constant(TQKV_FC_TREE)]];
constant bool batch [[function_constant(TQKV_FC_BATCH)]];
constant uint halves [[function_constant(TQKV_FC_HALVES)]];

inline uint entries_of(constant tqkv__attend_args &args) { return uint(args.list_row) - uint(TQKV__LIST_HEADER); }

// Positions count from the oldest resident one, and blocks from its block: `inside` positions of that are gone.
struct list_range {
    int from, to; // positions that the query looks at, and their blocks [first, last]
    int first, last;
    int recent; // all blocks from here on are seen,
    int newest; // and without a list none before this position
};

// Where the newest positions begin that the query sees whatever its list. They end before `to`.
inline int newest_from(constant tqkv__attend_args &args, device const uint *tree, uint query, int from, int to)
{
    int left = args.list_newest;
    while (has_tree && left > 0 && to > from && to > args.first_of_tree) {
        to--;
        uint bit = uint(to - args.first_of_tree);
        left -= int(tree[query * 2u + bit / 32u] >> (bit % 32u) & 1u);
    }
    return to - from < left ? from : to - left;
}

inline list_range range_of_query(constant tqkv__attend_args &args, device const uint *tree, uint query)
{
    list_range range;
    int end = args.first_newest + int(query) + 1, to = max(min(end, args.kv_len), 0);
    range.from = args.window != 0 ? max(end - args.window, 0) : 0;
    int begin =
        min(halves_begin(args, end - 1), to); // what the query reads here ends or begins with its own newest halves
    if (halves == TQKV__NEWEST_HALVES) range.from = max(range.from, begin);
    range.newest = newest_from(args, tree, query, range.from, to);
    int begins =
        range.newest < to ? range.newest + args.list_inside : to + args.list_inside + (1 << args.list_shift) - 1;
    range.recent = begins >> args.list_shift;
    range.to = min(to, args.slice_end);
    if (halves == TQKV__BEFORE_HALVES) range.to = min(range.to, begin);
    range.to = max(range.to, range.from);
    range.first = (range.from + args.list_inside) >> args.list_shift;
    range.last = (range.to + args.list_inside - 1) >> args.list_shift;
    return range;
}

// An entry so that what comes later and is not larger is bad: -1 ends a row.
inline uint order_of_entry(int entry) { return entry == -1 ? 0x80000000u : entry < 0 ? 0u : uint(entry) + 1u; }

// Copies the good entries of a row that are before `recent`. row: as in tqkv.h, without its header
inline void clean_row(constant tqkv__attend_args &args, thread const scan_place &at, device const int *list,
                      thread const list_range &range, thread uint &n_before, thread bool &has_last,
                      thread bool &has_recent, device int *row)
{
    uint n_threads = at.n_simdgroups * 32u, largest = 0u, last = 0u, recent = 0u;
    for (uint first = 0; first < entries_of(args); first += n_threads) {
        uint i = first + at.simdgroup * 32u + at.lane;
        int entry = i < entries_of(args) ? list[i] : -2;
        uint order = order_of_entry(entry);
        scanned before = max_to_thread(at, order);
        bool good = entry >= 0 && order > max(largest, before.before) && entry >= args.list_first_block;
        int block = good ? entry - args.list_first_block : -1;
        bool kept = good && block >= range.first && block <= range.last && block < range.recent;
        uint counts = (kept ? 1u : 0u) + (kept && block == range.last ? 1u << 16 : 0u); // each at most once in a row
        counts += good && block == range.recent ? 1u << 24 : 0u;
        scanned place = sum_to_thread(at, counts);
        if (kept) row[n_before + (place.before & 0xffffu)] = block;
        n_before += place.all & 0xffffu;
        last += (place.all >> 16) & 0xffu;
        recent += place.all >> 24;
        largest = max(largest, before.all);
    }
    has_last = last != 0;
    has_recent = recent != 0;
}

// list: [n_queries][list_heads][entries], rows: [n_queries][list_heads][list_row], tree: [n_queries][2]
kernel void tqkv_attend_list(constant tqkv__attend_args &call [[buffer(0)]], device const int *list [[buffer(1)]],
                             device int *rows [[buffer(2)]], device const uint *tree [[buffer(3)]],
                             constant tqkv__batch_item *items [[buffer(4)]],
                             threadgroup uint *shared [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                             uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                             uint n_simdgroups [[simdgroups_per_threadgroup]])
{
    uint item = batch ? item_of(items, group.x, TQKV_BY_LIST) : 0u, number = group.x;
    constant tqkv__attend_args &args = batch ? items[item].attend : call;
    if (batch) {
        number -= uint(items[item].first_list);
        list += items[item].list;
        rows += items[item].list_rows;
        tree += items[item].tree;
    }
    scan_place at = {lane, simdgroup, n_simdgroups, shared};
    list_range range = range_of_query(args, tree, number / uint(args.list_heads));
    device int *row = rows + row_offset(number, uint(args.list_row));
    uint n_before = 0u;
    bool has_last = false, has_recent = false;
    clean_row(args, at, list + row_offset(number, entries_of(args)), range, n_before, has_last, has_recent,
              row + TQKV__LIST_HEADER);
    if (simdgroup != 0 || lane != 0) return;
    int size = 1 << args.list_shift, in_last = ((range.to + args.list_inside - 1) & (size - 1)) + 1;
    int n = int(n_before) * size;
    if (range.last >= range.recent)
        n += (range.last - range.recent) * size + in_last;
    else if (has_last)
        n += in_last - size;
    row[0] = range.to > range.from ? n : 0;
    row[1] = int(n_before);
    row[2] = range.recent;
    row[3] = has_recent ? 0 : range.newest;
    row[4] = range.first * size;
}
