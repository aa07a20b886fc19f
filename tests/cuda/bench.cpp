// Times the shaders on an NVIDIA GPU: bench FOLDER [--list] [--quick] [--check] [part of a name]...
//
// FOLDER holds the pipelines. --list prints the names of the pipelines that the benchmark needs. --check compares
// attention with the CPU and times nothing, for compute-sanitizer. One measurement is a graph of several calls, over
// copies of the data that together exceed the L2 several times. A time is the median over replays of the graph, divided
// by the number of calls. Prints lines `time NAME microseconds` and `ratio NAME/OF value`.
#include "bench.h"

namespace
{

const tqkv_format all_formats[] = {TQKV_F16, TQKV_I8, TQKV_TQ8, TQKV_TQ6, TQKV_TQ5, TQKV_TQ4, TQKV_TQ3, TQKV_TQ2};
const tqkv_format some_formats[] = {TQKV_F16, TQKV_I8, TQKV_TQ4};

// ---- Encoding and decoding ----

std::string codec_name(const char *what, tqkv_format format, int head_dim, int n_tokens)
{
    return std::string(what) + "/" + tqkv_format_name(format) + "/d" + std::to_string(head_dim) + "/" +
           std::to_string(n_tokens);
}

// One copy: source and store are larger than the L2.
void bench_encode(tqkv_format format, int head_dim)
{
    const int n_tokens = 131072;
    const std::string name = codec_name("encode", format, head_dim, n_tokens);
    if (opt.check || !is_wanted(name)) return;
    const device_scope scope;
    const size_t n = (size_t)n_tokens * N_KV_HEADS * (size_t)head_dim;
    const float *source = gaussian_array(n, 5);
    const tqkv_store s = make_stream(format, head_dim, n_tokens, N_KV_HEADS, 3);
    run_bench(1, [] {}, {{name, [&](int) { encode(s, source, n_tokens, 0); }}});
    report_share(name + "/copy_of_input", name, (double)(n * sizeof(float)) / copy_bandwidth * 1e6);
}

void bench_decode(tqkv_format format)
{
    const int head_dim = 128, positions = 8192;
    const std::string name = codec_name("decode", format, head_dim, positions);
    if (opt.check || !is_wanted(name)) return;
    const device_scope scope;
    const tqkv_store s = make_stream(format, head_dim, positions, N_KV_HEADS, 3);
    float *out = device_array<float>((size_t)positions * N_KV_HEADS * (size_t)head_dim);
    tqkv_metal_plan plan;
    check_plan(gpu_plan(tqkv_metal_plan_decode, &s, 0, positions, TQKV_ORIGINAL, out, &plan));
    run_bench(1, [] {}, {{name, [&](int) { launch(plan); }}});
}

// ---- The program ----

// Groups of one query, and of eight, over one store.
void bench_groups(tqkv_format keys, tqkv_format values, int head_dim, int positions)
{
    std::vector<attend_shape> shapes;
    for (int group : {1, 2, 4, 8, 16}) shapes.push_back({keys, values, head_dim, group, 1, positions});
    shapes.push_back({keys, values, head_dim, 2, 8, positions});
    bench_attention(shapes);
}

void bench_latent(tqkv_format format, tqkv_format tail, int positions)
{
    bench_attention({{format, format, 512, 64, 1, positions, 1, true, tail}});
}

void bench_list(int n_kv_heads, int positions, int group)
{
    std::vector<attend_shape> shapes;
    for (int block : {0, 1, 64})
        shapes.push_back(
            {TQKV_TQ4, TQKV_TQ4, 128, group, 1, positions, n_kv_heads, false, TQKV_FORMAT_DEFAULT, true, block});
    bench_attention(shapes);
}

void bench_some()
{
    for (tqkv_format f : some_formats) bench_index(f);
    for (int group : {2, 8, 16}) bench_list(N_KV_HEADS, 32768, group);
    bench_list(N_KV_HEADS, 262144, 8);
    bench_list(64, 32768, 8);
    for (tqkv_format f : all_formats) bench_encode(f, 128);
    for (int head_dim : {64, 80, 96, 192, 256, 512}) bench_encode(TQKV_TQ4, head_dim);
    for (int head_dim : {64, 80, 256, 512}) bench_encode(TQKV_I8, head_dim);
    for (tqkv_format f : all_formats)
        for (int positions : {131072, 1048576}) bench_groups(f, f, 128, positions);
    bench_groups(TQKV_I8, TQKV_TQ4, 128, 131072);
    for (int positions : {512, 1024, 2048, 4096}) {
        for (tqkv_format f : some_formats) bench_groups(f, f, 128, positions);
        bench_groups(TQKV_I8, TQKV_TQ4, 128, positions);
        bench_groups(TQKV_TQ4, TQKV_TQ4, 256, positions);
    }
    for (int group : {2, 4}) bench_batch(TQKV_I8, TQKV_TQ4, group);
    for (int positions : {32768, 131072}) {
        for (tqkv_format f : {TQKV_TQ4, TQKV_I8, TQKV_F16}) bench_latent(f, TQKV_F16, positions);
        bench_latent(TQKV_TQ4, TQKV_FORMAT_DEFAULT, positions);
    }
    for (int head_dim : {80, 96, 192})
        for (tqkv_format f : some_formats) bench_groups(f, f, head_dim, 131072);
    for (tqkv_format f : some_formats) {
        bench_attention({{f, f, 128, 2, 512, 8192}});
        bench_attention({{f, f, 128, 4, 4096, 4096}});
        bench_decode(f);
    }
}

void bench_others()
{
    for (tqkv_format f : all_formats) {
        for (int positions : {8192, 32768}) bench_groups(f, f, 128, positions);
        for (int head_dim : {64, 256, 512})
            for (int positions : {8192, 32768, 131072, 1048576}) bench_groups(f, f, head_dim, positions);
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
    bench_some();
    if (!opt.quick) bench_others();
    return n_wrong != 0;
}
