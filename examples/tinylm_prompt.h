/* How a session reads its prompt through a cache of prompts on disk. */
#ifndef TINYLM_PROMPT_H
#define TINYLM_PROMPT_H

#include "prompt_cache.h"
#include "tinylm_session.h"

/* The tag stands for the model and all else that decides the bits of keys and values. */
static inline uint64_t session_tag(const session *s)
{
    const model *m = s->m;
    const int settings[] = {s->keys->is_preset, s->keys->preset, s->keys->format, s->values->format,
                            m->exact_first,     m->exact_last,   m->batch};
    uint64_t tag = XXH3_64bits_withSeed(settings, sizeof settings, m->tag);
    for (int i = 0; i < m->n_layers; i++) {
        const model_layer *layer = &m->layers[i];
        const size_t size = sizeof(float) * (size_t)layer->n_kv_heads * (size_t)layer->head_dim;
        if (layer->key_center) tag = XXH3_64bits_withSeed(layer->key_center, size, tag);
        if (layer->key_scale) tag = XXH3_64bits_withSeed(layer->key_scale, size, tag);
    }
    return tag;
}

static inline void say_skipped(void *user, const char *text)
{
    (void)user;
    fprintf(stderr, "tinylm: %s\n", text);
}

/* Blocks end where forward's batches do, so that what is computed comes to the same bits wherever it starts. */
static inline prompt_cache session_prompts(const session *s, const options *o)
{
    prompt_cache p = {.folder = o->folder, .tag = session_tag(s), .say = say_skipped};
    const int batch = s->m->batch ? s->m->batch : BATCH;
    p.block = (BATCH + batch - 1) / batch * batch;
    p.limit = (uint64_t)o->limit << 20;
    return p;
}

/* prefill of a new session: loads what there is of the text and computes the rest. Returns how many positions it
 * loaded. */
static inline int session_read_prompt(session *s, const prompt_cache *p, const unsigned char *text, int n)
{
    const int n_layers = s->m->n_layers;
    tqkv_cache_desc descs[MAX_LAYERS];
    tqkv_cache *loaded[MAX_LAYERS];
    int32_t *tokens = (int32_t *)malloc(sizeof *tokens * ((size_t)n + 1));
    if (!tokens) stop("prompt", "out of memory");
    for (int i = 0; i < n; i++) tokens[i] = text[i];
    for (int i = 0; i < n_layers; i++) descs[i] = session_desc(s, &s->m->layers[i]);
    const int found = prompt_cache_load(p, tokens, n, descs, n_layers, loaded);
    for (int i = 0; found && i < n_layers; i++) {
        tqkv_cache_destroy(s->caches[i]);
        s->caches[i] = loaded[i];
    }
    s->end = found;
    while (s->end < n) {
        prefill(s, text + s->end, prompt_cache_next(p, s->end, n) - s->end);
        prompt_cache_save(p, tokens, s->end, s->caches, n_layers);
    }
    free(tokens);
    return found;
}

#endif
