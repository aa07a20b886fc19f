/* A stand-in for llama.cpp and the scheduler: a pool of cells with the rows as they were, which gives a cache the rows,
 * cells and masks of graphs, and compares its attention with plain sums. */
#pragma once
#include "cache.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

using namespace tqkv_llama;

extern int n_bad; /* checks of the present case that did not hold */

#define CHECK(holds) \
    do { \
        if (!(holds)) { \
            if (n_bad++ < 5) printf("%s:%d: %s\n", __FILE__, __LINE__, #holds); \
        } \
    } while (0)

enum { DIM = 64, HEADS = 2, GROUP = 2, ROW = HEADS * DIM };

const uint16_t SEEN = 0, HIDDEN = 0xfc00;

inline options options_of(const char *name, bool calibrate)
{
    setenv("TQKV", name, 1);
    setenv("TQKV_LOG", "0", 1);
    reset_options();
    options o = get_options();
    if (!calibrate) o.preset.calibrate = 0;
    return o;
}

inline float noise(uint32_t *state)
{
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) {
        *state = *state * 1664525u + 1013904223u;
        sum += (float)(*state >> 8) / 16777216.0f;
    }
    return sum;
}

inline std::vector<float> row_of(int text, int position, int which, float bias)
{
    uint32_t state = (uint32_t)(text * 100003 + position * 31 + which * 7 + 1) * 2654435761u;
    std::vector<float> row(ROW);
    for (int i = 0; i < ROW; i++) row[(size_t)i] = noise(&state) + (which == KEYS && i % 16 == 3 ? bias : 0.0f);
    return row;
}

/* ---- The stand-in: an engine with a pool of cells, and what it has in each ---- */

struct token {
    int text, position, sequence;
};

struct engine {
    options o;
    cache rows;
    layer *l;
    float bias;
    int n_cells;
    struct cell {
        int position = -1;
        std::vector<int> sequences;
        std::vector<float> key, value;
    };
    std::vector<cell> cells;
    double worst = 0.0;

    explicit engine(const char *preset, bool calibrate = true, int n = 1024, float key_bias = 0.0f)
        : o(options_of(preset, calibrate)), rows(o, n, n, TQKV_TYPE_F16), l(rows.find(0)), bias(key_bias), n_cells(n),
          cells((size_t)n)
    {
        l->key_dim = l->value_dim = DIM;
        l->n_heads = HEADS;
        CHECK(rows.open(l));
    }

    bool sees(const token &t, const cell &c) const
    {
        return c.position >= 0 && c.position <= t.position &&
               std::find(c.sequences.begin(), c.sequences.end(), t.sequence) != c.sequences.end();
    }

    std::vector<int32_t> place(const std::vector<token> &tokens, std::vector<float> *keys, std::vector<float> *values)
    {
        std::vector<int32_t> at;
        for (int32_t i = 0; i < n_cells && at.size() < tokens.size(); i++)
            if (cells[(size_t)i].sequences.empty()) at.push_back(i);
        CHECK(at.size() == tokens.size());
        for (size_t i = 0; i < tokens.size(); i++) {
            const token &t = tokens[i];
            cell &c = cells[(size_t)at[i]];
            c.position = t.position;
            c.sequences = {t.sequence};
            c.key = row_of(t.text, t.position, KEYS, bias);
            c.value = row_of(t.text, t.position, VALUES, 0.0f);
            keys->insert(keys->end(), c.key.begin(), c.key.end());
            values->insert(values->end(), c.value.begin(), c.value.end());
        }
        return at;
    }

    /* One query head against what its token sees. */
    double error_of(const token &t, int head, const float *q, const float *out) const
    {
        double sum = 0.0, error = 0.0, size = 0.0, mean[DIM] = {0.0};
        for (const cell &c : cells) {
            if (!sees(t, c)) continue;
            double score = 0.0;
            const size_t at = (size_t)(head / GROUP * DIM);
            for (int i = 0; i < DIM; i++) score += (double)q[i] * c.key[at + (size_t)i];
            const double w = exp(score / sqrt((double)DIM));
            sum += w;
            for (int i = 0; i < DIM; i++) mean[i] += w * c.value[at + (size_t)i];
        }
        for (int i = 0; i < DIM; i++) {
            const double expected = mean[i] / sum;
            error += (out[i] - expected) * (out[i] - expected);
            size += expected * expected;
        }
        return sqrt(error / size);
    }

    /* A graph: rows to their cells, then attention. */
    void run(const std::vector<token> &tokens)
    {
        std::vector<float> keys, values, q, out(tokens.size() * ROW * GROUP);
        const auto at = place(tokens, &keys, &values);
        const int n = (int)tokens.size();
        CHECK(rows.write(l, KEYS, {keys.data(), TQKV_TYPE_F32, {ROW, DIM}}, at.data(), n) == TQKV_OK);
        CHECK(rows.write(l, VALUES, {values.data(), TQKV_TYPE_F32, {ROW, DIM}}, at.data(), n) == TQKV_OK);
        std::vector<uint16_t> mask(tokens.size() * (size_t)n_cells, HIDDEN);
        uint32_t state = (uint32_t)tokens[0].position + 17u;
        for (size_t i = 0; i < tokens.size(); i++) {
            for (size_t c = 0; c < cells.size(); c++)
                if (sees(tokens[i], cells[c])) mask[i * cells.size() + c] = SEEN;
            for (int j = 0; j < ROW * GROUP; j++) q.push_back(0.3f * noise(&state));
        }
        const mask_view m = {mask.data(), (size_t)n_cells * 2, 0, n_cells, n, 1, 0, n_cells};
        attention_call call = {};
        call.queries = q.data();
        call.out = out.data();
        call.query_strides = {ROW * GROUP, DIM};
        call.n_heads = HEADS * GROUP;
        call.scale = 1.0f / sqrtf((float)DIM);
        CHECK(rows.attend(l, m, call) == TQKV_OK);
        for (size_t i = 0; i < tokens.size(); i++)
            for (int h = 0; h < HEADS * GROUP; h++) {
                const size_t offset = (i * HEADS * GROUP + (size_t)h) * DIM;
                worst = std::max(worst, error_of(tokens[i], h, &q[offset], &out[offset]));
            }
    }

    void speak(int text, int from, int n, int sequence)
    {
        std::vector<token> tokens;
        for (int i = from; i < from + n; i++) tokens.push_back({text, i, sequence});
        run(tokens);
    }

    void remove(int sequence, int from)
    {
        for (cell &c : cells)
            if (c.position >= from)
                c.sequences.erase(std::remove(c.sequences.begin(), c.sequences.end(), sequence), c.sequences.end());
    }

    std::vector<int32_t> cells_of(int sequence) const
    {
        std::vector<int32_t> list;
        for (int32_t i = 0; i < n_cells; i++)
            if (std::count(cells[(size_t)i].sequences.begin(), cells[(size_t)i].sequences.end(), sequence))
                list.push_back(i);
        return list;
    }

    double take_worst()
    {
        const double w = worst;
        worst = 0.0;
        return w;
    }
};
