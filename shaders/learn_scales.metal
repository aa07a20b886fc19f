// learn_scales: centre and scales of the channels of a KV head, learnt from its rows and, if there are any, from the
// queries that read them. The operations and their order are those of tqkv_calibrate, so the bits are the same.
// Threadgroups: x KV heads. A thread takes a channel, and perhaps more.
#include "types.h"

constant uint row_type [[function_constant(TQKV_FC_TYPE)]];
constant uint query_type [[function_constant(TQKV_FC_VALUE_TYPE)]];

// The rows of one KV head, or of all heads of the queries that read it: token after token,
// within a token head after head.
struct channel_rows {
    device const uchar *rows;
    uint type, n_tokens, n_heads, token_stride, head_stride;
    ulong first; // value of the first row
    uint begin;  // the first row that counts
    bool judged; // only those that are new
    device const uchar *is_new;
    uint n; // tokens that count
};

inline channel_rows open_rows(device const uchar *rows, uint type, uint n_tokens, uint n_heads, uint token_stride,
                              uint head_stride, uint kv_head)
{
    channel_rows from;
    from.rows = rows;
    from.type = type;
    from.n_tokens = from.n = n_tokens;
    from.n_heads = n_heads;
    from.token_stride = token_stride;
    from.head_stride = head_stride;
    from.first = row_offset(kv_head * n_heads, head_stride);
    from.begin = 0;
    from.judged = false;
    from.is_new = rows; // not read before rows are judged
    return from;
}

inline float value_of_row(thread const channel_rows &from, uint row, uint channel)
{
    ulong at = from.first + row_offset(row / from.n_heads, from.token_stride) +
               row_offset(row % from.n_heads, from.head_stride) + ulong(channel);
    device const uchar *rows = from.rows;
    if (from.type == TQKV_TYPE_F32) return ((device const float *)rows)[at];
    return widened(from.type, uint(((device const ushort *)rows)[at]));
}

// Whether the values of a position, of all KV heads, differ from those of the one before by more than a quarter of
// their squared length: the sums are those of tqkv_cache_append.
inline bool is_new_position(constant tqkv__calibrate_args &args, device const ushort *values, uint position)
{
    float apart[16], length[16];
    if (position == 0u) return true;
    TQKV_UNROLL
    for (int k = 0; k < 16; k++) apart[k] = length[k] = 0.0f;
    for (uint h = 0; h < uint(args.n_kv_heads); h++) {
        device const ushort *row =
            values + row_offset(position, args.value_token_stride) + row_offset(h, args.value_head_stride);
        for (uint d = 0; d < uint(args.value_dim); d += 16u) {
            TQKV_UNROLL
            for (int k = 0; k < 16; k++) {
                float v = widened(TQKV_TYPE_F16, uint(row[d + uint(k)]));
                float x = v - widened(TQKV_TYPE_F16, uint((row - args.value_token_stride)[d + uint(k)]));
                apart[k] = apart[k] + x * x;
                length[k] = length[k] + v * v;
            }
        }
    }
    TQKV_UNROLL
    for (int n = 8; n > 0; n /= 2) {
        TQKV_UNROLL
        for (int k = 0; k < n; k++) {
            apart[k] = apart[k] + apart[k + n];
            length[k] = length[k] + length[k + n];
        }
    }
    return apart[0] > length[0] * 0.25f;
}

// Chooses the rows that a cache learns from: the new ones, or all if these are too few, which it returns. Every thread
// of the group comes here.
inline bool choose_rows(constant tqkv__calibrate_args &args, device const uchar *values, device uchar *is_new,
                        uint thread_index, uint n_threads, thread channel_rows &rows)
{
    uint n = uint(args.n_tokens), all = 0, rest = 0;
    if (args.value_dim == 0) return false;
    for (uint p = thread_index; p < n; p += n_threads)
        is_new[p] = is_new_position(args, (device const ushort *)values, p) ? uchar(1) : uchar(0);
    threadgroup_barrier(mem_flags::mem_device);
    for (uint p = 0; p < n; p++) {
        all += uint(is_new[p]);
        if (p >= uint(args.n_exact)) rest += uint(is_new[p]);
    }
    bool few = all < uint(args.least_new);
    if (few) {
        all = n;
        rest = n > uint(args.n_exact) ? n - uint(args.n_exact) : 0u;
    }
    rows.begin = rest >= uint(args.least_rest) ? uint(args.n_exact) : 0u;
    rows.n = rest >= uint(args.least_rest) ? rest : all;
    rows.judged = !few;
    rows.is_new = is_new;
    return few;
}

// The mean of a channel over the rows that count, in their order, or that of the squared distances from its centre;
// 0 without rows.
inline float mean_of_channel(thread const channel_rows &from, uint channel, bool squared, float center)
{
    const int ROWS = 8; // whose loads are under way at a time
    uint n_rows = from.n_tokens * from.n_heads;
    float sum = 0.0f, n = float(from.n) * float(from.n_heads);
    for (uint first = from.begin; first < n_rows; first += uint(ROWS)) {
        float x[ROWS];
        TQKV_UNROLL
        for (int i = 0; i < ROWS; i++) x[i] = value_of_row(from, min(first + uint(i), n_rows - 1u), channel) - center;
        TQKV_UNROLL
        for (int i = 0; i < ROWS; i++)
            if (first + uint(i) < n_rows && (!from.judged || from.is_new[first + uint(i)] != 0))
                sum = sum + (squared ? x[i] * x[i] : x[i]);
    }
    return sum / (n > 0.0f ? n : 1.0f);
}

// The largest distance of a channel's rows from its centre: of all rows, new or not.
inline float largest_of_channel(thread const channel_rows &from, uint channel, float center)
{
    float largest = 0.0f;
    for (uint row = 0; row < from.n_tokens; row++)
        largest = max(largest, fabs(value_of_row(from, row, channel) - center));
    return largest;
}

// Gives the two channels of each rotary pair the mean of theirs. values: [head_dim]. A barrier must precede and follow.
inline void share_pairs(constant tqkv__calibrate_args &args, threadgroup float *values, uint thread_index,
                        uint n_threads)
{
    uint n = uint(args.rotary_dim) / 2u;
    for (uint i = thread_index; i < n; i += n_threads) {
        uint low = args.pairs == 2 ? i : 2u * i, high = args.pairs == 2 ? i + n : 2u * i + 1u;
        values[low] = values[high] = (values[low] + values[high]) * 0.5f;
    }
}

// The smallest positive of [head_dim] values; 1 if there is none. Every thread has it.
inline float least_positive(threadgroup const float *values, uint n)
{
    float least = INFINITY;
    for (uint d = 0; d < n; d++) least = values[d] > 0.0f ? min(least, values[d]) : least;
    return least == INFINITY ? 1.0f : least;
}

// Mean squares to deviations; zeros become the smallest that is none. values: [head_dim].
// A barrier must precede and follow.
inline void find_deviations(constant tqkv__calibrate_args &args, threadgroup float *values, uint thread_index,
                            uint n_threads)
{
    uint n = uint(args.head_dim);
    if (args.pairs != 0) share_pairs(args, values, thread_index, n_threads);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = thread_index; d < n; d += n_threads) values[d] = precise::sqrt(values[d]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float least = least_positive(values, n);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = thread_index; d < n; d += n_threads) values[d] = values[d] > 0.0f ? values[d] : least;
}

// Deviations to scales: g = sqrt(s / r), divided by its root mean square. values: [2][head_dim], s and r.
// A barrier must precede.
inline void store_scales(constant tqkv__calibrate_args &args, threadgroup float *values, uint thread_index,
                         uint n_threads, bool few, device float *scale)
{
    uint n = uint(args.head_dim);
    float sum = 0.0f;
    for (uint d = thread_index; d < n; d += n_threads)
        values[d] = precise::sqrt(args.n_queries != 0 ? values[d] / values[n + d] : values[d]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = 0; d < n; d++) sum = sum + values[d] * values[d];
    float root = precise::sqrt(sum / float(n));
    for (uint d = thread_index; d < n; d += n_threads) {
        float g = values[d] / root;
        scale[d] = few ? max(0.5f, min(g, 1.5f)) : max(1.0f / 1024.0f, min(g, 1024.0f));
    }
}

// Multiplies the scales by the largest of [head_dim] factors, if that is above 1: then halves hold all rows less the
// centre, however they are rotated.
inline void enlarge_scales(threadgroup const float *factors, uint thread_index, uint n_threads, uint n,
                           device float *scale)
{
    float factor = 1.0f;
    for (uint d = 0; d < n; d++) factor = max(factor, factors[d]);
    for (uint d = thread_index; d < n; d += n_threads) scale[d] = scale[d] * factor;
}

// rows: [n_tokens][n_kv_heads][head_dim] and q: [n_queries][n_kv_heads * group][head_dim], with strides;
// center, channel_scale: [n_kv_heads][head_dim]; value_rows: halves [n_tokens][n_kv_heads][value_dim], with strides;
// is_new: [n_kv_heads][n_tokens]; values: [2][head_dim]
kernel void tqkv_learn_scales(constant tqkv__calibrate_args &args [[buffer(0)]], device const uchar *rows [[buffer(1)]],
                              device const uchar *q [[buffer(2)]], device float *center [[buffer(3)]],
                              device float *channel_scale [[buffer(4)]], device const uchar *value_rows [[buffer(5)]],
                              device uchar *is_new [[buffer(6)]], threadgroup float *values [[threadgroup(0)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]],
                              uint n_simdgroups [[simdgroups_per_threadgroup]])
{
    uint n = uint(args.head_dim), n_threads = n_simdgroups * 32u, heads = uint(args.group);
    device uchar *own_new = is_new + row_offset(group.x, uint(args.n_tokens));
    channel_rows keys =
        open_rows(rows, row_type, uint(args.n_tokens), 1u, args.token_stride, args.head_stride, group.x);
    channel_rows queries =
        open_rows(q, query_type, uint(args.n_queries), heads, args.query_token_stride, args.query_head_stride, group.x);
    bool few = choose_rows(args, value_rows, own_new, thread_index, n_threads, keys);
    center += row_offset(group.x, n);
    for (uint d = thread_index; d < n; d += n_threads) {
        float mean = mean_of_channel(keys, d, false, 0.0f);
        center[d] = mean;
        values[d] = mean_of_channel(keys, d, true, mean);
        if (args.n_queries != 0) values[n + d] = mean_of_channel(queries, d, true, 0.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    find_deviations(args, values, thread_index, n_threads);
    if (args.n_queries != 0) find_deviations(args, values + n, thread_index, n_threads);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    channel_scale += row_offset(group.x, n);
    store_scales(args, values, thread_index, n_threads, few, channel_scale);
    if (args.value_dim == 0) return;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = thread_index; d < n; d += n_threads)
        values[d] = largest_of_channel(keys, d, center[d]) * (1.0f / 1024.0f) / channel_scale[d];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    enlarge_scales(values, thread_index, n_threads, n, channel_scale);
}
