// index_choice: the blocks with the best scores, ascending. Threadgroups: x chunks of a row of scores, y queries.
#include "index_choice.h"

// scores: [n_queries][n_blocks], list: [n_queries][k]
kernel void tqkv_index_choice(constant tqkv__choose_args &args [[buffer(0)]], device const float *scores [[buffer(1)]],
                              device uint *scratch [[buffer(2)]], device int *list [[buffer(3)]],
                              threadgroup uint *bins [[threadgroup(0)]], threadgroup uint *shared [[threadgroup(1)]],
                              uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]],
                              uint n_simdgroups [[simdgroups_per_threadgroup]])
{
    choose_task task;
    task.scores = scores + row_offset(group.y, uint(args.n_blocks));
    uint n_chunks = args.step == TQKV__CHOOSE_ALONE ? 0u : uint(args.n_chunks);
    task.counts = scratch + ulong(group.y) * TQKV__CHOOSE_SCRATCH(ulong(n_chunks), ulong(args.n_blocks - args.from));
    task.sums = task.counts + n_chunks * uint(TQKV__CHOOSE_COUNTS);
    task.header = task.sums + n_chunks * uint(TQKV__CHOOSE_SUMS);
    task.gathered = task.header + TQKV__CHOOSE_HEADER;
    task.list = list + row_offset(group.y, uint(args.k));
    task.bins = bins;
    task.chunk = group.x;
    task.seen = blocks_seen(keys_seen(args.seen, args.seen_rest, args.ratio, args.end, group.y), uint(args.block));
    task.first = task.n = 0u;
    task.at.lane = lane;
    task.at.simdgroup = simdgroup;
    task.at.n_simdgroups = n_simdgroups;
    task.shared = shared;
    task.at.shared = shared + 2 * TQKV__CHOOSE_SUMS;
    choose_blocks(args, task);
}
