// The columns of attend_matrix: what a lane and a threadgroup keep of them, and how the sums of the simdgroups become one at
// the end of a stretch.
//
// Letters: D head_dim, W code width of a stored value, F matrices side by side that hold the columns, P values of a row that a
// simdgroup has sums of.
#ifndef TQKV_MATRIX_COLUMNS_H
#define TQKV_MATRIX_COLUMNS_H
#include "attend.h"
#include "fragments.h"

// Values of a row that lie between two changes of the factor of its codes, for any format of this width.
#define MATRIX_BLOCK(D, W)     ((W) == 16 ? (D) : (W) == 8 ? TQKV__NORM_DIM(TQKV__GRID, D) : TQKV__NORM_DIM(TQKV__BOOK, D))
#define MATRIX_POWER_OF_TWO(n) ((n) & -(n)) // the largest that divides n
#define MATRIX_VALUES(n, W)    (MATRIX_POWER_OF_TWO(n) < 128 / (W) ? MATRIX_POWER_OF_TWO(n) : 128 / (W))
// A row of keys: chunks of 4*N values. Lanes with the elements of column 2t of a left factor have values t*N .. of each.
// With stored right factors two short chunks are loaded ahead, not a long one.
#define MATRIX_WHOLE_KEY(D, W)  MATRIX_VALUES(MATRIX_BLOCK(D, W) / 4, W)
#define MATRIX_KEY_VALUES(D, W) (TQKV_STORED_RIGHTS ? MATRIX_WHOLE_KEY(D, W) / 2 : MATRIX_WHOLE_KEY(D, W))
// A row of values: chunks of 8*N. Lanes with row r of a left factor have values r*N .. of each. Where simdgroups share a row,
// chunks are not longer than their parts.
#define MATRIX_WHOLE_OUT(D, W)  MATRIX_VALUES(MATRIX_BLOCK(D, W) / 8, W)
#define MATRIX_OUT_VALUES(D, W) ((D) <= 256 || MATRIX_WHOLE_OUT(D, W) <= 8 ? MATRIX_WHOLE_OUT(D, W) : 8)

// What a lane keeps of the columns of its elements.
template <int P, int F>
struct matrix_state {
    int newest[F][2];    // position that the column's query sees; negative: none
    float factor[F][2];  // of products of keys and the query: then they are scores in powers of two
    float shift[F][2];   // as in attend.h
    float maximum[F][2]; // as in attend.h
    float sum[F][2];     // of the weights of the lane's rows
    sum_matrix out[P / 8][F];
};

// Threadgroup memory of columns.
struct column_memory {
    threadgroup float *kept;             // [2][columns][2]: maximum and sum of the section so far, and of all before it
    threadgroup float *shifts, *factors; // [columns]
    threadgroup float *tails;            // [columns]: what products of the tail are multiplied by, over `factors`
    threadgroup float *totals;           // [columns][2]: maximum and sum
    threadgroup uint *rows;              // [columns]: row in a partial result
    threadgroup float *parts;            // [columns][4]: what the sums of the simdgroups are multiplied by,
    threadgroup float *shares;           // [columns][4]: and those of the section so far, of the stretch, of the
                                         // earlier sections and of the section
};

template <int F>
inline column_memory column_memory_of(threadgroup float *numbers)
{
    const int C = 8 * F;
    column_memory memory;
    memory.kept = numbers;
    memory.shifts = memory.kept + 4 * C;
    memory.factors = memory.shifts + C;
    memory.tails = memory.factors + C;
    memory.totals = memory.tails + C;
    threadgroup float *rows = memory.totals + 2 * C;
    memory.rows = (threadgroup uint *)rows;
    memory.parts = rows + C;
    memory.shares = memory.parts + 4 * C;
    return memory;
}

// ---- The simdgroups' results as one ----

// The end of the columns that there are. Without a list it is computed where it is needed: nvcc keeps task.end_column in a
// register over all tiles, and spills others.
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

// Adds maximum and sum of a column to those of the kept ones, [2]. The two factors of the columns' sums go to `factors`.
inline void add_column(bool copy, threadgroup float *kept, threadgroup float *total, threadgroup float *factors)
{
    shares both = shares_of(copy ? -INFINITY : kept[0], total[0]);
    float sum = fma(both.added, total[1], copy ? 0.0f : both.kept * kept[1]);
    factors[0] = both.kept;
    factors[1] = both.added;
    total[0] = kept[0] = both.largest;
    total[1] = kept[1] = sum;
}

// Maxima and sums of the simdgroup's columns.
template <int P, int F>
inline void store_states(thread const attend_task &task, thread const matrix_state<P, F> &state)
{
    threadgroup float *own = task.states + task.simdgroup * uint(16 * F);
    float sum[F][2];
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) sum[f][i] = sum_of_column(state.sum[f][i]);
    }
    if (TQKV__MATRIX_ROW(task.lane) != 0) return;
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            uint c = uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane);
            own[c * 2u] = state.maximum[f][i] == NOTHING_SEEN ? -INFINITY : state.maximum[f][i];
            own[c * 2u + 1u] = sum[f][i];
        }
    }
}

// Maximum and sum of a column, and all factors of its sums. apart: the simdgroups have sums of their own, not parts of a row
template <int F>
inline void combine_states(thread const attend_task &task, bool apart, uint c, column_memory memory, column_end how)
{
    const uint C = uint(8 * F);
    threadgroup const float *states = task.states + c * 2u;
    threadgroup float *total = memory.totals + c * 2u, *factors = memory.shares + c * 4u;
    float largest = -INFINITY, sum = 0.0f;
    for (uint s = 0; s < task.n_simdgroups; s++) largest = max(largest, states[s * C * 2u]);
    for (uint s = 0; s < task.n_simdgroups; s++) {
        float share = share_of(states[s * C * 2u], largest);
        sum = fma(share, states[s * C * 2u + 1u], sum);
        if (apart) memory.parts[c * 4u + s] = share;
    }
    total[0] = largest;
    total[1] = sum;
    add_column(how.copy, memory.kept + c * 2u, total, factors);
    if (how.to_total) add_column(how.copy_to_total, memory.kept + (C + c) * 2u, total, factors + 2);
}

// Columns of a pass, one of two neighbours of each lane, are in the memory of the sums: [simdgroup][column][D + 4]. Lanes
// that store together use different banks.
#define MATRIX_SUM_COLUMNS 4

// Stores the simdgroup's sums of element i of matrix f.
template <int D, int F>
inline void store_sums(thread const attend_task &task, int f, int i, thread const matrix_state<D, F> &state)
{
    const int N = BY_CODE_WIDTH(value_format, MATRIX_OUT_VALUES, D);
    uint k = task.simdgroup * uint(MATRIX_SUM_COLUMNS) + TQKV__MATRIX_COLUMN(task.lane) / 2u;
    threadgroup float *row = task.sums + k * uint(D + 4) + TQKV__MATRIX_ROW(task.lane) * uint(N);
    TQKV_UNROLL
    for (int b = 0; b < D / 8; b += 4) {
        float4 four;
        four.x = state.out[b][f].elements[i];
        four.y = state.out[b + 1][f].elements[i];
        four.z = state.out[b + 2][f].elements[i];
        four.w = state.out[b + 3][f].elements[i];
        *(threadgroup float4 *)(row + b / N * 8 * N + b % N) = four;
    }
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

// Number `at` of a pass.
inline void open_four(thread const attend_task &task, uint D, uint first, uint at, column_memory memory, column_end how,
                      thread four_sums &own)
{
    uint k = at / (D / 4u), value = at % (D / 4u) * 4u;
    own.column = first + k * 2u;
    own.used = at < D && own.column < how.used;
    own.from = task.sums + k * (D + 4u) + value;
    own.to = task.partial_out + (row_offset(memory.rows[own.used ? own.column : 0u], D) + ulong(value));
    TQKV_UNROLL
    for (int i = 0; i < 4; i++) own.kept[i] = 0.0f;
    if (own.used && !how.copy) load_floats<4>(own.to + how.section, own.kept);
}

// Adds them up, simdgroup after simdgroup: a fixed order.
inline void combine_four(thread const attend_task &task, uint D, column_memory memory, column_end how,
                         thread four_sums &own)
{
    float4 parts = *(threadgroup const float4 *)(memory.parts + own.column * 4u);
    float4 shares = *(threadgroup const float4 *)(memory.shares + own.column * 4u);
    threadgroup const float *from = own.from;
    float sum[4], total[4];
    TQKV_UNROLL
    for (int i = 0; i < 4; i++) sum[i] = total[i] = 0.0f;
    TQKV_UNROLL
    for (int s = 0; s < TQKV__MATRIX_SIMDGROUPS; s++) {
        if (uint(s) >= task.n_simdgroups) continue;
        float4 four = *(threadgroup const float4 *)(from + uint(s * MATRIX_SUM_COLUMNS) * (D + 4u));
        float part = s == 0 ? parts.x : s == 1 ? parts.y : s == 2 ? parts.z : parts.w;
        sum[0] = fma(part, four.x, sum[0]);
        sum[1] = fma(part, four.y, sum[1]);
        sum[2] = fma(part, four.z, sum[2]);
        sum[3] = fma(part, four.w, sum[3]);
    }
    add_floats<4>(shares.x, own.kept, shares.y, sum);
    store_four(own.kept, own.to + how.section);
    if (!how.to_total) return;
    if (!how.copy_to_total) load_floats<4>(own.to, total);
    add_floats<4>(shares.z, total, shares.w, own.kept);
    store_four(total, own.to);
}

// Adds the sums of element i of matrix f up, four values of a column a thread.
template <int D, int F>
inline void combine_sums(thread const attend_task &task, int f, int i, column_memory memory, column_end how,
                         thread const matrix_state<D, F> &state)
{
    uint thread_index = task.simdgroup * 32u + task.lane, n_threads = task.n_simdgroups * 32u, first = uint(f * 8 + i);
    four_sums own;
    open_four(task, uint(D), first, thread_index, memory, how, own); // its loads are under way before the barrier
    store_sums<D, F>(task, f, i, state);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint at = thread_index; at < uint(D); at += n_threads) {
        if (at != thread_index) open_four(task, uint(D), first, at, memory, how, own);
        if (own.used) combine_four(task, uint(D), memory, how, own);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// As keep_stretch of attend.h.
template <int D, int F>
inline uint keep_columns(constant tqkv__attend_args &args, thread const attend_task &task, stretch_range own,
                         uint stretch, column_memory memory, thread matrix_state<D, F> &state)
{
    column_end how = open_end(args, task, own, stretch, uint(D));
    store_states(task, state);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (task.simdgroup == 0 && task.lane < uint(F * 8)) combine_states<F>(task, true, task.lane, memory, how);
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) combine_sums<D, F>(task, f, i, memory, how, state);
    }
    return how.to_total ? 0u : partial_of_section(args, task.split);
}

// Maxima, sums and the scores of the centre, for attend_merge.
inline void store_columns(constant tqkv__attend_args &args, thread const attend_task &task, uint partial,
                          column_memory memory)
{
    uint c = task.lane;
    if (task.simdgroup != 0 || c >= columns || task.first_column + c >= end_of_columns(args, task)) return;
    query_row row = row_of_column(args, task.first_column + c);
    ulong to = partial_row(args, task, partial + 1u, row) * 2u;
    task.partial_state[to] = memory.totals[c * 2u];
    task.partial_state[to + 1u] = memory.totals[c * 2u + 1u];
    if (has_shifts() && task.split == 0) task.partial_state[partial_row(args, task, 0u, row) * 2u] = memory.shifts[c];
}

#endif
