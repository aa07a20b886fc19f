#include "gpu.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef GPU_DEVICE
#include "device.h"
#endif

std::vector<simt::schedule> gpu_schedules;
bool gpu_on_device;
unsigned gpu_row_simdgroups = 4;

namespace
{

bool is_rotated(const tqkv_store *s) { return s->format != TQKV_F16 && !s->unrotated; }
float block_scale(const tqkv_store *s) { return s->block_scale == 0.0f ? 1.0f : s->block_scale; }
int slot(const tqkv_store *s, int64_t position) { return (int)(s->ring ? position % s->capacity : position); }
size_t row_floats(const tqkv_store *s, int n) { return (size_t)n * (size_t)s->n_kv_heads * (size_t)s->head_dim; }

simt::extent groups_of_rows(int64_t n_rows)
{
    return {(unsigned)((n_rows + gpu_row_simdgroups - 1) / gpu_row_simdgroups), 1, 1};
}

// For kernels that take several rows a simdgroup.
simt::extent groups_of_passes(int64_t n_rows, int head_dim)
{
    const int rows = TQKV__ENCODE_ROWS(head_dim);
    return groups_of_rows((n_rows + rows - 1) / rows);
}

// Of a run longer than a ring, the last `capacity` tokens; *skipped are left out.
tqkv__rows_args rows_args(const tqkv_store *s, int n_tokens, int64_t position, int *skipped)
{
    *skipped = n_tokens > s->capacity ? n_tokens - s->capacity : 0;
    tqkv__rows_args args;
    args.n_tokens = n_tokens - *skipped;
    args.n_kv_heads = s->n_kv_heads;
    args.capacity = s->capacity;
    args.first_slot = slot(s, position + *skipped);
    args.block_scale = block_scale(s);
    return args;
}

} // namespace

gpu_dispatch::gpu_dispatch(const char *family, int head_dim) : name(std::string("tqkv_") + family), launch()
{
    if (head_dim) name += "_d" + std::to_string(head_dim);
}

gpu_dispatch &gpu_dispatch::constant(int index, int64_t value)
{
    launch.constants.set[index] = true;
    launch.constants.value[index] = value;
    return *this;
}

gpu_dispatch &gpu_dispatch::input(int index, const void *bytes, size_t size)
{
    buffers.push_back({index, const_cast<void *>(bytes), size, false});
    return *this;
}

gpu_dispatch &gpu_dispatch::output(int index, void *bytes, size_t size)
{
    buffers.push_back({index, bytes, size, true});
    return *this;
}

gpu_dispatch &gpu_dispatch::memory(int index, size_t bytes)
{
    launch.threadgroup_bytes[index] = bytes;
    return *this;
}

#ifdef GPU_DEVICE
static std::string run_on_device(device_dispatch &dispatch, const simt::launch &launch)
{
    const simt::extent &groups = launch.threadgroups;
    dispatch.threadgroups[0] = groups.x;
    dispatch.threadgroups[1] = groups.y;
    dispatch.threadgroups[2] = groups.z;
    dispatch.threads = launch.threads.x;
    for (int i = 0; i < DEVICE_MEMORIES; i++) dispatch.threadgroup_bytes[i] = launch.threadgroup_bytes[i];
    for (int i = 0; i < DEVICE_CONSTANTS; i++) {
        dispatch.constant_set[i] = launch.constants.set[i];
        dispatch.constants[i] = (uint32_t)launch.constants.value[i];
        dispatch.constant_is_bool[i] = i != TQKV_FC_FORMAT && i != TQKV_FC_VALUE_FORMAT && i != TQKV_FC_COLUMNS;
    }
    char error[500];
    return device_run(&dispatch, error, sizeof error) ? "" : error;
}
#endif

std::string gpu_dispatch::run_once(const simt::schedule &s) const
{
#ifdef GPU_DEVICE
    if (gpu_on_device) {
        device_dispatch dispatch = {};
        dispatch.kernel = name.c_str();
        for (const bound &b : buffers) {
            dispatch.buffers[b.index] = launch.buffers[b.index];
            dispatch.buffer_sizes[b.index] = b.size;
            dispatch.written[b.index] = b.written;
        }
        return run_on_device(dispatch, launch);
    }
#endif
    const simt::kernel *kernel = simt::find_kernel(name.c_str());
    return kernel ? simt::run(*kernel, launch, s) : name + ": no such kernel";
}

std::string gpu_dispatch::run(simt::extent threadgroups, unsigned n_simdgroups)
{
    static char *const nothing = (char *)malloc(1); // stands for a buffer of no bytes, which must not be touched
    launch.threadgroups = threadgroups;
    launch.threads = {n_simdgroups * simt::simd_width, 1, 1};
    std::vector<std::vector<char>> before, first;
    for (const bound &b : buffers) {
        launch.buffers[b.index] = b.size ? b.bytes : nothing;
        bool kept = b.written && gpu_schedules.size() > 1;
        before.emplace_back((char *)b.bytes, (char *)b.bytes + (kept ? b.size : 0));
    }
    for (size_t i = 0; i < gpu_schedules.size(); i++) {
        for (size_t j = 0; i > 0 && j < buffers.size(); j++)
            if (!before[j].empty()) memcpy(buffers[j].bytes, before[j].data(), before[j].size());
        std::string wrong = run_once(gpu_schedules[i]);
        if (!wrong.empty()) return wrong;
        for (size_t j = 0; j < buffers.size(); j++) {
            if (i == 0)
                first.emplace_back((char *)buffers[j].bytes, (char *)buffers[j].bytes + before[j].size());
            else if (!first[j].empty() && memcmp(first[j].data(), buffers[j].bytes, first[j].size()))
                return name + ": buffer " + std::to_string(buffers[j].index) + " differs under schedule " +
                       std::to_string(i);
        }
    }
    return "";
}

std::string gpu_encode(const tqkv_store *s, const float *src, int n_tokens, int64_t position, uint32_t *not_finite)
{
    uint32_t flag = 0;
    int skipped;
    tqkv__rows_args args = rows_args(s, n_tokens, position, &skipped);
    std::string wrong =
        gpu_dispatch("encode", s->head_dim)
            .constant(TQKV_FC_FORMAT, s->format)
            .constant(TQKV_FC_ROTATED, is_rotated(s))
            .input(0, &args, sizeof args)
            .input(1, src + row_floats(s, skipped), row_floats(s, args.n_tokens) * sizeof *src)
            .output(2, s->codes, s->codes_size)
            .output(3, s->norms, s->norms_size)
            .output(4, &flag, sizeof flag)
            .memory(0, TQKV__CELL_BYTES)
            .memory(1, TQKV__SIGN_BYTES((size_t)s->head_dim))
            .run(groups_of_passes((int64_t)args.n_tokens * s->n_kv_heads, s->head_dim), gpu_row_simdgroups);
    if (not_finite) *not_finite = flag;
    return wrong;
}

std::string gpu_encode_kv(const tqkv_store *keys, const tqkv_store *values, const float *k, const float *v,
                          int n_tokens, int64_t position, uint32_t *not_finite)
{
    uint32_t flag = 0;
    int keys_skipped, values_skipped;
    tqkv__rows_args key_args = rows_args(keys, n_tokens, position, &keys_skipped);
    tqkv__rows_args value_args = rows_args(values, n_tokens, position, &values_skipped);
    int most = key_args.n_tokens > value_args.n_tokens ? key_args.n_tokens : value_args.n_tokens;
    simt::extent groups = groups_of_passes((int64_t)most * keys->n_kv_heads, keys->head_dim);
    groups.z = 2;
    std::string wrong =
        gpu_dispatch("encode_kv", keys->head_dim)
            .constant(TQKV_FC_FORMAT, keys->format)
            .constant(TQKV_FC_VALUE_FORMAT, values->format)
            .constant(TQKV_FC_ROTATED, is_rotated(keys))
            .constant(TQKV_FC_VALUE_ROTATED, is_rotated(values))
            .input(0, &key_args, sizeof key_args)
            .input(1, k + row_floats(keys, keys_skipped), row_floats(keys, key_args.n_tokens) * sizeof *k)
            .output(2, keys->codes, keys->codes_size)
            .output(3, keys->norms, keys->norms_size)
            .input(4, &value_args, sizeof value_args)
            .input(5, v + row_floats(values, values_skipped), row_floats(values, value_args.n_tokens) * sizeof *v)
            .output(6, values->codes, values->codes_size)
            .output(7, values->norms, values->norms_size)
            .output(8, &flag, sizeof flag)
            .memory(0, TQKV__CELL_BYTES)
            .memory(1, TQKV__SIGN_BYTES((size_t)keys->head_dim))
            .run(groups, gpu_row_simdgroups);
    if (not_finite) *not_finite = flag;
    return wrong;
}

std::string gpu_probe(const tqkv_store *s, const float *src, int n_tokens, float *scaled, uint32_t *not_finite)
{
    uint32_t flag = 0;
    tqkv__rows_args args = {n_tokens, s->n_kv_heads, s->capacity, 0, block_scale(s)};
    std::string wrong = gpu_dispatch("probe", s->head_dim)
                            .constant(TQKV_FC_FORMAT, s->format)
                            .constant(TQKV_FC_ROTATED, is_rotated(s))
                            .input(0, &args, sizeof args)
                            .input(1, src, row_floats(s, n_tokens) * sizeof *src)
                            .output(2, scaled, row_floats(s, n_tokens) * sizeof *scaled)
                            .output(3, &flag, sizeof flag)
                            .memory(0, TQKV__SIGN_BYTES((size_t)s->head_dim))
                            .run(groups_of_passes((int64_t)n_tokens * s->n_kv_heads, s->head_dim), gpu_row_simdgroups);
    if (not_finite) *not_finite = flag;
    return wrong;
}

std::string gpu_decode(const tqkv_store *s, int64_t position, int n_positions, tqkv_basis basis, float *dst)
{
    tqkv__rows_args args = {n_positions, s->n_kv_heads, s->capacity, slot(s, position), block_scale(s)};
    return gpu_dispatch("decode", s->head_dim)
        .constant(TQKV_FC_FORMAT, s->format)
        .constant(TQKV_FC_UNROTATE, is_rotated(s) && basis == TQKV_ORIGINAL)
        .input(0, &args, sizeof args)
        .input(1, s->codes, s->codes_size)
        .input(2, s->norms, s->norms_size)
        .output(3, dst, row_floats(s, n_positions) * sizeof *dst)
        .memory(0, TQKV__TABLE_BYTES)
        .run(groups_of_rows((int64_t)n_positions * s->n_kv_heads), gpu_row_simdgroups);
}

std::string gpu_rotate(float *rows, int n_rows, int head_dim, bool unrotate)
{
    tqkv__rotate_args args = {n_rows};
    return gpu_dispatch("rotate", head_dim)
        .constant(TQKV_FC_UNROTATE, unrotate)
        .input(0, &args, sizeof args)
        .output(1, rows, (size_t)n_rows * (size_t)head_dim * sizeof *rows)
        .run(groups_of_rows(n_rows), gpu_row_simdgroups);
}

// Defaults of tqkv_attention resolved, positions turned into slots.
static tqkv__attend_args attend_args(const tqkv_attention *a, int n_splits)
{
    const tqkv_store *keys = a->keys, *values = a->values;
    int capacity = keys->capacity < values->capacity ? keys->capacity : values->capacity;
    tqkv__attend_args args = {};
    args.n_queries = a->n_queries ? a->n_queries : 1;
    args.n_kv_heads = keys->n_kv_heads;
    args.group = a->n_heads ? a->n_heads / keys->n_kv_heads : 1;
    args.kv_len = a->kv_len ? a->kv_len : (int)(a->end < capacity ? a->end : capacity);
    args.window = a->window < args.kv_len ? a->window : 0;
    args.n_splits = n_splits;
    args.key_capacity = keys->capacity;
    args.value_capacity = values->capacity;
    args.key_oldest_slot = args.kv_len ? slot(keys, a->end - args.kv_len) : 0;
    args.value_oldest_slot = args.kv_len ? slot(values, a->end - args.kv_len) : 0;
    args.scale = a->scale != 0.0f ? a->scale : TQKV__INV_SQRT(keys->head_dim);
    args.softcap = a->softcap;
    args.key_block_scale = block_scale(keys);
    args.value_block_scale = block_scale(values);
    return args;
}

static std::string dispatch_attend(const tqkv_attention *a, const tqkv__attend_args &args, const float *q,
                                   gpu_split split, std::vector<float> &partial_out, std::vector<float> &state)
{
    const tqkv_store *keys = a->keys, *values = a->values;
    size_t d = (size_t)keys->head_dim, n = (size_t)split.n_simdgroups;
    int columns = split.columns ? split.columns : TQKV__MAX_COLUMNS(keys->head_dim), rows = args.n_queries * args.group;
    bool same_slots = keys->capacity == values->capacity && args.key_oldest_slot == args.value_oldest_slot;
    return gpu_dispatch("attend", keys->head_dim)
        .constant(TQKV_FC_FORMAT, keys->format)
        .constant(TQKV_FC_VALUE_FORMAT, values->format)
        .constant(TQKV_FC_ROTATE_QUERIES, is_rotated(keys) && a->query_basis == TQKV_ORIGINAL)
        .constant(TQKV_FC_COLUMNS, columns)
        .constant(TQKV_FC_MANY_QUERIES, args.n_queries > 1)
        .constant(TQKV_FC_SOFTCAP, args.softcap > 0.0f)
        .constant(TQKV_FC_SAME_SLOTS, same_slots)
        .constant(TQKV_FC_SHORT_STORE, keys->capacity < simt::simd_width)
        .input(0, &args, sizeof args)
        .input(1, q, (size_t)rows * (size_t)args.n_kv_heads * d * sizeof *q)
        .input(2, keys->codes, keys->codes_size)
        .input(3, keys->norms, keys->norms_size)
        .input(4, values->codes, values->codes_size)
        .input(5, values->norms, values->norms_size)
        .output(6, partial_out.data(), partial_out.size() * sizeof(float))
        .output(7, state.data(), state.size() * sizeof(float))
        .memory(0, TQKV__ATTEND_TABLE_BYTES)
        .memory(1, TQKV__ATTEND_QUERY_BYTES(d))
        .memory(2, TQKV__ATTEND_WEIGHT_BYTES(d, n))
        .memory(3, TQKV__ATTEND_STATE_BYTES(d, n))
        .run({(unsigned)args.n_kv_heads, (unsigned)((rows + columns - 1) / columns), (unsigned)split.n_splits},
             (unsigned)split.n_simdgroups);
}

std::string gpu_attend(const tqkv_attention *a, const float *q, float *out, gpu_split split)
{
    tqkv__attend_args args = attend_args(a, split.n_splits);
    int n_heads = args.n_kv_heads * args.group, n_rows = args.n_queries * n_heads;
    size_t d = (size_t)a->keys->head_dim, partial_rows = (size_t)n_rows * (size_t)split.n_splits;
    std::vector<float> partial_out(partial_rows * d, NAN), state(partial_rows * 2, NAN);
    std::string wrong = dispatch_attend(a, args, q, split, partial_out, state);
    if (!wrong.empty()) return wrong;
    tqkv__merge_args merge = {n_rows, n_heads, split.n_splits};
    const int most = TQKV__MERGE_SIMDGROUPS(a->keys->head_dim);
    const unsigned n = (unsigned)(split.n_splits < most ? split.n_splits : most);
    return gpu_dispatch("attend_merge", a->keys->head_dim)
        .constant(TQKV_FC_UNROTATE, is_rotated(a->values) && a->output_basis == TQKV_ORIGINAL)
        .constant(TQKV_FC_SINKS, a->sinks != nullptr)
        .input(0, &merge, sizeof merge)
        .input(1, partial_out.data(), partial_out.size() * sizeof(float))
        .input(2, state.data(), state.size() * sizeof(float))
        .input(3, a->sinks, a->sinks ? (size_t)n_heads * sizeof(float) : 0)
        .output(4, out, (size_t)n_rows * d * sizeof(float))
        .memory(0, TQKV__MERGE_BYTES(d, n))
        .run({(unsigned)n_rows, 1, 1}, n);
}

std::string gpu_tables(tqkv__table_report *report)
{
    return gpu_dispatch("tables", 0).output(0, report, sizeof *report).run({1, 1, 1}, 1);
}
