// Times the shaders on an NVIDIA GPU: bench FOLDER [--list] [--quick] [--check] [--planned] [--simdgroups N]
// [--threadgroups N] [--stretches N] [--lanes] [--matrices] [--columns N] [--index-keys N] [part of a name]...
//
// FOLDER holds the pipelines. --list prints the names of the pipelines that the benchmark needs. --check compares
// attention with the CPU and times nothing, for compute-sanitizer. --planned times what tqkv.h plans for any GPU. One
// measurement is a graph of several calls, over copies of the data that together exceed the L2 several times. A time
// is the median over replays of the graph, divided by the number of calls. Prints lines `time NAME microseconds` and
// `ratio NAME/OF value`. OF is limit, f16 (the same kernel on halves) or, for encoding and decoding, copy.
#include "bench.h"

namespace
{

// ---- Encoding and decoding ----

void bench_encode(tqkv_format format, int head_dim, int n_tokens, tqkv_type type = TQKV_TYPE_F32, bool scaled = false)
{
    const std::string name = std::string("encode/") + tqkv_format_name(format) + "/d" + std::to_string(head_dim) + "/" +
                             std::to_string(n_tokens) + (type == TQKV_TYPE_BF16 ? "/bf16" : "");
    const std::string own = name + (scaled ? "/scaled" : "");
    if (opt.check || !is_wanted(own)) return;
    const size_t n = (size_t)n_tokens * N_KV_HEADS * (size_t)head_dim;
    float *source = device_array<float>(n);
    tqkv_store s = make_stream(format, head_dim, n_tokens);
    s.type = type;
    if (scaled) scale_stream(s);
    if (opt.list) return encode(s, source, n_tokens, 0);
    if (type == TQKV_TYPE_BF16)
        bench_fill_bf16((uint16_t *)(void *)source, n, 5, stream);
    else
        bench_fill(source, n, 5, stream);
    // One copy: source and store are larger than the L2.
    report(own, time_calls(1, [&](int) { encode(s, source, n_tokens, 0); }));
    if (scaled) report_ratio(own + "/plain", times[name] / times[own]);
    const double input = (double)(n * (type == TQKV_TYPE_F32 ? 4 : 2)), all = input + stored_bytes(s);
    report_ratio(own + "/copy_of_input", input / copy_bandwidth * 1e6 / times[own]);
    report_ratio(own + "/copy", all / copy_bandwidth * 1e6 / times[own]);
    free_stream(s);
    CUDA(cudaFree(source));
}

void bench_decode(tqkv_format format, int head_dim, int positions)
{
    const std::string name = std::string("decode/") + tqkv_format_name(format) + "/d" + std::to_string(head_dim) + "/" +
                             std::to_string(positions);
    if (opt.check || !is_wanted(name)) return;
    const size_t elements = (size_t)positions * N_KV_HEADS * (size_t)head_dim;
    const tqkv_store s = make_stream(format, head_dim, positions);
    float *out = device_array<float>(elements);
    fill_stream(s, 3);
    const tqkv_metal_store store = gpu_store(&s);
    tqkv_metal_plan plan;
    check_plan(tqkv_metal_plan_decode(&store, 0, positions, TQKV_ORIGINAL, gpu_buffer(out), &plan));
    if (opt.list) return launch(plan.d[0]);
    report(name, time_calls(1, [&](int) { launch(plan.d[0]); }));
    report_ratio(name + "/copy", (stored_bytes(s) + (double)elements * 4) / copy_bandwidth * 1e6 / times[name]);
    CUDA(cudaFree(out));
    free_stream(s);
}

// ---- The program ----

// A dispatch that does nothing, in a graph of such: less time than this no dispatch takes.
void bench_nothing()
{
    if (!opt.list && !opt.check && is_wanted("launch/nothing"))
        report("launch/nothing", time_calls(1, [&](int) { bench_launch_nothing(stream); }));
}

void bench_encodings()
{
    for (tqkv_format f : {TQKV_F16, TQKV_I8, TQKV_TQ8, TQKV_TQ6, TQKV_TQ5, TQKV_TQ4, TQKV_TQ3, TQKV_TQ2})
        bench_encode(f, 128, 131072);
    for (int head_dim : {64, 80, 96, 192, 256, 512}) bench_encode(TQKV_TQ4, head_dim, 131072);
    for (tqkv_format f : {TQKV_I8, TQKV_TQ4}) bench_encode(f, 128, 131072, TQKV_TYPE_BF16);
    for (tqkv_format f : {TQKV_I8, TQKV_TQ4}) bench_encode(f, 128, 131072, TQKV_TYPE_F32, true);
    for (int head_dim : {64, 80, 256, 512})
        for (bool scaled : {false, true}) bench_encode(TQKV_I8, head_dim, 131072, TQKV_TYPE_F32, scaled);
}

void bench_all()
{
    for (tqkv_format f : {TQKV_TQ4, TQKV_I8, TQKV_F16}) bench_index(f);
    bench_nothing();
    for (int group : {2, 8, 16}) bench_list(TQKV_TQ4, N_KV_HEADS, 32768, group);
    bench_list(TQKV_TQ4, N_KV_HEADS, 262144, 8);
    bench_list(TQKV_TQ4, 64, 32768, 8);
    const tqkv_format formats[] = {TQKV_F16, TQKV_I8, TQKV_TQ8, TQKV_TQ6, TQKV_TQ5, TQKV_TQ4, TQKV_TQ3, TQKV_TQ2};
    const std::vector<std::pair<int, int>> groups = {{1, 1}, {2, 1}, {4, 1}, {8, 1}, {16, 1}, {2, 8}};
    bench_encodings();
    for (tqkv_format f : formats)
        for (int positions : {131072, 1048576}) bench_attention(f, f, 128, positions, groups);
    bench_attention(TQKV_I8, TQKV_TQ4, 128, 131072, groups);
    for (tqkv_format f : {TQKV_I8, TQKV_TQ4}) bench_attention(f, f, 128, 131072, groups, true);
    for (int positions : {512, 1024, 2048, 4096}) {
        for (tqkv_format f : {TQKV_F16, TQKV_I8, TQKV_TQ4}) bench_attention(f, f, 128, positions, groups);
        bench_attention(TQKV_I8, TQKV_TQ4, 128, positions, groups);
        bench_attention(TQKV_TQ4, TQKV_TQ4, 256, positions, groups);
    }
    for (int group : {2, 4}) bench_batch(TQKV_I8, TQKV_TQ4, group);
    for (int positions : {32768, 131072}) {
        bench_latent(TQKV_TQ4, TQKV_F16, positions);
        bench_latent(TQKV_I8, TQKV_F16, positions);
        bench_latent(TQKV_F16, TQKV_F16, positions);
        bench_latent(TQKV_TQ4, TQKV_FORMAT_DEFAULT, positions);
    }
    for (int head_dim : {80, 96, 192})
        for (tqkv_format f : {TQKV_F16, TQKV_I8, TQKV_TQ4}) bench_attention(f, f, head_dim, 131072, groups);
    for (tqkv_format f : {TQKV_F16, TQKV_I8, TQKV_TQ4}) {
        bench_attention(f, f, 128, 8192, {{2, 512}});
        bench_attention(f, f, 128, 4096, {{4, 4096}});
        bench_decode(f, 128, 8192);
    }
    if (opt.quick) return;
    for (tqkv_format f : formats) {
        for (int positions : {8192, 32768}) bench_attention(f, f, 128, positions, groups);
        for (int head_dim : {64, 256, 512})
            for (int positions : {8192, 32768, 131072, 1048576}) bench_attention(f, f, head_dim, positions, groups);
    }
}

void read_options(int argc, char **argv)
{
    opt.folder = argc > 1 ? argv[1] : "";
    for (int i = 2; i < argc; i++) {
        const std::string argument = argv[i];
        if (argument == "--list")
            opt.list = true;
        else if (argument == "--quick")
            opt.quick = true;
        else if (argument == "--check")
            opt.check = true;
        else if (argument == "--lanes")
            opt.kernel = GPU_LANES;
        else if (argument == "--matrices")
            opt.kernel = GPU_MATRICES;
        else if (argument == "--planned")
            opt.planned = true;
        else if (argument == "--simdgroups" && i + 1 < argc)
            opt.n_simdgroups = atoi(argv[++i]);
        else if (argument == "--stretches" && i + 1 < argc)
            opt.stretches = atoi(argv[++i]);
        else if (argument == "--columns" && i + 1 < argc)
            opt.columns = atoi(argv[++i]);
        else if (argument == "--index-keys" && i + 1 < argc)
            opt.index_keys = atoi(argv[++i]);
        else if (argument == "--threadgroups" && i + 1 < argc)
            opt.threadgroups = atoi(argv[++i]);
        else
            opt.filters.push_back(argument);
    }
}

} // namespace

int main(int argc, char **argv)
{
    read_options(argc, argv);
    if (!opt.list) {
        CUDA(cudaStreamCreate(&stream));
        if (!opt.check) measure_limits();
    }
    bench_all();
    return n_wrong != 0;
}
