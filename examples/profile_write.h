/* Writes a profile of a model, the file that profile.h reads and describes. */
#ifndef PROFILE_WRITE_H
#define PROFILE_WRITE_H

#include "profile.h"

enum { PROFILE_ALIGNMENT = 32 }; /* of a tensor's floats; GGUF's own where a file says nothing */

typedef struct profile_writer {
    unsigned char *bytes;
    size_t size, room;
    bool no_memory;
} profile_writer;

static inline void profile_add(profile_writer *w, const void *bytes, size_t n)
{
    if (!w->no_memory && n > w->room - w->size) {
        const size_t room = 2 * (w->size + n);
        unsigned char *larger = (unsigned char *)realloc(w->bytes, room);
        w->no_memory = !larger;
        if (larger) w->bytes = larger;
        if (larger) w->room = room;
    }
    if (w->no_memory || n == 0) return;
    memcpy(w->bytes + w->size, bytes, n);
    w->size += n;
}

static inline void profile_add_number(profile_writer *w, uint64_t number, int n_bytes)
{
    for (int i = 0; i < n_bytes; i++) {
        const unsigned char byte = (unsigned char)(number >> 8 * i);
        profile_add(w, &byte, 1);
    }
}

static inline void profile_add_string(profile_writer *w, const char *text)
{
    profile_add_number(w, strlen(text), 8);
    profile_add(w, text, strlen(text));
}

static inline void profile_add_field(profile_writer *w, const char *name, uint32_t type)
{
    profile_add_string(w, name);
    profile_add_number(w, type, 4);
}

static inline void profile_add_formats(profile_writer *w, const profile *p, bool is_key)
{
    profile_add_field(w, is_key ? "tqkv.key_formats" : "tqkv.value_formats", PROFILE_ARRAY);
    profile_add_number(w, PROFILE_STRING, 4);
    profile_add_number(w, (uint64_t)p->n_layers, 8);
    for (int i = 0; i < p->n_layers; i++)
        profile_add_string(w, tqkv_format_name(is_key ? p->layers[i].key_format : p->layers[i].value_format));
}

static inline size_t profile_count(const profile_layer *layer)
{
    return (size_t)layer->n_kv_heads * (size_t)layer->head_dim;
}

static inline size_t profile_aligned(size_t n)
{
    return (n + PROFILE_ALIGNMENT - 1) / PROFILE_ALIGNMENT * PROFILE_ALIGNMENT;
}

/* Names, shapes and places: of each layer the centre, then the scale. */
static inline void profile_add_tensors(profile_writer *w, const profile *p)
{
    uint64_t offset = 0;
    for (int i = 0; i < 2 * p->n_layers; i++) {
        const profile_layer *layer = &p->layers[i / 2];
        char name[32];
        snprintf(name, sizeof name, "blk.%d.%s", i / 2, i % 2 ? "key_scale" : "key_center");
        profile_add_string(w, name);
        profile_add_number(w, 2, 4);
        profile_add_number(w, (uint64_t)layer->head_dim, 8);
        profile_add_number(w, (uint64_t)layer->n_kv_heads, 8);
        profile_add_number(w, 0, 4); /* floats */
        profile_add_number(w, offset, 8);
        offset += profile_aligned(sizeof(float) * profile_count(layer));
    }
}

static inline void profile_align(profile_writer *w)
{
    while (!w->no_memory && w->size % PROFILE_ALIGNMENT) profile_add_number(w, 0, 1);
}

static inline void profile_add_values(profile_writer *w, const profile *p)
{
    for (int i = 0; i < 2 * p->n_layers; i++) {
        const profile_layer *layer = &p->layers[i / 2];
        const float *values = i % 2 ? layer->channel_scale : layer->center;
        profile_align(w);
        for (size_t j = 0; j < profile_count(layer); j++) {
            uint32_t bits;
            memcpy(&bits, &values[j], 4);
            profile_add_number(w, bits, 4);
        }
    }
    profile_align(w);
}

/* The file of a profile as new bytes, which the caller frees; NULL without memory. */
static inline unsigned char *profile_bytes_of(const profile *p, size_t *size)
{
    profile_writer w = {NULL, 0, 0, false};
    const bool has_plan = profile_has_plan(p);
    profile_add(&w, "GGUF", 4);
    profile_add_number(&w, 3, 4);
    profile_add_number(&w, 2 * (uint64_t)p->n_layers, 8);
    profile_add_number(&w, has_plan ? 6 : 4, 8);
    profile_add_field(&w, "general.architecture", PROFILE_STRING);
    profile_add_string(&w, "tqkv");
    profile_add_field(&w, "tqkv.version", PROFILE_U32);
    profile_add_number(&w, PROFILE_VERSION, 4);
    profile_add_field(&w, "tqkv.layer_count", PROFILE_U32);
    profile_add_number(&w, (uint64_t)p->n_layers, 4);
    for (int i = 0; has_plan && i < 2; i++) profile_add_formats(&w, p, i == 0);
    profile_add_field(&w, "tqkv.hash", PROFILE_U64);
    const size_t hash_at = w.size;
    profile_add_number(&w, 0, 8);
    profile_add_tensors(&w, p);
    profile_add_values(&w, p);
    if (w.no_memory) {
        free(w.bytes);
        return NULL;
    }
    *size = w.size;
    w.size = hash_at;
    profile_add_number(&w, XXH3_64bits(w.bytes, *size), 8);
    return w.bytes;
}

/* TQKV_IO: the file cannot be written. */
static inline tqkv_result profile_save(const char *path, const profile *p)
{
    size_t size = 0;
    unsigned char *bytes = profile_bytes_of(p, &size);
    if (!bytes) return TQKV_OUT_OF_MEMORY;
    FILE *file = fopen(path, "wb");
    bool good = file && fwrite(bytes, 1, size, file) == size;
    if (file) good = fclose(file) == 0 && good;
    free(bytes);
    return good ? TQKV_OK : TQKV_IO;
}

#endif
