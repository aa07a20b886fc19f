/* make fuzz FUZZERS=profile SECONDS=60; AFL++: make fuzz-afl FUZZERS=profile. Profiles of models, the files that
   examples/profile.h reads. */
#include "fuzz.h"

#include "examples/profile_write.h"

/* Without its hash no changed file would get beyond the last check: where the place is found, it is corrected. */
static void correct_hash(uint8_t *bytes, size_t size)
{
    static const char name[] = "tqkv.hash";
    const size_t behind = sizeof name - 1 + 4; /* the name and the number of its type */
    for (size_t at = 0; at + behind + 8 <= size; at++) {
        if (memcmp(bytes + at, name, sizeof name - 1) != 0) continue;
        memset(bytes + at + behind, 0, 8);
        const uint64_t hash = XXH3_64bits(bytes, size);
        for (size_t i = 0; i < 8; i++) bytes[at + behind + i] = (uint8_t)(hash >> (8 * i));
        return;
    }
}

static void check_layer(const profile_layer *layer, const profile_layer *again)
{
    const size_t n = profile_count(layer);
    CHECK(layer->head_dim > 0 && layer->n_kv_heads > 0, "%d heads of %d", layer->n_kv_heads, layer->head_dim);
    for (size_t i = 0; i < n; i++) {
        CHECK(fuzz_is_finite(layer->center[i]), "centre %d", (int)i);
        CHECK(fuzz_is_finite(layer->channel_scale[i]) && layer->channel_scale[i] > 0, "scale %d", (int)i);
    }
    CHECK(tqkv_format_name(layer->key_format) && tqkv_format_name(layer->value_format), "formats");
    CHECK(again->head_dim == layer->head_dim && again->n_kv_heads == layer->n_kv_heads &&
              again->key_format == layer->key_format && again->value_format == layer->value_format &&
              !memcmp(again->center, layer->center, n * sizeof(float)) &&
              !memcmp(again->channel_scale, layer->channel_scale, n * sizeof(float)),
          "written and read again, it is another");
}

/* A profile that was read has values that a cache takes, and is the same after it was written. */
static void check_profile(const profile *read)
{
    profile again;
    size_t size = 0;
    uint8_t *written = profile_bytes_of(read, &size);
    if (!written) return;
    CHECK_RESULT(profile_parse(written, size, &again), TQKV_OK);
    CHECK(again.n_layers == read->n_layers, "%d layers, not %d", again.n_layers, read->n_layers);
    for (int i = 0; i < read->n_layers; i++) check_layer(&read->layers[i], &again.layers[i]);
    profile_free(&again);
    free(written);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    test_failure_aborts = true;
    for (int corrected = 0; corrected < 2; corrected++) {
        profile read;
        uint8_t *copy = (uint8_t *)test_alloc(size);
        if (size) memcpy(copy, bytes, size);
        if (corrected) correct_hash(copy, size);
        const tqkv_result result = profile_parse(copy, size, &read);
        CHECK(result == TQKV_OK || result == TQKV_CORRUPT || result == TQKV_UNSUPPORTED, "%s",
              tqkv_result_string(result));
        CHECK((result == TQKV_OK) == (read.layers != NULL) && (read.layers != NULL) == (read.n_layers > 0), "%d layers",
              read.n_layers);
        if (result == TQKV_OK) check_profile(&read);
        profile_free(&read);
        free(copy);
    }
    return 0;
}
