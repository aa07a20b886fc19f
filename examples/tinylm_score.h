/* How far a cache moves the model's predictions: KL divergence from those with an f32 cache, over windows of text. */
#ifndef TINYLM_SCORE_H
#define TINYLM_SCORE_H

#include "tinylm_logits.h"
#include "tinylm_session.h"

typedef struct scoring {
    model *m;
    unsigned char *text;
    int n_windows;
    float *reference, *logits; /* [n_windows * WINDOW_BYTES][VOCABULARY], logarithms of probabilities */
    double reference_bits;
} scoring;

static scoring scoring_open(model *m, const char *path, int n_windows)
{
    data_file text;
    if (!data_file_open(&text, path)) stop(path, "cannot be read");
    if (text.size < (size_t)n_windows * WINDOW_BYTES + 1) stop(path, "is too short for so many windows");
    size_t count = (size_t)n_windows * WINDOW_BYTES * VOCABULARY;
    return (scoring){m, text.bytes, n_windows, floats(count), floats(count), 0};
}

static void scoring_close(scoring *job)
{
    free(job->reference);
    free(job->logits);
    free(job->text);
}

/* Every window starts from a new cache, which has learned nothing, and is one call of forward. Returns the bytes and,
 * if `bits` is given, the bits a value of such a cache. */
static double score_windows(const scoring *job, const format_choice *keys, const format_choice *values, float *logits,
                            double *bits)
{
    char label[16];
    double bytes = 0;
    snprintf(label, sizeof label, "%s %s", keys->name, values->name);
    for (int w = 0; w < job->n_windows; w++) {
        session s;
        float *rows = logits + (size_t)w * WINDOW_BYTES * VOCABULARY;
        progress(label, w, job->n_windows);
        session_create(&s, job->m, keys, values, WINDOW_BYTES);
        forward(&s, job->text + w * WINDOW_BYTES, WINDOW_BYTES, rows);
        for (int i = 0; i < WINDOW_BYTES; i++) log_softmax(rows + i * VOCABULARY);
        bytes = session_bytes(&s, bits);
        session_destroy(&s);
    }
    progress(label, job->n_windows, job->n_windows);
    return bytes;
}

#endif
