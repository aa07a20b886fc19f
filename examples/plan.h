/* Formats of each layer's keys and values for a number of bytes: the bytes go, step by step, where each takes most of
 * the loss away. Losses of streams (the keys or the values of a layer) add up. */
#ifndef PLAN_H
#define PLAN_H

#include "tqkv.h"
#include <string.h>

/* By bits. TQ8 is not here: I8 takes the same room with less error. */
enum { PLAN_FORMATS = 7 };
static const tqkv_format plan_formats[PLAN_FORMATS] = {TQKV_TQ2, TQKV_TQ3, TQKV_TQ4, TQKV_TQ5,
                                                       TQKV_TQ6, TQKV_I8,  TQKV_F16};

/* What a stream loses and takes with each of plan_formats, and the index of the one that is chosen. */
typedef struct plan_stream {
    double loss[PLAN_FORMATS], bytes[PLAN_FORMATS];
    int chosen;
} plan_stream;

static inline double plan_bytes(const plan_stream *streams, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += streams[i].bytes[streams[i].chosen];
    return sum;
}

static inline double plan_loss(const plan_stream *streams, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += streams[i].loss[streams[i].chosen];
    return sum;
}

/* Chooses a format for each stream, together at most so many bytes. If the shortest formats take more, chooses them and
   returns false. A step over several formats may gain more for each byte than the next one alone. */
static inline bool plan_choose(plan_stream *streams, int n, double bytes)
{
    for (int i = 0; i < n; i++) streams[i].chosen = 0;
    double room = bytes - plan_bytes(streams, n);
    if (!(room >= 0)) return false;
    for (;;) {
        double most = 0;
        int best = -1, to = 0;
        for (int i = 0; i < n; i++)
            for (int f = streams[i].chosen + 1; f < PLAN_FORMATS; f++) {
                const plan_stream *s = &streams[i];
                const double more = s->bytes[f] - s->bytes[s->chosen], less = s->loss[s->chosen] - s->loss[f];
                if (more > room || !(less > most * more)) continue;
                most = more > 0 ? less / more : less;
                best = i;
                to = f;
            }
        if (best < 0) return true;
        room -= streams[best].bytes[to] - streams[best].bytes[streams[best].chosen];
        streams[best].chosen = to;
    }
}

/* Bits of a value, norms included; 0 where there is no such store. */
static inline double plan_bits(tqkv_format format, int head_dim)
{
    tqkv_store one;
    memset(&one, 0, sizeof one);
    one.format = format;
    one.head_dim = head_dim;
    one.n_kv_heads = one.capacity = 1;
    return 8.0 * (double)(tqkv_codes_size(&one) + tqkv_norms_size(&one)) / head_dim;
}

/* A layer's cache at so many positions, with a preset's exact ends. A window (0: none) and `chunk` positions, which are
   appended at a time, are all that its layer keeps. */
static inline tqkv_cache_desc plan_cache(int head_dim, int value_dim, int n_kv_heads, int context, int window,
                                         int chunk)
{
    tqkv_cache_desc desc = tqkv_cache_preset(TQKV_SMALL);
    desc.head_dim = head_dim;
    desc.value_dim = value_dim;
    desc.n_kv_heads = desc.n_heads = n_kv_heads;
    desc.ring = window > 0 && context - chunk > window;
    desc.capacity = desc.ring ? window + chunk : context;
    desc.window = window;
    desc.calibrate = 0;                  /* what it learns from is there for a while only */
    if (desc.ring) desc.exact_first = 0; /* its later queries do not see them */
    return desc;
}

/* What a cache of that desc takes with a format for its keys (or its values) beside halves for the others. */
static inline double plan_bytes_with(const tqkv_cache_desc *desc, bool is_key, tqkv_format format)
{
    tqkv_cache_desc one = *desc;
    tqkv_cache *cache;
    one.key_format = is_key ? format : TQKV_F16;
    one.value_format = is_key ? TQKV_F16 : format;
    if (tqkv_cache_create(&one, &cache) != TQKV_OK) return -1;
    const double bytes = (double)tqkv_cache_bytes(cache);
    tqkv_cache_destroy(cache);
    return bytes;
}

/* Fills in the bytes of the keys (streams[0]) and the values (streams[1]) of a cache, exact ends and norms included.
   Returns false if tqkv refuses such a cache, or memory is short. */
static inline bool plan_measure_bytes(const tqkv_cache_desc *desc, plan_stream *streams)
{
    const double halves = plan_bytes_with(desc, true, TQKV_F16);
    const int value_dim = desc->value_dim ? desc->value_dim : desc->head_dim;
    const double keys = halves * desc->head_dim / (desc->head_dim + value_dim);
    bool good = halves >= 0;
    for (int side = 0; side < 2; side++)
        for (int f = 0; f < PLAN_FORMATS && good; f++) {
            const double both = plan_bytes_with(desc, side == 0, plan_formats[f]);
            streams[side].bytes[f] = both - (side ? keys : halves - keys);
            good = both >= 0;
        }
    return good;
}

#endif
