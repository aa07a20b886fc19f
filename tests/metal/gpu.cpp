#include "gpu.h"
#include <algorithm>
#include <limits.h>
#include <map>
#include <math.h>
#include <memory>
#include <stdio.h>
#include <string.h>

std::vector<simt::schedule> gpu_schedules;
bool gpu_on_device;
gpu_recorder gpu_record;
tqkv_metal *gpu_context;
bool gpu_known_tables = true;
unsigned gpu_most_threads = simt::max_threads;
#define HEAD_DIM_OF(x, n, size) size,
const int gpu_head_dims[] = {TQKV__KERNELS(HEAD_DIM_OF, )};

// ---- Dispatches ----

gpu_dispatch::gpu_dispatch(const tqkv_metal_kernel &planned) : device_dispatch()
{
    static_assert((int)TQKV_METAL_NAME <= (int)DEVICE_NAME_SIZE, "names of kernels");
    memcpy(kernel, planned.name, sizeof planned.name);
    for (int i = 0; i < TQKV_METAL_CONSTANTS; i++)
        if (planned.constants[i]) constant(i, planned.constants[i] - 1);
}

gpu_dispatch::gpu_dispatch(const char *family, int head_dim, int value_dim) : device_dispatch()
{
    std::string suffix = head_dim ? "_d" + std::to_string(head_dim) : "";
    if (value_dim) suffix += "_" + std::to_string(value_dim);
    snprintf(kernel, sizeof kernel, "tqkv_%s%s", family, suffix.c_str());
}

gpu_dispatch &gpu_dispatch::constant(int index, int value)
{
    constant_set[index] = true;
    constants[index] = (uint32_t)value;
    return *this;
}

gpu_dispatch &gpu_dispatch::input(int index, const void *bytes, size_t size)
{
    output(index, const_cast<void *>(bytes), size);
    written[index] = false;
    return *this;
}

// A call without one of a kernel's buffers still binds some memory, which the kernel must not touch.
gpu_dispatch &gpu_dispatch::output(int index, void *bytes, size_t size)
{
    static char *const nothing = new char[1];
    buffers[index] = size ? bytes : nothing;
    buffer_sizes[index] = size;
    written[index] = true;
    return *this;
}

gpu_dispatch &gpu_dispatch::memory(int index, size_t bytes)
{
    threadgroup_bytes[index] = bytes;
    return *this;
}

gpu_dispatch &gpu_dispatch::grid(simt::extent groups, unsigned n_simdgroups)
{
    threadgroups[0] = groups.x;
    threadgroups[1] = groups.y;
    threadgroups[2] = groups.z;
    threads = n_simdgroups * simt::simd_width;
    return *this;
}

static std::string run_once(const device_dispatch &d, const simt::schedule &s)
{
#ifdef GPU_DEVICE
    char error[500];
    if (gpu_on_device) return device_run(&d, error, sizeof error) ? "" : error;
#endif
    const simt::kernel *kernel = simt::find_kernel(d.kernel);
    if (!kernel) return std::string(d.kernel) + ": no such kernel";
    simt::launch launch = {};
    launch.threadgroups = {d.threadgroups[0], d.threadgroups[1], d.threadgroups[2]};
    launch.threads = {d.threads, 1, 1};
    for (int i = 0; i < DEVICE_BUFFERS; i++) launch.buffers[i] = d.buffers[i];
    for (int i = 0; i < DEVICE_MEMORIES; i++) launch.threadgroup_bytes[i] = d.threadgroup_bytes[i];
    for (int i = 0; i < DEVICE_CONSTANTS; i++) {
        launch.constants.set[i] = d.constant_set[i];
        launch.constants.value[i] = d.constants[i];
    }
    return simt::run(*kernel, launch, s);
}

// The bytes of every buffer that the dispatch writes; none where there is nothing to compare.
static std::vector<std::vector<char>> written_bytes(const device_dispatch &d)
{
    std::vector<std::vector<char>> bytes(DEVICE_BUFFERS);
    for (size_t i = 0; gpu_schedules.size() > 1 && i < DEVICE_BUFFERS; i++)
        if (d.written[i]) bytes[i].assign((char *)d.buffers[i], (char *)d.buffers[i] + d.buffer_sizes[i]);
    return bytes;
}

std::string gpu_dispatch::run() const
{
    const std::vector<std::vector<char>> before = written_bytes(*this);
    std::vector<std::vector<char>> first;
    for (size_t i = 0; i < gpu_schedules.size(); i++) {
        for (size_t j = 0; i > 0 && j < before.size(); j++)
            if (!before[j].empty()) memcpy(buffers[j], before[j].data(), before[j].size());
        const std::string wrong = run_once(*this, gpu_schedules[i]);
        if (!wrong.empty()) return wrong;
        if (i == 0) first = written_bytes(*this);
        for (size_t j = 0; i > 0 && j < first.size(); j++)
            if (!first[j].empty() && memcmp(first[j].data(), buffers[j], first[j].size()))
                return std::string(kernel) + ": buffer " + std::to_string(j) + " differs under schedule " +
                       std::to_string(i);
    }
    return "";
}

gpu_dispatch gpu_planned(const tqkv_metal_dispatch &planned)
{
    gpu_dispatch d(planned.kernel);
    tqkv_metal_launch launch = {};
    for (int i = 0; i < planned.n_arguments; i++) {
        const tqkv_metal_arguments &a = planned.arguments[i];
        d.input(a.index, a.bytes, a.size);
        d.by_value[a.index] = true;
    }
    for (int i = 0; i < planned.n_bindings; i++) {
        const tqkv_metal_binding &b = planned.bindings[i];
        if (b.index == TQKV_METAL_ONLY_CHECKED) continue;
        d.output(b.index, (char *)b.at.buffer + b.at.offset, b.size);
        d.written[b.index] = b.written;
    }
    if (tqkv_metal_plan_launch(&planned, gpu_most_threads, &launch) != TQKV_OK) return d;
    for (int i = 0; i < TQKV_METAL_MEMORIES; i++)
        if (planned.memory[i] || planned.memory_each[i])
            d.memory(i, launch.memory[i]); // else unbound: reported if used
    const size_t *groups = launch.threadgroups;
    return d.grid({(unsigned)groups[0], (unsigned)groups[1], (unsigned)groups[2]},
                  (unsigned)launch.threads / simt::simd_width);
}

static std::string run_planned(const tqkv_metal_dispatch &planned)
{
    for (int i = 0; i < planned.n_bindings; i++) {
        const tqkv_metal_binding *other = tqkv_metal_overlapping(&planned, i);
        if (other) return std::string(other->name) + " and " + planned.bindings[i].name + " overlap";
    }
    return planned.grid[0] ? gpu_planned(planned).run() : "";
}

std::string gpu_run(const tqkv_metal_plan &plan)
{
    std::string wrong = plan.result == TQKV_OK ? "" : tqkv_result_string(plan.result);
    if (gpu_record && wrong.empty()) {
        tqkv_metal_plan recorded = plan;
        char error[500] = "";
        return gpu_record(&recorded, error, sizeof error) ? "" : error;
    }
    for (int i = 0; i < plan.n && wrong.empty(); i++) wrong = run_planned(plan.d[i]);
    return wrong;
}

// ---- Arguments of tqkv_metal_plan_* ----

tqkv_metal_buffer gpu_buffer(const void *bytes) { return {const_cast<void *>(bytes), 0}; }

tqkv_metal_store gpu_store(const tqkv_store *s)
{
    tqkv_metal_store store = {*s,
                              gpu_buffer(s->codes),
                              gpu_buffer(s->norms),
                              gpu_buffer(s->center),
                              gpu_buffer(s->channel_scale),
                              gpu_buffer(s->pages)};
    if (!gpu_known_tables) store.shape.pages = nullptr;
    return store;
}

gpu_attention::gpu_attention(const tqkv_attention &a) : stores(), metal()
{
    const tqkv_store *const from[] = {a.keys,         a.values,    a.tail,        a.first.keys,
                                      a.first.values, a.last.keys, a.last.values, a.first.tail};
    const tqkv_metal_store **const to[] = {&metal.keys,        &metal.values,       &metal.tail,
                                           &metal.first.keys,  &metal.first.values, &metal.last.keys,
                                           &metal.last.values, &metal.first.tail};
    metal.attention = a;
    for (int i = 0; i < STREAMS; i++) {
        if (!from[i]) continue;
        stores[i] = gpu_store(from[i]);
        *to[i] = &stores[i];
    }
    metal.sinks = gpu_buffer(a.sinks);
    metal.tree = gpu_buffer(a.tree);
    metal.list = gpu_buffer(a.list.rows);
    if (gpu_known_tables) return;
    metal.attention.tree = nullptr;
    metal.attention.list.rows = nullptr;
}

tqkv_metal_binding *gpu_find(tqkv_metal_dispatch *d, int index)
{
    for (int i = 0; i < d->n_bindings; i++)
        if (d->bindings[i].index == index) return &d->bindings[i];
    return nullptr;
}

static bool is_long(int head_dim) { return head_dim == 448 || head_dim == 512; }

bool gpu_has_matrices(int head_dim)
{
    return head_dim == 64 || head_dim == 128 || head_dim == 256 || is_long(head_dim);
}

static bool is_by_matrices(const tqkv_metal_dispatch &d) { return d.kernel.family == TQKV_METAL_ATTEND_MATRIX; }

// All slots of the keys' store, whether a query sees them or not.
static void force_stretches(tqkv_metal_dispatch d[2], gpu_split split, int value_dim)
{
    tqkv__attend_args args = gpu_args<tqkv__attend_args>(d[0]);
    tqkv__merge_args merge = gpu_args<tqkv__merge_args>(d[1]);
    const int tiles = (args.key_capacity + 31) / 32;
    if (split.n_stretches) {
        args.stretch_tiles = std::max(1, (tiles + split.n_stretches - 1) / split.n_stretches);
        args.n_short = split.share ? TQKV__SECTION : INT_MAX;
    }
    const int n_stretches = TQKV__STRETCH_OF_TILE(tiles - 1, args.stretch_tiles, args.n_short) + 1;
    const int length = TQKV__SECTION, n_sections = (n_stretches + length - 1) / length;
    const bool each = split.share == GPU_EACH || split.share == GPU_STRANDS || !split.share;
    args.strands = merge.strands = split.share == GPU_STRANDS ? TQKV__STRANDS : 1;
    if (args.strands > 1) d[0].kernel.constants[TQKV_FC_STRANDS] = 1 + true;
    const int n_partials = each ? n_stretches * args.strands : split.share == GPU_SECTIONS ? n_sections : 2;
    args.first_stretch = merge.before = 0;
    args.sections_each = each ? 0 : split.share == GPU_SECTIONS ? 1 : n_sections;
    merge.section = args.strands > 1 ? args.strands : each ? length : 1;
    merge.n_partials = args.sections_each > 1 ? 1 : n_partials;
    args.n_splits = args.sections_each > 1 ? 1 : n_partials;
    d[0].grid[2] = (size_t)args.n_splits;
    const int most = split.n_simdgroups ? split.n_simdgroups : TQKV__MERGE_SIMDGROUPS(value_dim);
    d[1].n_simdgroups =
        std::min(args.strands > 1 ? n_stretches : n_sections, std::min(most, TQKV__MERGE_SIMDGROUPS(value_dim)));
    memcpy(d[0].arguments[0].bytes, &args, sizeof args);
    memcpy(d[1].arguments[0].bytes, &merge, sizeof merge);
    test_plan_columns(&d[0], is_by_matrices(d[0]), d[0].kernel.constants[TQKV_FC_COLUMNS] - 1);
    const size_t rows = (size_t)merge.n_rows * (size_t)n_partials * sizeof(float);
    gpu_find(&d[0], 6)->size = gpu_find(&d[1], 1)->size = rows * (size_t)value_dim;
    gpu_find(&d[0], 7)->size = gpu_find(&d[1], 2)->size = rows * 2 + (size_t)merge.n_rows * 2 * sizeof(float);
}

void gpu_force(tqkv_metal_dispatch d[2], gpu_split split)
{
    const int head_dim = d[0].kernel.head_dim * TQKV__DIM_UNIT, value_dim = d[1].kernel.head_dim * TQKV__DIM_UNIT;
    const bool by_matrices =
        split.kernel && gpu_has_matrices(head_dim) ? split.kernel == GPU_MATRICES : is_by_matrices(d[0]);
    const int planned = d[0].kernel.constants[TQKV_FC_COLUMNS] - 1;
    if (split.columns || split.kernel)
        test_plan_columns(&d[0], by_matrices,
                          split.columns == GPU_MOST ? INT_MAX
                          : split.columns           ? split.columns
                                                    : planned);
    if (split.n_simdgroups)
        d[0].n_simdgroups = by_matrices ? std::min(split.n_simdgroups, TQKV__MATRIX_SIMDGROUPS) : split.n_simdgroups;
    if (by_matrices && is_long(head_dim)) d[0].n_simdgroups = TQKV__LONG_SIMDGROUPS;
    const bool strands = gpu_args<tqkv__attend_args>(d[0]).strands > 1;
    const bool none = is_long(head_dim) || d[0].kernel.constants[TQKV_FC_COLUMNS] - 1 > TQKV__MOST_STRAND_COLUMNS;
    if (by_matrices && strands && none && !split.share) split.share = GPU_EACH;
    if (split.n_stretches || split.share) force_stretches(d, split, value_dim);
}

void gpu_set_scratch(tqkv_metal_dispatch d[2], float *sums, float *state)
{
    gpu_find(&d[0], 6)->at = gpu_find(&d[1], 1)->at = gpu_buffer(sums);
    gpu_find(&d[0], 7)->at = gpu_find(&d[1], 2)->at = gpu_buffer(state);
    d[1].barrier = state;
}

// ---- Calls ----

// Plans by plan_with(scratch, &plan), divides attend and merge if there are no other parts, and runs.
template <typename F>
static std::string run_attention(const tqkv_attention *a, gpu_split split, F plan_with)
{
    tqkv_metal_plan plan;
    std::vector<float> sums, state;
    const std::vector<uint32_t> scratch = gpu_plan_in_scratch(plan, plan_with);
    if (plan.result != TQKV_OK) return tqkv_result_string(plan.result);
    tqkv_metal_dispatch *attend = plan.d + (a->list.rows ? 1 : 0);
    const bool codes = plan.d + plan.n == attend + 2 && gpu_args<tqkv__merge_args>(attend[1]).n_partials > 0;
    if (codes && (split.columns || split.n_simdgroups || split.n_stretches || split.share || split.kernel)) {
        gpu_force(attend, split);
        sums.assign(gpu_find(attend, 6)->size / sizeof(float), NAN); // apart, so that a sanitizer sees the end of each
        state.assign(gpu_find(attend, 7)->size / sizeof(float), NAN);
        gpu_set_scratch(attend, sums.data(), state.data());
    }
    return gpu_run(plan);
}

std::string gpu_attend(const tqkv_attention *a, const void *q, void *out, gpu_split split)
{
    return run_attention(a, split, [&](const void *scratch, tqkv_metal_plan *plan) {
        gpu_plan(tqkv_metal_plan_attend, a, q, scratch, out, plan);
    });
}

std::string gpu_attend_partial(const tqkv_attention *a, const void *q, int64_t first, int count, gpu_slice &to,
                               gpu_split split)
{
    return run_attention(a, split, [&](const void *scratch, tqkv_metal_plan *plan) {
        gpu_plan(tqkv_metal_plan_attend_partial, a, q, first, count, scratch, to.out.data(), to.max.data(),
                 to.sum.data(), plan);
    });
}

namespace
{

// Arrays that go into one buffer, each once and at a multiple of 16 bytes.
struct block {
    std::vector<char> bytes;
    std::vector<std::pair<tqkv_metal_buffer *, size_t>> arrays;
    void add(tqkv_metal_buffer &array, size_t size)
    {
        if (array.buffer) arrays.emplace_back(&array, size);
    }
    void add(tqkv_metal_store &s);
    void add(gpu_attention &a);
    void place();
};

void block::add(tqkv_metal_store &s)
{
    const size_t channels = (size_t)(s.shape.n_kv_heads * s.shape.head_dim) * sizeof(float);
    add(s.codes, s.shape.codes_size);
    add(s.norms, s.shape.norms_size);
    add(s.center, channels);
    add(s.channel_scale, channels);
    add(s.pages, (size_t)s.shape.n_pages * sizeof(int32_t));
}

void block::add(gpu_attention &a)
{
    const tqkv_attention &call = a.metal.attention;
    const size_t n_queries = (size_t)call.n_queries, rows = n_queries * (size_t)std::max(call.list.heads, 1);
    for (tqkv_metal_store &s : a.stores) add(s);
    add(a.metal.sinks, (size_t)call.n_heads * sizeof(float));
    add(a.metal.tree, n_queries * sizeof(uint64_t));
    add(a.metal.list, rows * (size_t)call.list.length * sizeof(int32_t));
}

void block::place()
{
    std::map<const void *, size_t> places;
    size_t size = 16;
    for (const auto &array : arrays)
        if (places.emplace(array.first->buffer, size).second) size += (array.second + 31) / 16 * 16; // and a gap
    bytes.resize(size);
    for (const auto &array : arrays) {
        const size_t at = places[array.first->buffer];
        memcpy(&bytes[at], array.first->buffer, array.second);
        *array.first = {bytes.data(), at};
    }
}

} // namespace

std::string gpu_attend_batch(const std::vector<tqkv_attention> &items, const std::vector<const void *> &q,
                             const std::vector<void *> &out, bool lanes)
{
    const auto within = [](const void *first, const void *at) {
        return tqkv_metal_buffer{const_cast<void *>(first), (size_t)((const char *)at - (const char *)first)};
    };
    const int n = (int)items.size();
    block in;
    std::vector<std::unique_ptr<gpu_attention>> own;
    std::vector<tqkv_metal_attention> calls;
    std::vector<tqkv_metal_buffer> queries, outputs;
    for (size_t i = 0; i < items.size(); i++) {
        own.emplace_back(new gpu_attention(items[i]));
        own[i]->metal.sinks = own[0]->metal.sinks;
        if (lanes) own[i]->metal.matrix_group = INT_MAX;
        in.add(*own[i]);
        queries.push_back(within(q[0], q[i]));
        outputs.push_back(within(out[0], out[i]));
    }
    in.place();
    for (const auto &item : own) calls.push_back(item->metal);
    tqkv_metal_plan plan;
    const tqkv_metal_buffer none = {nullptr, 0};
    const tqkv_result r = tqkv_metal_plan_attend_batch(calls.data(), n, nullptr, none, nullptr, none, nullptr, &plan);
    if (r != TQKV_OK) return tqkv_result_string(r);
    std::vector<char> arguments(std::max(plan.arguments_size, (size_t)1));
    std::vector<float> scratch(std::max(plan.scratch_size / sizeof(float), (size_t)1), NAN);
    tqkv_metal_plan_attend_batch(calls.data(), n, queries.data(), gpu_buffer(arguments.data()), arguments.data(),
                                 gpu_buffer(scratch.data()), outputs.data(), &plan);
    return gpu_run(plan);
}
