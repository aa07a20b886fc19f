/* Reads a profile of a model: a GGUF file that says, for each layer, by which centre and which scales of channels its
 * keys are stored, and, if it has a plan, in which formats. bench/models/measure.py --profile writes it.
 *
 *     general.architecture = "tqkv", tqkv.version = 1, tqkv.layer_count, then
 *     tqkv.key_formats, tqkv.value_formats: a name for each layer; both or none
 *     tqkv.hash: XXH3 of the whole file in which these eight bytes are zero
 *     blk.N.key_center, blk.N.key_scale: floats [n_kv_heads][head_dim]
 *
 * profile_desc fills in the formats of a layer's cache. Give centre and scale to the desc, too:
 * key_center and key_scale. */
#ifndef PROFILE_H
#define PROFILE_H

#define XXH_INLINE_ALL
#include "data_file.h"
#include "tqkv.h"
#include <xxhash.h>

enum { PROFILE_VERSION = 1, PROFILE_MAX_LAYERS = 4096, PROFILE_MAX_HEADS = 4096 };

typedef struct profile_layer {
    int n_kv_heads, head_dim;
    float *center, *channel_scale;        /* [n_kv_heads][head_dim] */
    tqkv_format key_format, value_format; /* TQKV_FORMAT_DEFAULT: the profile has no plan */
} profile_layer;

typedef struct profile {
    int n_layers;
    profile_layer *layers; /* [n_layers] */
} profile;

static inline void profile_free(profile *p)
{
    for (int i = 0; p->layers && i < p->n_layers; i++) {
        free(p->layers[i].center);
        free(p->layers[i].channel_scale);
    }
    free(p->layers);
    p->layers = NULL;
    p->n_layers = 0;
}

static inline bool profile_has_plan(const profile *p) { return p->n_layers > 0 && p->layers[0].key_format; }

/* Without a plan the formats of caches are the caller's again. */
static inline void profile_forget_plan(profile *p)
{
    for (int i = 0; i < p->n_layers; i++) p->layers[i].key_format = p->layers[i].value_format = TQKV_FORMAT_DEFAULT;
}

/* The plan's formats for the cache of a layer, whose shape `desc` has; without a plan they stay. Returns NULL, or why
   the profile does not fit; then desc stays as it is. */
static inline const char *profile_desc(const profile *p, int index, tqkv_cache_desc *desc)
{
    if (index < 0 || index >= p->n_layers) return "is the profile of a model with fewer layers";
    const profile_layer *layer = &p->layers[index];
    if (layer->head_dim != desc->head_dim || layer->n_kv_heads != desc->n_kv_heads)
        return "is the profile of a model with other heads";
    if (!profile_has_plan(p)) return NULL;
    desc->key_format = layer->key_format;
    desc->value_format = desc->shared ? layer->key_format : layer->value_format;
    return NULL;
}

typedef struct profile_reader {
    data_file file;
    profile *out;
    uint64_t n_tensors, n_fields, hash;
    uint32_t version, alignment;
    size_t hash_at; /* 0: not found */
    bool is_profile, no_memory;
} profile_reader;

static inline uint64_t profile_u64(data_file *file)
{
    const uint64_t low = data_file_u32(file);
    return low | (uint64_t)data_file_u32(file) << 32;
}

/* A string of GGUF. `size` is 0, and the bytes are NULL, past the end. */
static inline const char *profile_string(data_file *file, size_t *size)
{
    const uint64_t length = profile_u64(file);
    const unsigned char *bytes = length <= SIZE_MAX ? data_file_take(file, (size_t)length, 1) : NULL;
    if (!bytes) file->failed = true;
    *size = bytes ? (size_t)length : 0;
    return (const char *)bytes;
}

static inline bool profile_is(const char *bytes, size_t size, const char *text)
{
    return size == strlen(text) && memcmp(bytes, text, size) == 0;
}

/* GGUF's types of values: 4 is u32, 8 a string, 9 an array, 10 u64. */
enum { PROFILE_U32 = 4, PROFILE_STRING = 8, PROFILE_ARRAY = 9, PROFILE_U64 = 10 };

static inline size_t profile_value_size(uint32_t type)
{
    static const unsigned char sizes[13] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < 13 ? sizes[type] : 0;
}

/* Skips a value that this reader does not know. */
static inline void profile_skip(data_file *file, uint32_t type)
{
    uint64_t count = 1;
    size_t size;
    if (type == PROFILE_ARRAY) {
        type = data_file_u32(file);
        count = profile_u64(file);
    }
    if (type == PROFILE_STRING) {
        for (; count > 0 && !file->failed; count--) profile_string(file, &size);
    } else if (profile_value_size(type) == 0 || count > SIZE_MAX) {
        file->failed = true;
    } else {
        data_file_take(file, (size_t)count, profile_value_size(type));
    }
}

static inline tqkv_format profile_format(data_file *file)
{
    char name[16] = {0};
    size_t size;
    const char *bytes = profile_string(file, &size);
    if (bytes && size < sizeof name) memcpy(name, bytes, size);
    const tqkv_format format = tqkv_format_from_name(name);
    if (format == TQKV_FORMAT_DEFAULT) file->failed = true;
    return format;
}

/* The names of formats, an array of strings with one for each layer. */
static inline void profile_formats(profile_reader *r, uint32_t type, bool is_key)
{
    data_file *file = &r->file;
    if (type != PROFILE_ARRAY || data_file_u32(file) != PROFILE_STRING || r->out->n_layers == 0 ||
        profile_u64(file) != (uint64_t)r->out->n_layers)
        file->failed = true;
    for (int i = 0; i < r->out->n_layers && !file->failed; i++) {
        profile_layer *layer = &r->out->layers[i];
        *(is_key ? &layer->key_format : &layer->value_format) = profile_format(file);
    }
}

static inline void profile_layers(profile_reader *r)
{
    const int n = data_file_count(&r->file, 1, PROFILE_MAX_LAYERS);
    if (r->out->layers) r->file.failed = true; /* named twice */
    if (r->file.failed) return;
    r->out->layers = (profile_layer *)calloc((size_t)n, sizeof *r->out->layers);
    r->no_memory = !r->out->layers;
    r->out->n_layers = r->out->layers ? n : 0;
}

static inline void profile_field(profile_reader *r)
{
    data_file *file = &r->file;
    size_t size, text_size;
    const char *name = profile_string(file, &size);
    const uint32_t type = data_file_u32(file);
    if (file->failed) return;
    if (type == PROFILE_U32 && profile_is(name, size, "tqkv.version")) {
        r->version = data_file_u32(file);
    } else if (type == PROFILE_U32 && profile_is(name, size, "tqkv.layer_count")) {
        profile_layers(r);
    } else if (type == PROFILE_U32 && profile_is(name, size, "general.alignment")) {
        r->alignment = data_file_u32(file);
    } else if (type == PROFILE_U64 && profile_is(name, size, "tqkv.hash")) {
        r->hash_at = file->at;
        r->hash = profile_u64(file);
    } else if (type == PROFILE_STRING && profile_is(name, size, "general.architecture")) {
        const char *text = profile_string(file, &text_size);
        r->is_profile = text && profile_is(text, text_size, "tqkv");
    } else if (profile_is(name, size, "tqkv.key_formats")) {
        profile_formats(r, type, true);
    } else if (profile_is(name, size, "tqkv.value_formats")) {
        profile_formats(r, type, false);
    } else {
        profile_skip(file, type);
    }
}

/* Which array a tensor's name means: blk.N.key_center or blk.N.key_scale; NULL for any other name. */
static inline float **profile_target(const profile *p, const char *name, size_t size, profile_layer **layer)
{
    int index = 0;
    size_t at = 4;
    if (size < 4 || memcmp(name, "blk.", 4) != 0) return NULL;
    for (; at < size && name[at] >= '0' && name[at] <= '9' && index < p->n_layers; at++)
        index = index * 10 + name[at] - '0';
    if (at == 4 || index >= p->n_layers) return NULL;
    *layer = &p->layers[index];
    if (profile_is(name + at, size - at, ".key_center")) return &(*layer)->center;
    if (profile_is(name + at, size - at, ".key_scale")) return &(*layer)->channel_scale;
    return NULL;
}

/* The floats of a tensor, whose data begin at `data` + offset; its shape must be the layer's. */
static inline void profile_values(profile_reader *r, size_t data, uint64_t offset, float **target, profile_layer *layer,
                                  int head_dim, int n_kv_heads)
{
    data_file at = r->file;
    const size_t count = (size_t)head_dim * (size_t)n_kv_heads;
    const bool first = !layer->center && !layer->channel_scale, is_scale = target == &layer->channel_scale;
    if (*target || (!first && (layer->head_dim != head_dim || layer->n_kv_heads != n_kv_heads)) || data > at.size ||
        offset > at.size - data) {
        r->file.failed = true;
        return;
    }
    layer->head_dim = head_dim;
    layer->n_kv_heads = n_kv_heads;
    at.at = data + (size_t)offset;
    if (count > (at.size - at.at) / sizeof(float)) {
        r->file.failed = true;
        return;
    }
    *target = (float *)malloc(count * sizeof(float));
    r->no_memory |= !*target;
    for (size_t i = 0; *target && i < count; i++) {
        const float x = (*target)[i] = data_file_f32(&at);
        if (!(x - x == 0.0f) || (is_scale && !(x > 0.0f))) r->file.failed = true;
    }
}

/* Where the data begin: behind all names and shapes, aligned. Leaves the reader at the first of them. */
static inline size_t profile_data(profile_reader *r)
{
    const size_t begin = r->file.at;
    size_t size;
    for (uint64_t i = 0; i < r->n_tensors && !r->file.failed; i++) {
        profile_string(&r->file, &size);
        data_file_take(&r->file, data_file_u32(&r->file), 8);
        data_file_take(&r->file, 12, 1);
    }
    const size_t end = r->file.at, past = end % r->alignment;
    r->file.at = begin;
    return past ? end + (r->alignment - past) : end;
}

static inline void profile_tensors(profile_reader *r)
{
    const size_t data = profile_data(r);
    for (uint64_t i = 0; i < r->n_tensors && !r->file.failed && !r->no_memory; i++) {
        size_t size;
        profile_layer *layer = NULL;
        const char *name = profile_string(&r->file, &size);
        float **target = name ? profile_target(r->out, name, size, &layer) : NULL;
        const uint32_t n_dims = data_file_u32(&r->file);
        const uint64_t head_dim = profile_u64(&r->file), n_kv_heads = profile_u64(&r->file);
        const uint32_t type = data_file_u32(&r->file);
        const uint64_t offset = profile_u64(&r->file);
        if (!target || n_dims != 2 || type != 0 || head_dim < 1 || head_dim > TQKV_MAX_HEAD_DIM || n_kv_heads < 1 ||
            n_kv_heads > PROFILE_MAX_HEADS)
            r->file.failed = true;
        else if (!r->file.failed)
            profile_values(r, data, offset, target, layer, (int)head_dim, (int)n_kv_heads);
    }
}

static inline void profile_header(profile_reader *r)
{
    const unsigned char *magic = data_file_take(&r->file, 4, 1);
    if (!magic || memcmp(magic, "GGUF", 4) != 0 || data_file_u32(&r->file) != 3) r->file.failed = true;
    r->n_tensors = profile_u64(&r->file);
    r->n_fields = profile_u64(&r->file);
    r->alignment = 32;
    for (uint64_t i = 0; i < r->n_fields && !r->file.failed && !r->no_memory; i++) profile_field(r);
    if (!r->is_profile || r->alignment == 0 || r->alignment > 1 << 16) r->file.failed = true;
}

static inline bool profile_is_whole(const profile_reader *r)
{
    if (r->file.failed || r->out->n_layers == 0 || !r->hash_at) return false;
    for (int i = 0; i < r->out->n_layers; i++) {
        const profile_layer *layer = &r->out->layers[i];
        if (!layer->center || !layer->channel_scale || !layer->key_format != !layer->value_format) return false;
    }
    memset(r->file.bytes + r->hash_at, 0, 8);
    return XXH3_64bits(r->file.bytes, r->file.size) == r->hash;
}

/* Reads a profile out of the bytes of a file, whose hash it overwrites by zeros. TQKV_CORRUPT: damaged, or no profile;
   TQKV_UNSUPPORTED: of a newer version; then, and without memory, *out is empty. The caller frees it. */
static inline tqkv_result profile_parse(unsigned char *bytes, size_t size, profile *out)
{
    profile_reader r;
    memset(&r, 0, sizeof r);
    memset(out, 0, sizeof *out);
    r.file.bytes = bytes;
    r.file.size = size;
    r.out = out;
    profile_header(&r);
    const bool newer = r.is_profile && r.version > PROFILE_VERSION;
    if (r.version != PROFILE_VERSION) r.file.failed = true;
    if (!r.file.failed && !r.no_memory) profile_tensors(&r);
    if (!r.no_memory && profile_is_whole(&r)) return TQKV_OK;
    profile_free(out);
    return r.no_memory ? TQKV_OUT_OF_MEMORY : newer ? TQKV_UNSUPPORTED : TQKV_CORRUPT;
}

/* The same from a file; TQKV_IO: it cannot be read, or is empty. */
static inline tqkv_result profile_load(const char *path, profile *out)
{
    data_file file;
    memset(out, 0, sizeof *out);
    if (!data_file_open(&file, path)) return TQKV_IO;
    const tqkv_result result = profile_parse(file.bytes, file.size, out);
    free(file.bytes);
    return result;
}

#endif
