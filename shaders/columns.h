// The columns of a threadgroup of attention: what it keeps of them in threadgroup memory, and how the sums of its
// simdgroups become one at the end of a stretch. attend.h and matrix_columns.h have what depends on how a
// lane holds them.
#ifndef TQKV_COLUMNS_H
#define TQKV_COLUMNS_H
#include "attend_task.h"
#include "softmax.h"

// Threadgroup memory of columns: TQKV__COLUMN_BYTES.
struct column_memory {
    uint n;                              // columns that there is room for
    threadgroup float *kept;             // [2][n][2]: maximum and sum of the section so far, and of all before it
    threadgroup float *shares;           // [n][4]: what the sums of the section so far are multiplied by, those of the
                                         // stretch, of the earlier sections and of the section
    threadgroup float *shifts, *factors; // [n]: of the queries. attend has no factors
    threadgroup float *tails;            // [n]: what products of the tail are multiplied by, over `factors`
    threadgroup float *totals;           // [n][2]: maximum and sum
    threadgroup uint *rows;              // [n]: row in a partial result
};

inline column_memory column_memory_of(threadgroup float *numbers, uint n)
{
    column_memory memory;
    memory.n = n;
    memory.kept = numbers;
    memory.shares = memory.kept + 4u * n;
    memory.shifts = memory.shares + 4u * n;
    memory.factors = memory.shifts + n;
    memory.tails = memory.factors + n;
    memory.totals = memory.tails + n;
    threadgroup float *rows = memory.totals + 2u * n;
    memory.rows = (threadgroup uint *)rows;
    return memory;
}

// Where the row of a query row is in a partial result.
inline uint partial_row(constant tqkv__attend_args &args, query_row row, uint head)
{
    return uint(row.query) * uint(args.n_kv_heads) * uint(args.group) + head;
}

// The end of the columns that there are. Without a list it is computed where it is needed: nvcc keeps task.end_column
// in a register over all tiles, and spills others.
inline uint end_of_columns(constant tqkv__attend_args &args, thread const attend_task &task)
{
    return has_list ? task.end_column : uint(args.n_queries) * uint(args.group);
}

// Where the sums of a stretch's columns go.
struct column_end {
    uint used;                    // columns
    ulong section;                // distance of the section's partial result from the first
    bool copy;                    // the section begins
    bool to_total, copy_to_total; // it ends, and is added or copied to the first
};

inline column_end open_end(constant tqkv__attend_args &args, thread const attend_task &task, stretch_range own,
                           uint stretch, uint D)
{
    uint rows = uint(args.n_queries) * uint(args.group);
    column_end how;
    how.used = min(uint(columns), end_of_columns(args, task) - task.first_column);
    how.section = row_offset(partial_of_section(args, task.split), rows * uint(args.n_kv_heads)) * ulong(D);
    how.copy = begins_section(own, stretch);
    how.to_total = ends_section(args, own, stretch);
    how.copy_to_total = in_first_section(own, stretch);
    return how;
}

// Adds maximum and sum of a column to those of the kept ones, [2].
// The two factors of the columns' sums go to `factors`.
inline void add_column(bool copy, threadgroup float *kept, threadgroup float *total, threadgroup float *factors)
{
    shares both = shares_of(copy ? -INFINITY : kept[0], total[0]);
    float sum = fma(both.added, total[1], copy ? 0.0f : both.kept * kept[1]);
    factors[0] = both.kept;
    factors[1] = both.added;
    total[0] = kept[0] = both.largest;
    total[1] = kept[1] = sum;
}

// Simdgroups whose states or sums are loaded together, so that one load does not wait for another.
#define STATES_LOADED 4

// Maxima and sums of a column in the simdgroups from `first` on; those of one that there is not are nothing.
struct loaded_states {
    float maxima[STATES_LOADED], sums[STATES_LOADED];
};

inline loaded_states load_states(thread const attend_task &task, uint c, uint n, uint first)
{
    loaded_states states;
    TQKV_UNROLL
    for (uint i = 0; i < uint(STATES_LOADED); i++) {
        threadgroup const float *from = task.states + (min(first + i, task.n_simdgroups - 1u) * n + c) * 2u;
        bool exists = first + i < task.n_simdgroups;
        states.maxima[i] = exists ? from[0] : -INFINITY;
        states.sums[i] = exists ? from[1] : 0.0f;
    }
    return states;
}

// Maximum and sum of a column, and all factors of its sums. task.states has those of the simdgroups,
// [n_simdgroups][n][2]; what their sums are multiplied by takes the place of the maxima. S: most simdgroups
template <int S>
inline void combine_states(thread const attend_task &task, uint c, column_memory memory, column_end how)
{
    const uint n = memory.n, B = uint(STATES_LOADED);
    threadgroup float *total = memory.totals + c * 2u, *factors = memory.shares + c * 4u;
    float largest = -INFINITY, sum = 0.0f;
    for (uint first = 0; first < uint(S) && first < task.n_simdgroups; first += B) {
        loaded_states states = load_states(task, c, n, first);
        TQKV_UNROLL
        for (uint i = 0; i < B; i++) largest = max(largest, states.maxima[i]);
    }
    for (uint first = 0; first < uint(S) && first < task.n_simdgroups; first += B) {
        loaded_states states = load_states(task, c, n, first);
        TQKV_UNROLL
        for (uint i = 0; i < B; i++) {
            float share = share_of(states.maxima[i], largest);
            sum = fma(share, states.sums[i], sum);
            if (first + i < task.n_simdgroups) task.states[((first + i) * n + c) * 2u] = share;
        }
    }
    total[0] = largest;
    total[1] = sum;
    add_column(how.copy, memory.kept + c * 2u, total, factors);
    if (how.to_total) add_column(how.copy_to_total, memory.kept + (n + c) * 2u, total, factors + 2);
}

inline void store_four(thread const float *x, device float *to)
{
    device packed_float4 *four = (device packed_float4 *)to;
    four->x = x[0];
    four->y = x[1];
    four->z = x[2];
    four->w = x[3];
}

// x = factor * x + other * y
template <int M>
inline void add_floats(float factor, thread float *x, float other, thread const float *y)
{
    TQKV_UNROLL
    for (int i = 0; i < M; i++) x[i] = fma(other, y[i], factor * x[i]);
}

// Four neighbouring values of a column.
struct four_sums {
    uint column;
    bool used;
    threadgroup const float *from; // of the first simdgroup
    device float *to;              // in the first partial result
    float kept[4];                 // of the section so far
};

// value: of the column's row
inline void open_four(thread const attend_task &task, uint D, uint column, uint value, threadgroup const float *from,
                      column_memory memory, column_end how, thread four_sums &own)
{
    own.column = column;
    own.used = column < how.used;
    own.from = from;
    own.to = task.partial_out + (row_offset(memory.rows[own.used ? column : 0u], D) + ulong(value));
    TQKV_UNROLL
    for (int i = 0; i < 4; i++) own.kept[i] = 0.0f;
    if (own.used && !how.copy) load_floats<4>(own.to + how.section, own.kept);
}

// Adds them up, simdgroup after simdgroup: a fixed order. each: from one to the next in memory
template <int S>
inline void combine_four(thread const attend_task &task, uint each, column_memory memory, column_end how,
                         thread four_sums &own)
{
    const uint B = uint(STATES_LOADED);
    float4 shares = *(threadgroup const float4 *)(memory.shares + own.column * 4u);
    threadgroup const float *from = own.from;
    float sum[4], total[4];
    TQKV_UNROLL
    for (int i = 0; i < 4; i++) sum[i] = total[i] = 0.0f;
    for (uint first = 0; first < uint(S) && first < task.n_simdgroups; first += B) {
        float4 four[B];
        float part[B];
        TQKV_UNROLL
        for (uint i = 0; i < B; i++) {
            uint s = min(first + i, task.n_simdgroups - 1u);
            part[i] = task.states[(s * memory.n + own.column) * 2u];
            four[i] = *(threadgroup const float4 *)(from + s * each);
        }
        TQKV_UNROLL
        for (uint i = 0; i < B; i++) {
            if (first + i >= task.n_simdgroups) continue;
            sum[0] = fma(part[i], four[i].x, sum[0]);
            sum[1] = fma(part[i], four[i].y, sum[1]);
            sum[2] = fma(part[i], four[i].z, sum[2]);
            sum[3] = fma(part[i], four[i].w, sum[3]);
        }
    }
    add_floats<4>(shares.x, own.kept, shares.y, sum);
    store_four(own.kept, own.to + how.section);
    if (!how.to_total) return;
    if (!how.copy_to_total) load_floats<4>(own.to, total);
    add_floats<4>(shares.z, total, shares.w, own.kept);
    store_four(total, own.to);
}

// Maxima, sums and the scores of the centre, for attend_merge. The lane of combine_states stores its column.
inline void store_columns(constant tqkv__attend_args &args, thread const attend_task &task, uint partial,
                          column_memory memory)
{
    uint c = task.lane, n_rows = uint(args.n_queries) * uint(args.n_kv_heads) * uint(args.group);
    if (task.simdgroup != 0 || c >= columns || task.first_column + c >= end_of_columns(args, task)) return;
    ulong to = (row_offset(partial + 1u, n_rows) + ulong(memory.rows[c])) * 2u; // the first are the shifts
    task.partial_state[to] = memory.totals[c * 2u];
    task.partial_state[to + 1u] = memory.totals[c * 2u + 1u];
    if (has_shifts() && task.split == 0) task.partial_state[ulong(memory.rows[c]) * 2u] = memory.shifts[c];
}

#endif
