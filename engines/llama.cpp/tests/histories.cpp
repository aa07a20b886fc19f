/* What a sequence loses on a real text after it was copied, restored or shifted, beside one that was left alone: the
 * mean divergence of the next tokens from the same calls on llama.cpp's own cache.
 *
 * usage: histories BACKEND MODEL TEXT [N_PROMPT N_NEXT]    TQKV chooses the formats */
#include "drive.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>

namespace
{

std::vector<llama_token> read_tokens(const llama_model *model, const char *path)
{
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    const std::string s = text.str().substr(0, 1 << 17);
    std::vector<llama_token> tokens(s.size() + 8);
    const int n = llama_tokenize(llama_model_get_vocab(model), s.c_str(), (int)s.size(), tokens.data(),
                                 (int)tokens.size(), true, false);
    tokens.resize((size_t)std::max(n, 0));
    return tokens;
}

llama_context_params parameters(int n_cells)
{
    llama_context_params p = llama_context_default_params();
    p.n_ctx = (uint32_t)n_cells;
    p.n_batch = p.n_ubatch = 512;
    p.n_seq_max = 2;
    p.n_threads = p.n_threads_batch = 1;
    p.kv_unified = true;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    return p;
}

/* Positions `at` to `at + n` of the sequence get the tokens from `from` on; logits of all. */
std::vector<float> decode(engine *e, const std::vector<llama_token> &text, int from, int at, int n, int sequence)
{
    std::vector<token_at> tokens;
    for (int i = 0; i < n; i++) tokens.push_back({text[(size_t)(from + i)], at + i, sequence});
    return e->decode(tokens);
}

/* The sequence that holds the prompt afterwards, and how many positions it has lost. */
struct changed {
    int sequence, lost;
};

changed alone(engine *, int, const std::vector<llama_token> &) { return {0, 0}; }

changed copy(engine *e, int, const std::vector<llama_token> &)
{
    llama_memory_seq_cp(llama_get_memory(e->context), 0, 1, -1, -1);
    llama_memory_seq_rm(llama_get_memory(e->context), 0, -1, -1);
    return {1, 0};
}

/* Another text is written over the cells before the state comes back. */
changed restore(engine *e, int, const std::vector<llama_token> &text)
{
    std::vector<uint8_t> state(llama_state_seq_get_size(e->context, 0));
    llama_state_seq_get_data(e->context, state.data(), state.size(), 0);
    llama_memory_seq_rm(llama_get_memory(e->context), 0, -1, -1);
    decode(e, text, 5, 0, 300, 0);
    llama_memory_seq_rm(llama_get_memory(e->context), 0, -1, -1);
    llama_state_seq_set_data(e->context, state.data(), state.size(), 0);
    return {0, 0};
}

changed shift(engine *e, int n_prompt, const std::vector<llama_token> &)
{
    const int kept = 4, lost = n_prompt / 4;
    llama_memory_seq_rm(llama_get_memory(e->context), 0, kept, kept + lost);
    llama_memory_seq_add(llama_get_memory(e->context), 0, kept + lost, -1, -lost);
    return {0, lost};
}

const struct {
    const char *name;
    changed (*change)(engine *e, int n_prompt, const std::vector<llama_token> &text);
} HISTORIES[] = {{"alone", alone}, {"copied", copy}, {"restored", restore}, {"shifted", shift}};

double loss(engine *stock, engine *tqkv, const std::vector<llama_token> &text, int n_prompt, int n_next, int history)
{
    std::vector<float> logits[2];
    engine *sides[2] = {stock, tqkv};
    for (int side = 0; side < 2; side++) {
        engine *e = sides[side];
        llama_memory_clear(llama_get_memory(e->context), true);
        for (int i = 0; i < n_prompt; i += 512) decode(e, text, i, i, std::min(512, n_prompt - i), 0);
        const changed c = HISTORIES[history].change(e, n_prompt, text);
        for (int i = 0; i < n_next; i += 64) {
            const auto some =
                decode(e, text, n_prompt + i, n_prompt - c.lost + i, std::min(64, n_next - i), c.sequence);
            logits[side].insert(logits[side].end(), some.begin(), some.end());
        }
    }
    const size_t n = (size_t)stock->n_vocab();
    double sum = 0.0;
    for (size_t i = 0; i + n <= logits[0].size(); i += n) sum += divergence(&logits[0][i], &logits[1][i], (int)n);
    return logits[0].size() == (size_t)n_next * n && logits[1].size() == logits[0].size() ? sum / n_next : NAN;
}

} // namespace

int main(int argc, char **argv)
{
    if (argc != 4 && argc != 6) return fprintf(stderr, "usage: histories BACKEND MODEL TEXT [N_PROMPT N_NEXT]\n"), 2;
    const int n_prompt = argc > 4 ? atoi(argv[4]) : 1024, n_next = argc > 4 ? atoi(argv[5]) : 512;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    ggml_backend_reg_t registry = ggml_backend_load(argv[1]);
    if (!registry) return fprintf(stderr, "histories: %s was not loaded\n", argv[1]), 1;
    engine stock(argv[2], nullptr, parameters(n_prompt + n_next));
    engine tqkv(argv[2], ggml_backend_reg_dev_get(registry, 0), parameters(n_prompt + n_next));
    if (!stock.context || !tqkv.context) return fprintf(stderr, "histories: no context\n"), 1;
    const std::vector<llama_token> text = read_tokens(stock.model, argv[3]);
    if ((int)text.size() < n_prompt + n_next)
        return fprintf(stderr, "histories: the text has %zu tokens\n", text.size()), 1;
    double first = 0.0;
    int failed = 0;
    for (int i = 0; i < (int)(sizeof HISTORIES / sizeof *HISTORIES); i++) {
        const double x = loss(&stock, &tqkv, text, n_prompt, n_next, i);
        if (i == 0) first = x;
        failed += !(x <= 1.2 * first);
        printf("%s %-9s %.6f nats, %.2f of one that was left alone\n", x <= 1.2 * first ? "ok    " : "FAILED",
               HISTORIES[i].name, x, x / first);
        fflush(stdout);
    }
    return failed != 0;
}
