/* What people do with a KV cache, in llama.cpp on the processor and with the backend, in one process: the same calls on
 * both, the divergence of their logits by step.
 *
 * usage: llama_test BACKEND MODEL BOUND [CASE ...]    TQKV chooses the formats
 *
 * BOUND is the largest mean divergence of a step. */
#include "drive.h"

#include <cstring>
#include <filesystem>
#include <functional>
#include <set>

namespace
{

int passed = 0, failed = 0;
double bound = 0.0;
const char *backend_path, *model_path;
ggml_backend_dev_t device_tqkv;

/* Both sides of a test. */
struct pair_of {
    engine stock, tqkv;
    const char *name;
    bool good;
    double worst = 0.0;
    std::string worst_step;

    /* Stock attention over halves also adds them up in halves, for few queries. */
    static llama_context_params exact(llama_context_params p)
    {
        if (p.type_k == GGML_TYPE_F16) p.type_k = p.type_v = GGML_TYPE_F32;
        return p;
    }

    pair_of(const char *test, const llama_context_params &p, bool same_types = false)
        : stock(model_path, nullptr, same_types ? p : exact(p)), tqkv(model_path, device_tqkv, p), name(test),
          good(stock.context && tqkv.context)
    {
    }
    ~pair_of()
    {
        const bool ok = good && worst <= bound;
        (ok ? passed : failed)++;
        printf("%s %-28s largest mean divergence %.2g (%s)\n", ok ? "ok    " : "FAILED", name, worst,
               good ? worst_step.c_str() : "failed");
        fflush(stdout);
    }

    void step(const char *what, const std::vector<token_at> &tokens)
    {
        if (!good) return;
        const auto x = stock.decode(tokens), y = tqkv.decode(tokens);
        const size_t n = (size_t)stock.n_vocab();
        if (x.empty() || x.size() != y.size()) {
            printf("%s: %s: llama_decode failed\n", name, what);
            good = false;
            return;
        }
        double sum = 0.0;
        for (size_t i = 0; i < x.size(); i += n) sum += divergence(&x[i], &y[i], (int)n);
        const double mean = sum / (double)(x.size() / n);
        if (mean > worst || worst_step.empty()) {
            worst = mean;
            worst_step = what;
        }
        if (!(mean >= -1e-6)) good = false; /* NaN */
    }
    void both(const std::function<void(llama_memory_t)> &change)
    {
        if (!good) return;
        change(llama_get_memory(stock.context));
        change(llama_get_memory(tqkv.context));
    }
};

/* ---- Text: a repeated walk through the vocabulary that a small model can tell apart ---- */

llama_token token_of(int text, int i)
{
    uint32_t h = (uint32_t)(text * 7919 + i) * 2654435761u;
    h ^= h >> 13;
    h *= 2246822519u;
    return (llama_token)(3 + (h >> 8) % 250);
}

std::vector<token_at> span(int text, int from, int n, int sequence)
{
    std::vector<token_at> tokens;
    for (int i = from; i < from + n; i++) tokens.push_back({token_of(text, i), i, sequence});
    return tokens;
}

llama_context_params parameters(bool unified, int n_sequences, int n_threads)
{
    llama_context_params p = llama_context_default_params();
    p.n_ctx = 4096;
    p.n_batch = 1024;
    p.n_ubatch = 512;
    p.n_seq_max = (uint32_t)n_sequences;
    p.kv_unified = unified;
    p.n_threads = p.n_threads_batch = n_threads;
    return p;
}

/* ---- Cases ---- */

void prompt(const char *name, int piece, int n_threads)
{
    pair_of t(name, parameters(true, 1, n_threads));
    const int n = piece == 1 ? 96 : 700;
    for (int i = 0; i < n; i += piece) t.step("prompt", span(1, i, piece < n - i ? piece : n - i, 0));
    for (int i = n; i < n + 8; i++) t.step("token", span(1, i, 1, 0));
}

void prompt_1() { prompt("prompt/1", 1, 1); }
void prompt_7() { prompt("prompt/7", 7, 1); }
void prompt_64() { prompt("prompt/64", 64, 2); }
void prompt_512() { prompt("prompt/512", 512, 3); }

void drafts()
{
    pair_of t("drafts", parameters(true, 1, 1));
    t.step("prompt", span(1, 0, 800, 0));
    for (int round = 0; round < 12; round++) {
        const int at = 800 + round * 3;
        t.step("draft", span(2, at, 8, 0));
        t.both([&](llama_memory_t m) { llama_memory_seq_rm(m, 0, at, -1); });
        t.step("after a draft", span(1, at, 3, 0));
    }
}

void sequences(const char *name, bool unified)
{
    pair_of t(name, parameters(unified, 4, 2));
    for (int s = 0; s < 3; s++) t.step("prompt", span(s, 0, 150 + 40 * s, s));
    for (int i = 0; i < 150; i++) {
        std::vector<token_at> tokens;
        for (int s = 0; s < 3; s++) tokens.push_back(span(s, 150 + 40 * s + i, 1, s)[0]);
        t.step("together", tokens);
    }
    t.both([](llama_memory_t m) { llama_memory_seq_cp(m, 0, 3, -1, -1); });
    for (int i = 300; i < 340; i++) {
        std::vector<token_at> tokens = span(0, i, 1, 0);
        tokens.push_back(span(5, i, 1, 3)[0]);
        t.step("after a copy", tokens);
    }
    t.both([](llama_memory_t m) { llama_memory_seq_keep(m, 3); });
    t.step("kept", span(5, 340, 20, 3));
    t.both([](llama_memory_t m) { llama_memory_seq_rm(m, 1, -1, -1); });
    t.step("a new one", span(6, 0, 100, 1));
    t.both([](llama_memory_t m) { llama_memory_clear(m, true); });
    t.step("after clear", span(7, 0, 200, 2));
}

void sequences_unified() { sequences("sequences/unified", true); }
void sequences_apart() { sequences("sequences/apart", false); }

/* The cells of the middle are written again by later positions. */
void shift()
{
    llama_context_params p = parameters(true, 1, 1);
    p.n_ctx = 768;
    pair_of t("shift", p);
    t.step("prompt", span(1, 0, 700, 0));
    for (int round = 0; round < 3; round++) {
        t.both([](llama_memory_t m) {
            llama_memory_seq_rm(m, 0, 4, 304);
            llama_memory_seq_add(m, 0, 304, -1, -300);
        });
        for (int i = 0; i < 10; i++) {
            auto tokens = span(3, 400 + i * 30, 30, 0);
            t.step("after a shift", tokens);
        }
    }
}

void middle()
{
    pair_of t("middle", parameters(true, 1, 1));
    t.step("prompt", span(1, 0, 600, 0));
    t.both([](llama_memory_t m) { llama_memory_seq_rm(m, 0, 100, 200); });
    for (int i = 600; i < 620; i++) t.step("without the middle", span(1, i, 1, 0));
}

/* Out, over another text, and in again. */
void state(const char *name, bool unified)
{
    pair_of t(name, parameters(unified, 2, 1));
    t.step("prompt", span(1, 0, 700, 0));
    std::vector<uint8_t> states[2];
    engine *sides[2] = {&t.stock, &t.tqkv};
    for (int i = 0; i < 2 && t.good; i++) {
        states[i].resize(llama_state_seq_get_size(sides[i]->context, 0));
        llama_state_seq_get_data(sides[i]->context, states[i].data(), states[i].size(), 0);
    }
    t.both([](llama_memory_t m) { llama_memory_seq_rm(m, 0, -1, -1); });
    t.step("another text", span(2, 0, 900, 0));
    for (int target = 0; target < 2 && t.good; target++) {
        for (int i = 0; i < 2; i++)
            if (!llama_state_seq_set_data(sides[i]->context, states[i].data(), states[i].size(), target))
                t.good = false;
        for (int i = 700; i < 720; i++) t.step("restored", span(1, i, 1, target));
    }
}

void state_unified() { state("state/unified", true); }
void state_apart() { state("state/apart", false); }

/* A state of stock llama.cpp in tqkv, before it has seen anything else. */
void state_of_stock()
{
    pair_of t("state/of_stock", parameters(true, 1, 1), true);
    if (!t.good) return;
    t.stock.decode(span(1, 0, 700, 0));
    std::vector<uint8_t> state(llama_state_get_size(t.stock.context));
    llama_state_get_data(t.stock.context, state.data(), state.size());
    t.good = llama_state_set_data(t.tqkv.context, state.data(), state.size()) > 0;
    for (int i = 700; i < 730; i++) t.step("token", span(1, i, 1, 0));
}

void contexts()
{
    pair_of a("contexts/first", parameters(true, 1, 1)), b("contexts/second", parameters(true, 1, 2));
    a.step("prompt", span(1, 0, 300, 0));
    b.step("prompt", span(2, 0, 200, 0));
    for (int i = 0; i < 40; i++) {
        a.step("token", span(1, 300 + i, 1, 0));
        b.step("token", span(2, 200 + i, 1, 0));
    }
}

/* Linux only: empty elsewhere. */
std::set<std::string> thread_ids()
{
    std::set<std::string> ids;
    std::error_code none;
    for (const auto &task : std::filesystem::directory_iterator("/proc/self/task", none)) ids.insert(task.path());
    return ids;
}

/* Threads stay: libgomp would end and start some for a team that is smaller than ggml's. */
void threads()
{
    pair_of t("threads", parameters(true, 1, 5));
    t.step("prompt", span(1, 0, 32, 0));
    const auto before = thread_ids();
    for (int i = 32; i < 40; i++) t.step("token", span(1, i, 1, 0));
    t.good &= thread_ids() == before;
}

/* What tqkv leaves to llama.cpp: right, to the last bits that another order of sums changes. */
void left(const char *name, const std::function<void(llama_context_params *)> &change)
{
    llama_context_params p = parameters(true, 1, 1);
    change(&p);
    pair_of t(name, p);
    /* Versions that want flash attention on the device for quantised values refuse the context, in words. */
    if (t.stock.context && !t.tqkv.context && p.type_v == GGML_TYPE_Q8_0) {
        t.good = true;
        t.worst_step = "refused";
        return;
    }
    t.step("prompt", span(1, 0, 300, 0));
    for (int i = 300; i < 310; i++) t.step("token", span(1, i, 1, 0));
}

void no_flash_attention()
{
    left("left/no_flash_attention",
         [](llama_context_params *p) { p->flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED; });
}
void quantised_type()
{
    left("left/q8_0", [](llama_context_params *p) { p->type_k = p->type_v = GGML_TYPE_Q8_0; });
}
void no_offload()
{
    left("left/no_kv_offload", [](llama_context_params *p) { p->offload_kqv = false; });
}

const struct {
    const char *name;
    void (*run)();
} CASES[] = {
    {"prompt/1", prompt_1},
    {"prompt/7", prompt_7},
    {"prompt/64", prompt_64},
    {"prompt/512", prompt_512},
    {"drafts", drafts},
    {"sequences/unified", sequences_unified},
    {"sequences/apart", sequences_apart},
    {"shift", shift},
    {"middle", middle},
    {"state/unified", state_unified},
    {"state/apart", state_apart},
    {"state/of_stock", state_of_stock},
    {"contexts", contexts},
    {"threads", threads},
    {"left/no_flash_attention", no_flash_attention},
    {"left/q8_0", quantised_type},
    {"left/no_kv_offload", no_offload},
};

bool wanted(const char *name, int argc, char **argv)
{
    bool any = argc <= 4;
    for (int i = 4; i < argc; i++) any |= strstr(name, argv[i]) != nullptr;
    return any;
}

} // namespace

int main(int argc, char **argv)
{
    if (argc < 4) return fprintf(stderr, "usage: llama_test BACKEND MODEL BOUND [CASE ...]\n"), 2;
    backend_path = argv[1];
    model_path = argv[2];
    bound = atof(argv[3]);
    llama_log_set(
        [](ggml_log_level level, const char *text, void *) {
            if (level >= GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
        },
        nullptr);
    llama_backend_init();
    ggml_backend_reg_t registry = ggml_backend_load(backend_path);
    if (!registry) return fprintf(stderr, "llama_test: %s was not loaded\n", backend_path), 1;
    device_tqkv = ggml_backend_reg_dev_get(registry, 0);
    for (const auto &c : CASES)
        if (wanted(c.name, argc, argv)) c.run();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
