// Strands, for short contexts, whose stretches alone leave most of a GPU idle. A strand is what one simdgroup of a
// stretch's threadgroup adds up: the tiles whose numbers have the same rest, four of them. A threadgroup that has only
// a strand gives each simdgroup one of its tiles to score. Then they agree on the maxima, leave the weights in
// threadgroup memory, and each adds up its part of the values over all tiles, one after another. So its sums have the
// bits that one simdgroup gives them, and attend_merge adds strands up as the end of a stretch does: how a call is
// divided changes no bit.
#ifndef TQKV_STRAND_H
#define TQKV_STRAND_H
#include "attend.h"

// The tiles of a strand, `first` and each n_simdgroups behind it, without those that no column sees.
struct strand_tiles {
    uint first;
    tile_range seen;
};

inline bool has_tile(strand_tiles tiles, uint tile)
{
    bool inside = tile >= tiles.seen.begin && tile < tiles.seen.end;
    return inside && (tile < tiles.seen.gap_begin || tile >= tiles.seen.gap_end);
}

inline strand_tiles open_strand(constant tqkv__attend_args &args, tile_range seen, stretch_range own, uint strand)
{
    strand_tiles tiles;
    tiles.first = first_tile_of_stretch(args, own.begin) + strand;
    tiles.seen = seen;
    return tiles;
}

// What a threadgroup adds up: stretches or, if it is `alone` with it, a strand of one. A pipeline that has fewer
// simdgroups than a stretch has strands adds up other tiles in each: then the threadgroup of the first strand has the
// whole stretch, and the others are `idle`: they add nothing. Likewise where it is not `able` to have strands.
struct threadgroup_tiles {
    stretch_range own;
    strand_tiles strand;
    bool alone, idle;
};

inline threadgroup_tiles open_threadgroup(constant tqkv__attend_args &args, thread const attend_task &task,
                                          tile_range seen, bool able)
{
    const bool shared = has_strands && args.strands > 1;
    const uint number = shared ? task.split % uint(TQKV__STRANDS) : 0u;
    threadgroup_tiles tiles;
    tiles.own = stretches_of_threadgroup(args, seen, shared ? task.split / uint(TQKV__STRANDS) : task.split);
    tiles.strand = open_strand(args, seen, tiles.own, number);
    tiles.alone = able && shared && task.n_simdgroups == uint(TQKV__STRANDS);
    tiles.idle = number != 0u && !tiles.alone;
    return tiles;
}

// Finds the simdgroup's first tile.
inline tile_memory find_begin(constant tqkv__attend_args &args, thread const attend_task &task, tile_range seen,
                              thread const threadgroup_tiles &tiles, thread tile_steps &steps,
                              thread tile_search &search)
{
    if (tiles.alone) {
        steps.tile = tiles.strand.first + task.simdgroup * uint(TQKV__STRANDS);
        return find_one(args, task.pages, steps.tile);
    }
    steps = open_steps(args, seen, tiles.own, task.simdgroup, task.n_simdgroups);
    return find_first(args, task.pages, steps, task.n_simdgroups, search);
}

// ---- Maxima: raised by the tiles one after another, as if one simdgroup had them all ----

// The largest scores of a column in the tiles, `step` numbers apart.
struct tile_maxima {
    threadgroup const float *largest;
    uint step;
};

// The maximum of the column once the first n tiles have raised it.
inline float maximum_after(tile_maxima maxima, uint n)
{
    float maximum = NOTHING_SEEN;
    TQKV_UNROLL
    for (uint i = 0; i < uint(TQKV__STRANDS); i++) {
        float raised = raised_maximum(maximum, maxima.largest[i * maxima.step]);
        maximum = i < n ? raised : maximum;
    }
    return maximum;
}

// What the sums of the tiles before tile i are multiplied by.
inline float shrink_before(tile_maxima maxima, int i)
{
    float before = maximum_after(maxima, uint(i));
    return i == 0 ? 1.0f : share_of(before, raised_maximum(before, maxima.largest[uint(i) * maxima.step]));
}

// ---- Values ----

// Where the values of the tiles are: slots as in tile_memory. Shared ones each simdgroup has stored of its own tile: a
// barrier must precede what reads them.
struct strand_slots {
    uint base[TQKV__STRANDS];
};

inline strand_slots find_strand(constant tqkv__attend_args &args, thread const attend_task &task,
                                thread const strand_tiles &tiles)
{
    strand_slots slots;
    TQKV_UNROLL
    for (uint i = 0; i < uint(TQKV__STRANDS); i++)
        slots.base[i] = task.pages.shared && rows_apart()
                            ? (2u * i * slot_lists() + (same_slots ? 0u : 1u)) * 32u
                            : find_tile(args, task.pages, tiles.first + i * uint(TQKV__STRANDS)).values;
    return slots;
}

#endif
