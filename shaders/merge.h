// The end of attention for one query row: brings the sums of the partial results to one maximum, adds them and the
// sink, divides, and turns the result back from the rotated basis. One threadgroup a row: its simdgroups share the
// sections. The same in parts, with slices of the caller: partial results to a slice, a slice to another, a slice to
// the result.
#ifndef TQKV_MERGE_H
#define TQKV_MERGE_H
#include "rotate.h"
#include "softmax.h"

// What a threadgroup works on, and the place of this thread in it.
struct merge_task {
    device const float *partial_out;   // [n_partials][n_rows][D], or [n_rows][D]: of the slice that is read
    device const float *partial_state; // [1 + n_partials][n_rows][2]: shift of all scores, unused; then maximum (in
                                       // powers of two), sum of the weights. Parts of the context: one after another
    device uchar *out;                 // [n_queries][n_heads][D], with strides
    device float *max, *sum;           // [n_rows]: of the slice that is written
    device const float *src_max, *src_sum; // [n_rows]: of the slice that is read
    threadgroup float *shared;  // [n_simdgroups][D + 4]: the sums of a section, then maximum and sum of weights
    uint row, type;             // type: of the output
    float sink;                 // in powers of two; -INFINITY: none. It is added to the denominator only
    bool from_slice, to_slice;  // from one to another: it is added
    bool rotate;                // the sums, for a slice: the values are not
    bool unrotate;              // the result
    bool shifted;               // the keys have a centre, which adds partial_state of the row to all scores
    bool scaled;                // the output is multiplied by the scales of the values' channels
    bool centered, rotated;     // the values' centre is added, and rotated before that
    bool center_scaled;         // and divided by the scales before that
    device const float *center; // [n_kv_heads][D]
    device const float *scale;  // the same, of the channels
    uint lane, part, simdgroup, n_simdgroups; // part: which neighbours the lane has
};

// The arrays of an item of a batch.
inline void open_merge_item(constant tqkv__batch_item &item, thread merge_task &task)
{
    task.row -= uint(item.first_row);
    task.partial_state = task.partial_out + item.partial_state;
    task.partial_out += item.partial_out;
    task.out += row_offset(item.out, TQKV__ROWS_UNIT);
    task.center += item.value_center;
    task.scale += item.value_scale;
}

// The sums of a row over some positions, the values across the lanes: E neighbours a lane. Where 32 does not divide D
// the upper lanes repeat the lower ones. Only the rotation needs the layout of load_row.
#define MERGE_LANES(D)  ((D) % 32 == 0 ? 32 : 16)
#define MERGE_VALUES(D) ((D) / MERGE_LANES(D))
template <int D>
struct row_sums {
    float maximum, sum, out[MERGE_VALUES(D)];
};

template <int D>
inline void clear_row(thread row_sums<D> &row)
{
    row.maximum = -INFINITY;
    row.sum = 0.0f;
    TQKV_UNROLL
    for (int i = 0; i < MERGE_VALUES(D); i++) row.out[i] = 0.0f;
}

// Adds sums to a row, as attend does it.
template <int D>
inline void add_sums(float maximum, float sum, thread const float *out, thread row_sums<D> &row)
{
    shares both = shares_of(row.maximum, maximum);
    row.maximum = both.largest;
    row.sum = fma(both.added, sum, both.kept * row.sum);
    TQKV_UNROLL
    for (int i = 0; i < MERGE_VALUES(D); i++) row.out[i] = fma(both.added, out[i], both.kept * row.out[i]);
}

// Adds a row to sums that come before it.
template <int D>
inline void add_before(float maximum, float sum, thread const float *out, thread row_sums<D> &row)
{
    shares both = shares_of(maximum, row.maximum);
    row.maximum = both.largest;
    row.sum = fma(both.added, row.sum, both.kept * sum);
    TQKV_UNROLL
    for (int i = 0; i < MERGE_VALUES(D); i++) row.out[i] = fma(both.added, row.out[i], both.kept * out[i]);
}

// Partial results that a simdgroup loads at a time: several loads are under way.
#define MERGE_BATCH(D) (MERGE_VALUES(D) <= TQKV_MERGE_FLOATS / 8 ? 8 : TQKV_MERGE_FLOATS / MERGE_VALUES(D))

// The partial results of a section, [first, end). part: parts of the context before theirs, each with a row of shifts
struct section_range {
    uint first, end, part;
};

// The partial results of the first positions are the first section, those of the last ones the last. In memory both lie
// before the others.
inline uint count_sections(constant tqkv__merge_args &args)
{
    uint n = (uint(args.before) + uint(args.n_partials) + uint(args.section) - 1u) / uint(args.section);
    return n + (args.n_first > 0 ? 1u : 0u) + (args.n_last > 0 ? 1u : 0u);
}

// Strands are added up by stretches, in the place of sections.
inline section_range range_of_section(constant tqkv__merge_args &args, uint section)
{
    uint length = uint(args.section), before = uint(args.before), n_ends = uint(args.n_first) + uint(args.n_last);
    section_range range = {0u, uint(args.n_first), 0u};
    if (args.n_first > 0) {
        if (section == 0u) return range;
        section--;
        range.part++;
    }
    uint first = max(section * length, before) - before;
    bool last = first >= uint(args.n_partials);
    if (!last && args.n_last > 0) range.part++;
    range.first = last ? uint(args.n_first) : n_ends + first;
    range.end = last ? n_ends : n_ends + min((section + 1u) * length - before, uint(args.n_partials));
    return range;
}

// With strands the first positions come behind the only section that there is: its stretches are sections here.
inline uint section_in_turn(constant tqkv__merge_args &args, uint turn)
{
    if (args.strands == 1 || args.n_first == 0) return turn;
    uint n = uint(args.n_partials) / uint(args.section);
    return turn < n ? turn + 1u : turn == n ? 0u : turn;
}

// The maximum of a stretch of which the partial results are strands: attend brings their sums to it before it adds
// them.
inline float maximum_of_strands(constant tqkv__merge_args &args, thread const merge_task &task, section_range range)
{
    float maximum = -INFINITY;
    TQKV_UNROLL
    for (uint i = 0; i < uint(TQKV__STRANDS); i++) {
        ulong at = row_offset(range.first + i + range.part + 1u, uint(args.n_rows)) + task.row;
        maximum = max(maximum, task.partial_state[at * 2u]);
    }
    return maximum;
}

// Adds the partial results of a section. A load beyond the last one repeats it.
template <int D>
inline void add_partials(constant tqkv__merge_args &args, thread const merge_task &task, section_range range,
                         thread row_sums<D> &row)
{
    const int E = MERGE_VALUES(D), B = MERGE_BATCH(D);
    uint end = range.end;
    ulong states = ulong(uint(args.n_rows)) * ulong(range.part + 1u);
    for (uint first = range.first; first < end; first += uint(B)) {
        float out[B][E], state[B][2];
        TQKV_UNROLL
        for (int i = 0; i < B; i++) {
            ulong at = row_offset(min(first + uint(i), end - 1u), uint(args.n_rows)) + task.row;
            load_floats<E>(task.partial_out + at * ulong(D) + task.part * uint(E), out[i]);
            state[i][0] = task.partial_state[(at + states) * 2u];
            state[i][1] = task.partial_state[(at + states) * 2u + 1u];
        }
        TQKV_UNROLL
        for (int i = 0; i < B; i++)
            if (first + uint(i) < end) add_sums<D>(state[i][0], state[i][1], out[i], row);
    }
}

// Adds up to n_simdgroups sections, from number `first` on, to the total of simdgroup 0: each simdgroup adds up one.
template <int D>
inline void add_sections(constant tqkv__merge_args &args, thread const merge_task &task, uint first, uint n_sections,
                         thread row_sums<D> &total)
{
    const int E = MERGE_VALUES(D);
    uint turn = first + task.simdgroup, section = section_in_turn(args, turn);
    row_sums<D> row;
    clear_row<D>(row);
    if (turn < n_sections) {
        section_range range = range_of_section(args, section);
        bool ends = (section == 0u && args.n_first > 0) || (turn + 1u == n_sections && args.n_last > 0);
        if (args.strands > 1 && !ends) row.maximum = maximum_of_strands(args, task, range);
        add_partials<D>(args, task, range, row);
    }
    threadgroup float *own = task.shared + task.simdgroup * uint(D + 4);
    if (task.lane < uint(MERGE_LANES(D))) {
        TQKV_UNROLL
        for (int i = 0; i < E; i++) own[int(task.lane) * E + i] = row.out[i];
    }
    if (task.lane == 0) {
        own[D] = row.maximum;
        own[D + 1] = row.sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint s = 0; s < min(task.n_simdgroups, n_sections - first) && task.simdgroup == 0; s++) {
        threadgroup const float *other = task.shared + s * uint(D + 4);
        float out[E];
        TQKV_UNROLL
        for (int i = 0; i < E; i++) out[i] = other[int(task.part) * E + i];
        if (args.strands > 1 && args.n_first > 0 && section_in_turn(args, first + s) == 0u)
            add_before<D>(other[D], other[D + 1], out, total);
        else
            add_sums<D>(other[D], other[D + 1], out, total);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); // before the next sections overwrite these
}

// The sums of a row as load_row would load them.
template <int D>
struct spread_sums {
    float maximum, sum, x[TQKV_LANE_VALUES(D)];
};

// The simdgroup's sums. Without a matrix they are where they are to be.
template <int D>
inline void spread_row(thread const merge_task &task, thread const row_sums<D> &row, thread spread_sums<D> &to)
{
    const int L = TQKV__ROW_LANES(D), C = TQKV_ROW_PIECE(D), E = MERGE_VALUES(D);
    to.maximum = row.maximum;
    to.sum = row.sum;
    if (TQKV__HAS_MATRIX(D) && task.lane < uint(MERGE_LANES(D))) {
        TQKV_UNROLL
        for (int i = 0; i < E; i++) task.shared[int(task.lane) * E + i] = row.out[i];
    }
    if (TQKV__HAS_MATRIX(D)) simdgroup_barrier(mem_flags::mem_threadgroup);
    uint part = lane_of_row<D>(task.lane);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++)
        to.x[i] = TQKV__HAS_MATRIX(D) ? task.shared[value_of_lane<L, C>(part, i)] : row.out[i % E];
}

// The slice that is read or, added to the one that is written, both. Additions are those of add_sums.
template <int D>
inline void add_slice(thread const merge_task &task, uint part, thread spread_sums<D> &row)
{
    ulong first = row_offset(task.row, D);
    row.maximum = maximum_of_slice(task.src_max[task.row]);
    row.sum = task.src_sum[task.row];
    load_row<D>(task.partial_out + first, part, row.x);
    if (!task.to_slice) return;
    float before = maximum_of_slice(task.max[task.row]), sum = task.sum[task.row], x[TQKV_LANE_VALUES(D)];
    load_typed_row<D>(uint(TQKV_TYPE_F32), task.out, first, part, x);
    simdgroup_barrier(mem_flags::mem_device); // before some lane overwrites what another has yet to load
    shares both = shares_of(before, row.maximum);
    row.maximum = both.largest;
    row.sum = fma(both.added, row.sum, both.kept * sum);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) row.x[i] = fma(both.added, row.x[i], both.kept * x[i]);
}

// Adds the sink and divides. Returns the share of the values' weights.
template <int D>
inline float divide_row(thread const merge_task &task, thread spread_sums<D> &row)
{
    shares both = shares_of(row.maximum, task.sink);
    float sum = both.kept * row.sum + (task.sink == -INFINITY ? 0.0f : both.added);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) row.x[i] = sum == 0.0f ? 0.0f : both.kept * row.x[i] / sum;
    return sum == 0.0f ? 0.0f : both.kept * row.sum / sum;
}

// Where the row's output begins.
inline ulong output_offset(constant tqkv__merge_args &args, uint row)
{
    uint n_heads = uint(args.n_heads);
    return row_offset(row / n_heads, args.out_token_stride) + row_offset(row % n_heads, args.out_head_stride);
}

template <int D>
inline void merge_row(constant tqkv__merge_args &args, thread const merge_task &task)
{
    uint n_sections = count_sections(args);
    uint part = lane_of_row<D>(task.lane), signs = task.unrotate ? signs_of_row<D>(part) : 0u;
    spread_sums<D> row;
    if (task.from_slice) {
        add_slice<D>(task, part, row);
    } else {
        row_sums<D> total;
        clear_row<D>(total);
        for (uint first = 0; first < n_sections; first += task.n_simdgroups)
            add_sections<D>(args, task, first, n_sections, total);
        if (task.simdgroup != 0) return;
        spread_row<D>(task, total, row);
        if (task.shifted && n_sections > 0u) row.maximum += task.partial_state[ulong(task.row) * 2u];
    }
    float weight = task.to_slice ? row.sum : divide_row<D>(task, row);
    uint kv_head = task.row % uint(args.n_heads) / uint(args.group);
    if (task.rotate && row.sum != 0.0f) rotate_row<D>(row.x, part); // rotated, half of the zeros would be negative
    if (task.unrotate) unrotate_row<D>(row.x, part, signs);
    if (task.scaled) multiply_channels<D>(task.scale, kv_head, part, row.x);
    if (task.centered)
        add_center<D>(task.center, task.scale, kv_head, task.center_scaled, task.rotated, weight, part, row.x);
    if (task.lane < uint(TQKV__ROW_LANES(D)))
        store_typed_row<D>(task.type, row.x, part, task.out, output_offset(args, task.row));
    if (!task.to_slice || task.lane != 0) return;
    task.max[task.row] = row.maximum * TQKV_LN2;
    task.sum[task.row] = row.sum;
}

#endif
