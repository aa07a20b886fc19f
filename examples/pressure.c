/* A cache that gives up bits while a model writes and memory gets short: I8 keys and values, then I8 and TQ4, TQ4 and
 * TQ4, TQ4 and TQ3. tqkv_cache_fork with other formats converts code to code: no key or value is computed again.
 *   pressure
 * Each stage prints its divergence from floats, beside that of a cache which had the stage's formats from the start. */
#define _POSIX_C_SOURCE  200809L
#define _DARWIN_C_SOURCE /* the number of processors, which POSIX does not give */
#include "tqkv.h"
#include "tinylm_logits.h"
#include "tinylm_session.h"

enum { PROMPT = 384, STAGE = 96, STAGES = 4, LENGTH = PROMPT + STAGES * STAGE };

static const char *const stages[STAGES][2] = {{"i8", "i8"}, {"i8", "tq4"}, {"tq4", "tq4"}, {"tq4", "tq3"}};

/* The caches in other formats, one layer after the other: beside the old caches there is room for one new layer. */
static void give_up_bits(session *s, const format_choice *keys, const format_choice *values)
{
    tqkv_cache_desc desc = {.key_format = keys->format, .value_format = values->format};
    for (int i = 0; i < s->m->n_layers; i++) {
        tqkv_cache *smaller;
        check(tqkv_cache_fork(s->caches[i], &desc, &smaller), "fork");
        tqkv_cache_destroy(s->caches[i]);
        s->caches[i] = smaller;
    }
    s->keys = keys;
    s->values = values;
}

/* Continues the text behind a prompt, byte by byte, in caches that get smaller. logits: [LENGTH][VOCABULARY] */
static void write_under_pressure(model *m, unsigned char *text, float *logits, double *kib)
{
    session s;
    uint64_t seed = 1;
    session_create(&s, m, find_format(stages[0][0]), find_format(stages[0][1]), LENGTH);
    forward(&s, text, PROMPT - 1, logits);
    for (int i = PROMPT - 1; i + 1 < LENGTH; i++) {
        const int stage = (i + 1 - PROMPT) / STAGE;
        if ((i + 1 - PROMPT) % STAGE == 0 && stage > 0)
            give_up_bits(&s, find_format(stages[stage][0]), find_format(stages[stage][1]));
        forward(&s, text + i, 1, logits + i * VOCABULARY);
        text[i + 1] = choose(logits + i * VOCABULARY, 0.6f, &seed);
        kib[stage] = session_bytes(&s, NULL) / 1024;
    }
    session_destroy(&s);
}

/* The same text through caches that keep their formats. */
static void read_again(model *m, const char *const pair[2], const unsigned char *text, float *logits)
{
    session s;
    session_create(&s, m, find_format(pair[0]), find_format(pair[1]), LENGTH);
    forward(&s, text, LENGTH - 1, logits);
    session_destroy(&s);
}

static double divergence(float *logits, float *reference, const unsigned char *text, int stage)
{
    double means[3];
    const int first = PROMPT - 1 + stage * STAGE;
    compare(logits + first * VOCABULARY, reference + first * VOCABULARY, text + first, STAGE - 1, means);
    return means[1];
}

int main(void)
{
    static const char *const exact[2] = {"f32", "f32"};
    static unsigned char text[LENGTH + 1];
    options o = parse(1, (char *[]){"pressure", NULL});
    model m;
    data_file file;
    double kib[STAGES];
    float *pressed = floats(LENGTH * VOCABULARY), *whole = floats(LENGTH * VOCABULARY),
          *reference = floats(LENGTH * VOCABULARY);
    if (!model_load(&m, o.model_path, o.n_threads)) stop(o.model_path, "is no model, or damaged");
    if (!data_file_open(&file, o.file) || file.size < PROMPT) stop(o.file, "cannot be read");
    memcpy(text, file.bytes, PROMPT);
    free(file.bytes);
    write_under_pressure(&m, text, pressed, kib);
    read_again(&m, exact, text, reference);
    for (int i = 0; i + 1 < LENGTH; i++) {
        log_softmax(pressed + i * VOCABULARY);
        log_softmax(reference + i * VOCABULARY);
    }
    printf("KL divergence from the f32 cache, nats a byte, %d bytes a stage behind a prompt of %d\n", STAGE, PROMPT);
    printf("%-6s %-6s %8s %12s %12s\n", "#keys", "values", "KiB", "converted", "from start");
    for (int stage = 0; stage < STAGES; stage++) {
        read_again(&m, stages[stage], text, whole);
        for (int i = 0; i + 1 < LENGTH; i++) log_softmax(whole + i * VOCABULARY);
        printf("%-6s %-6s %8.0f %12.6f %12.6f\n", stages[stage][0], stages[stage][1], kib[stage],
               divergence(pressed, reference, text, stage), divergence(whole, reference, text, stage));
    }
    free(pressed);
    free(whole);
    free(reference);
    model_free(&m);
    return 0;
}
