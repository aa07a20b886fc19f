/* A model and a context of llama.cpp on one device, as the tests drive it: by tokens, positions and sequences. */
#pragma once
#include "ggml-backend.h"
#include "llama.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

struct token_at {
    llama_token token;
    llama_pos position;
    llama_seq_id sequence;
};

struct engine {
    llama_model *model = nullptr;
    llama_context *context = nullptr;
    std::string error;

    engine(const char *path, ggml_backend_dev_t device, const llama_context_params &p)
    {
        ggml_backend_dev_t devices[2] = {device, nullptr};
        llama_model_params m = llama_model_default_params();
        m.devices = devices;
        m.n_gpu_layers = 999;
        model = llama_model_load_from_file(path, m);
        if (model) context = llama_init_from_model(model, p);
        if (!context) error = "no context";
    }
    ~engine()
    {
        if (context) llama_free(context);
        if (model) llama_model_free(model);
    }
    engine(const engine &) = delete;
    engine &operator=(const engine &) = delete;

    int n_vocab() const { return llama_vocab_n_tokens(llama_model_get_vocab(model)); }

    /* Logits of all tokens, or none if it failed. */
    std::vector<float> decode(const std::vector<token_at> &tokens)
    {
        llama_batch b = llama_batch_init((int)tokens.size(), 0, 1);
        b.n_tokens = (int)tokens.size();
        for (int i = 0; i < b.n_tokens; i++) {
            b.token[i] = tokens[(size_t)i].token;
            b.pos[i] = tokens[(size_t)i].position;
            b.n_seq_id[i] = 1;
            b.seq_id[i][0] = tokens[(size_t)i].sequence;
            b.logits[i] = 1;
        }
        std::vector<float> logits;
        if (context && llama_decode(context, b) == 0)
            for (int i = 0; i < b.n_tokens; i++) {
                const float *row = llama_get_logits_ith(context, i);
                logits.insert(logits.end(), row, row + n_vocab());
            }
        llama_batch_free(b);
        return logits;
    }
};

/* KL divergence of two rows of logits, in nats. */
inline double divergence(const float *x, const float *y, int n)
{
    double max_x = x[0], max_y = y[0], sum_x = 0.0, sum_y = 0.0, kl = 0.0;
    for (int i = 1; i < n; i++) {
        max_x = std::fmax(max_x, x[i]);
        max_y = std::fmax(max_y, y[i]);
    }
    for (int i = 0; i < n; i++) {
        sum_x += std::exp(x[i] - max_x);
        sum_y += std::exp(y[i] - max_y);
    }
    for (int i = 0; i < n; i++) {
        const double p = x[i] - max_x - std::log(sum_x), q = y[i] - max_y - std::log(sum_y);
        kl += std::exp(p) * (p - q);
    }
    return kl;
}
