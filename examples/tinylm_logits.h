/* Functions of a model's logits: the likeliest byte, a random byte, probabilities, and the difference of two models. */
#ifndef TINYLM_LOGITS_H
#define TINYLM_LOGITS_H

#include "tinylm_model.h"

static int largest(const float *logits)
{
    int best = 0;
    for (int i = 1; i < VOCABULARY; i++) best = logits[i] > logits[best] ? i : best;
    return best;
}

static inline void log_softmax(float *logits)
{
    double sum = 0, top = logits[largest(logits)];
    for (int i = 0; i < VOCABULARY; i++) sum += exp(logits[i] - top);
    for (int i = 0; i < VOCABULARY; i++) logits[i] = (float)(logits[i] - top - log(sum));
}

/* Uniform in [0, 1) from a 64-bit counter generator (splitmix64). */
static double random_unit(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) / 9007199254740992.0;
}

static inline unsigned char choose(const float *logits, float temperature, uint64_t *seed)
{
    double weights[VOCABULARY], sum = 0, top = logits[largest(logits)];
    if (temperature <= 0) return (unsigned char)largest(logits);
    for (int i = 0; i < VOCABULARY; i++) sum += weights[i] = exp((logits[i] - top) / temperature);
    double point = random_unit(seed) * sum;
    int i = 0;
    while (i < VOCABULARY - 1 && (point -= weights[i]) >= 0) i++;
    return (unsigned char)i;
}

/* Means over all bytes: bits of the actual byte, KL divergence from the reference, agreement on the likeliest byte. */
static inline void compare(const float *got, const float *reference, const unsigned char *text, int n, double means[3])
{
    means[0] = means[1] = means[2] = 0;
    for (int i = 0; i < n; i++, got += VOCABULARY, reference += VOCABULARY) {
        means[0] -= got[text[i + 1]] / log(2) / n;
        for (int b = 0; b < VOCABULARY; b++)
            means[1] += exp((double)reference[b]) * ((double)reference[b] - got[b]) / n;
        means[2] += (largest(got) == largest(reference)) / (double)n;
    }
}

#endif
