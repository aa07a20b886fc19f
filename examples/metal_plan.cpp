// An engine that encodes its own dispatches, as MLX, ggml-metal or Metal 4 code does. It asks tqkv for the plan of each
// call and fills its own list of commands: a step of decoding, with the table check that tqkv_metal_create would do.
// There is no Metal here: the machine of the tests, which runs the shaders on a processor, takes the place of the GPU.
// `make demo-plan` runs it anywhere.
#include "tqkv_metal.m" // the plans; without Objective-C nothing of Metal
#include "simt.h"
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

enum { HEAD_DIM = 128, KV_HEADS = 2, HEADS = 8, TOKENS = 600, ROW = KV_HEADS * HEAD_DIM, QUERY = HEADS * HEAD_DIM };

// The engine's buffers, and what it takes in place of a GPU's limits.
struct buffer {
    std::vector<char> bytes;
    explicit buffer(size_t size) : bytes(size) {}
    tqkv_metal_buffer whole() { return {this, 0}; }
    float *floats() { return reinterpret_cast<float *>(bytes.data()); }
};
static const size_t max_threads = 1024; // of this pipeline: maxTotalThreadsPerThreadgroup

// One dispatch in the engine's own form.
struct command {
    tqkv_metal_kernel kernel; // by which it keeps its pipelines
    std::vector<tqkv_metal_arguments> arguments;
    std::vector<tqkv_metal_binding> bindings;
    bool waits; // for the dispatch before
    tqkv_metal_launch launch;
};

static void fail(const char *what, const char *why)
{
    printf("%s: %s\n", what, why);
    exit(1);
}

// Checks what a plan cannot know of a dispatch, and adds it to the list.
static void record(std::vector<command> &list, const tqkv_metal_dispatch &d)
{
    command c = {};
    c.kernel = d.kernel;
    c.arguments.assign(d.arguments, d.arguments + d.n_arguments);
    for (int i = 0; i < d.n_bindings; i++) {
        const tqkv_metal_binding &b = d.bindings[i];
        const buffer *own = static_cast<const buffer *>(b.at.buffer);
        if (tqkv_metal_overlapping(&d, i)) fail(b.name, "overlaps another array");
        if (b.size && (!own || b.at.offset % b.alignment || b.at.offset > own->bytes.size() ||
                       b.size > own->bytes.size() - b.at.offset))
            fail(b.name, "no buffer, too short, or not aligned");
        if (b.index != TQKV_METAL_ONLY_CHECKED) c.bindings.push_back(b);
    }
    c.waits = d.barrier != nullptr;
    if (tqkv_metal_plan_launch(&d, max_threads, &c.launch) != TQKV_OK) fail("launch", "refused");
    if (c.launch.threadgroups[0]) list.push_back(c);
}

// The dispatches of a call, which is refused or wholly recorded.
static void record(std::vector<command> &list, const tqkv_metal_plan &plan)
{
    if (plan.result != TQKV_OK) fail(plan.call, tqkv_result_string(plan.result));
    for (int i = 0; i < plan.n; i++) record(list, plan.d[i]);
}

// Runs a command, as an encoder and a queue do.
static void run(const command &c)
{
    alignas(16) static char nothing[512]; // for arrays that a call lacks
    simt::launch l = {};
    const char *name = c.kernel.name;
    for (int i = 0; i < TQKV_METAL_CONSTANTS; i++) {
        l.constants.set[i] = c.kernel.constants[i] != 0; // the machine takes bool and uint alike: TQKV_METAL_IS_UINT
        l.constants.value[i] = c.kernel.constants[i] - 1u;
    }
    for (const tqkv_metal_arguments &a : c.arguments) l.buffers[a.index] = const_cast<unsigned char *>(a.bytes);
    for (const tqkv_metal_binding &b : c.bindings)
        l.buffers[b.index] = b.size ? static_cast<buffer *>(b.at.buffer)->bytes.data() + b.at.offset : nothing;
    for (int i = 0; i < TQKV_METAL_MEMORIES; i++) l.threadgroup_bytes[i] = c.launch.memory[i];
    const size_t *n = c.launch.threadgroups;
    l.threadgroups = {(unsigned)n[0], (unsigned)n[1], (unsigned)n[2]};
    l.threads = {(unsigned)c.launch.threads, 1, 1};
    const simt::kernel *kernel = simt::find_kernel(name);
    if (!kernel) fail(name, "not in the library");
    const std::string wrong = simt::run(*kernel, l, simt::schedule());
    printf("%s%s: %zu threadgroups of %zu\n", c.waits ? "  then " : "", name, n[0] * n[1] * n[2], c.launch.threads);
    if (!wrong.empty()) fail(name, wrong.c_str());
}

static void check(tqkv_result r, const char *call)
{
    if (r != TQKV_OK) fail(call, tqkv_result_string(r));
}

// Once a library: was it built from this header, and do matrices lie as it expects?
static bool check_library()
{
    tqkv_metal_plan plan;
    std::vector<command> list;
    buffer report(TQKV_METAL_REPORT);
    tqkv_metal_plan_tables(report.whole(), &plan);
    record(list, plan);
    for (const command &c : list) run(c);
    const char *stale = tqkv_metal_stale_table(report.bytes.data());
    if (stale) fail("the library is of another tqkv.h", stale);
    return tqkv_metal_has_matrices(report.bytes.data());
}

static tqkv_metal_store make_store(tqkv_format format, std::vector<buffer> &memory)
{
    tqkv_metal_store s = {};
    s.shape.format = format;
    s.shape.head_dim = HEAD_DIM;
    s.shape.n_kv_heads = KV_HEADS;
    s.shape.capacity = 1024;
    memory.emplace_back(tqkv_codes_size(&s.shape));
    memory.emplace_back(tqkv_norms_size(&s.shape));
    return s;
}

// The same store for the processor.
static tqkv_store on_processor(const tqkv_metal_store &s)
{
    tqkv_store own = s.shape;
    buffer *codes = static_cast<buffer *>(s.codes.buffer), *norms = static_cast<buffer *>(s.norms.buffer);
    own.codes = codes->bytes.data();
    own.codes_size = codes->bytes.size();
    own.norms = norms->floats();
    own.norms_size = norms->bytes.size();
    return own;
}

// The root mean square of the difference between rows, by that of the expected ones.
static double relative_error(const float *out, const std::vector<float> &expected)
{
    double wrong = 0, all = 0;
    for (size_t i = 0; i < expected.size(); i++) {
        wrong += std::pow((double)out[i] - (double)expected[i], 2);
        all += std::pow((double)expected[i], 2);
    }
    return std::sqrt(wrong / all);
}

int main()
{
    std::vector<buffer> memory; // codes and norms of keys, then of values
    std::vector<command> list;
    tqkv_metal_plan plan;
    memory.reserve(4);
    tqkv_metal_store keys = make_store(TQKV_I8, memory), values = make_store(TQKV_TQ4, memory);
    keys.codes = memory[0].whole(), keys.norms = memory[1].whole();
    values.codes = memory[2].whole(), values.norms = memory[3].whole();
    buffer k(TOKENS * ROW * sizeof(float)), v(TOKENS * ROW * sizeof(float)), q(QUERY * sizeof(float)),
        out(QUERY * sizeof(float));
    for (buffer *b : {&k, &v, &q}) // in place of a model's projections
        for (size_t i = 0; i < b->bytes.size() / sizeof(float); i++)
            b->floats()[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    tqkv_metal_attention a = {};
    a.keys = &keys, a.values = &values;
    a.attention.n_heads = HEADS;
    a.attention.n_queries = 1;
    a.attention.end = TOKENS;
    const tqkv_metal_buffer none = {nullptr, 0};
    check(tqkv_metal_plan_attend(&a, none, none, none, &plan), "attend"); // without scratch: how much it needs
    buffer scratch(plan.scratch_size);

    const bool matrices = check_library();
    tqkv_metal_plan_encode(&keys, &values, k.whole(), v.whole(), TOKENS, 0, none, &plan);
    record(list, plan);
    tqkv_metal_plan_attend(&a, q.whole(), scratch.whole(), out.whole(), &plan);
    if (!matrices) tqkv_metal_plan_lanes(&plan);
    const size_t first = list.size();
    record(list, plan);
    list[first].waits = true; // it reads what encode_kv wrote: between two calls barriers are the engine's
    for (const command &c : list) run(c);

    const tqkv_store key_store = on_processor(keys), value_store = on_processor(values);
    tqkv_attention own = a.attention;
    std::vector<float> expected(QUERY);
    own.keys = &key_store, own.values = &value_store;
    check(tqkv_attend(&own, q.floats(), expected.data()), "tqkv_attend");
    const double error = relative_error(out.floats(), expected);
    printf("%d tokens: shaders and processor differ by %.1e\n", TOKENS, error);
    return error < 0.01 ? 0 : 1; // the processor multiplies integers, the shaders floats
}
