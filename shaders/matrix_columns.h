// The columns of attend_matrix: what a lane keeps of them, and how it hands them over at the end of a stretch.
//
// Letters: D head_dim, W code width of a stored value, F matrices side by side that hold the columns, P values of a row
// that a simdgroup has sums of.
#ifndef TQKV_MATRIX_COLUMNS_H
#define TQKV_MATRIX_COLUMNS_H
#include "attend.h"
#include "fragments.h"

// Values of a row that lie between two changes of the factor of its codes, for any format of this width.
#define MATRIX_BLOCK(D, W)     ((W) == 16 ? (D) : (W) == 8 ? TQKV__NORM_DIM(TQKV__GRID, D) : TQKV__NORM_DIM(TQKV__BOOK, D))
#define MATRIX_POWER_OF_TWO(n) ((n) & -(n)) // the largest that divides n
#define MATRIX_VALUES(n, W)    (MATRIX_POWER_OF_TWO(n) < 128 / (W) ? MATRIX_POWER_OF_TWO(n) : 128 / (W))
// A row of keys: chunks of 4*N values. Lanes with the elements of column 2t of a left factor have
// values t*N .. of each.
// With stored right factors two short chunks are loaded ahead, not a long one.
#define MATRIX_WHOLE_KEY(D, W)  MATRIX_VALUES(MATRIX_BLOCK(D, W) / 4, W)
#define MATRIX_KEY_VALUES(D, W) (TQKV_STORED_RIGHTS ? MATRIX_WHOLE_KEY(D, W) / 2 : MATRIX_WHOLE_KEY(D, W))
// A row of values: chunks of 8*N. Lanes with row r of a left factor have values r*N .. of each. Where simdgroups share
// a row, chunks are not longer than their parts.
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

// ---- The simdgroups' results as one ----

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

// Columns of a pass, one of two neighbours of each lane, are in the memory of the sums: [simdgroup][column][D + 4].
// Lanes that store together use different banks.
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

// Number `at` of a pass.
inline void open_four_of_pass(thread const attend_task &task, uint D, uint first, uint at, column_memory memory,
                              column_end how, thread four_sums &own)
{
    uint k = at / (D / 4u), value = at % (D / 4u) * 4u, column = at < D ? first + k * 2u : memory.n;
    open_four(task, D, column, value, task.sums + k * (D + 4u) + value, memory, how, own);
}

// Adds the sums of element i of matrix f up, four values of a column a thread.
template <int D, int F>
inline void combine_sums(thread const attend_task &task, int f, int i, column_memory memory, column_end how,
                         thread const matrix_state<D, F> &state)
{
    uint thread_index = task.simdgroup * 32u + task.lane, n_threads = task.n_simdgroups * 32u, first = uint(f * 8 + i);
    four_sums own;
    open_four_of_pass(task, uint(D), first, thread_index, memory, how,
                      own); // its loads are under way before the barrier
    store_sums<D, F>(task, f, i, state);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint at = thread_index; at < uint(D); at += n_threads) {
        if (at != thread_index) open_four_of_pass(task, uint(D), first, at, memory, how, own);
        if (own.used) combine_four<TQKV__MATRIX_SIMDGROUPS>(task, uint(MATRIX_SUM_COLUMNS * (D + 4)), memory, how, own);
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
    if (task.simdgroup == 0 && task.lane < uint(F * 8))
        combine_states<TQKV__MATRIX_SIMDGROUPS>(task, task.lane, memory, how);
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) combine_sums<D, F>(task, f, i, memory, how, state);
    }
    return how.to_total ? 0u : partial_of_section(args, task.split);
}

#endif
