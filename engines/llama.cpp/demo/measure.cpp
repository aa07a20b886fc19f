/* Speed and memory of one cache of llama.cpp, for demo.py and speed.py.
 *
 * usage: measure MODEL CACHE POSITIONS    CACHE: f16, q8_0, q4_0, or tqkv with GGML_BACKEND_PATH and TQKV set
 *
 * For each line "DEPTH THREADS" that it reads, with depths that do not fall and end with POSITIONS, prints tokens a
 * second of a prompt of 256 and of 16 single tokens behind DEPTH positions, and the MiB that the process has for itself
 * beyond what it had before there was a context. */
#include "../tests/drive.h"

#include <algorithm>
#include <chrono>
#include <cstring>

static double seconds()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double own_mib()
{
    char line[256];
    long kib = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, "RssAnon:", 8) == 0) kib = atol(line + 8);
    if (file) fclose(file);
    return (double)kib / 1024.0;
}

static void decode(llama_context *context, int from, int n)
{
    std::vector<llama_token> tokens;
    for (int i = 0; i < n; i++) tokens.push_back(1000 + (from + i) * 7919 % 40000);
    if (llama_decode(context, llama_batch_get_one(tokens.data(), n)) != 0) exit(1);
}

/* Tokens a second, then the positions are as before. */
static void measure_at(llama_context *context, int depth)
{
    const int n_prompt = 256, n_tokens = 16;
    const double start = seconds();
    decode(context, depth, n_prompt);
    llama_synchronize(context);
    const double prompt = seconds() - start;
    llama_memory_seq_rm(llama_get_memory(context), 0, depth, -1);
    decode(context, depth, 1);
    const double middle = seconds();
    for (int i = 1; i <= n_tokens; i++) decode(context, depth + i, 1);
    llama_synchronize(context);
    printf("%.2f %.2f ", n_prompt / prompt, n_tokens / (seconds() - middle));
    llama_memory_seq_rm(llama_get_memory(context), 0, depth, -1);
}

int main(int argc, char **argv)
{
    if (argc != 4) return fprintf(stderr, "usage: measure MODEL CACHE POSITIONS\n"), 2;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    const bool tqkv = strcmp(argv[2], "tqkv") == 0;
    const char *path = getenv("GGML_BACKEND_PATH");
    if (tqkv && (!path || !ggml_backend_load(path))) return fprintf(stderr, "measure: no GGML_BACKEND_PATH\n"), 1;
    ggml_backend_dev_t devices[2] = {tqkv ? ggml_backend_dev_by_name("TQKV") : nullptr, nullptr};
    llama_model_params m = llama_model_default_params();
    m.devices = devices;
    m.n_gpu_layers = 999;
    llama_model *model = llama_model_load_from_file(argv[1], m);
    llama_context_params p = llama_context_default_params();
    p.n_ctx = (uint32_t)atoi(argv[3]) + 512;
    p.n_batch = p.n_ubatch = 512;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    if (strcmp(argv[2], "q8_0") == 0) p.type_k = p.type_v = GGML_TYPE_Q8_0;
    if (strcmp(argv[2], "q4_0") == 0) p.type_k = p.type_v = GGML_TYPE_Q4_0;
    const double before = own_mib();
    llama_context *context = model ? llama_init_from_model(model, p) : nullptr;
    if (!context) return fprintf(stderr, "measure: no context\n"), 1;
    for (int depth, n_threads, filled = 0; scanf("%d %d", &depth, &n_threads) == 2; fflush(stdout)) {
        llama_set_n_threads(context, n_threads, n_threads);
        for (int n; filled < depth; filled += n) decode(context, filled, n = std::min(depth - filled, 512));
        measure_at(context, depth);
        printf("%.1f\n", own_mib() - before);
    }
    llama_free(context);
    llama_model_free(model);
    return 0;
}
