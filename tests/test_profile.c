/* examples/profile.h: profiles that it must read, and every way in which a file may be damaged; profile_write.h. */
#include "examples/profile_write.h"
#include "profile_fixture.h"

/* A copy of the exact size is parsed: parsing changes the bytes, and sanitizers report a read beyond them. */
static tqkv_result parse(const uint8_t *bytes, size_t size, profile *out)
{
    uint8_t *copy = (uint8_t *)test_alloc(size);
    if (size) memcpy(copy, bytes, size);
    const tqkv_result result = profile_parse(copy, size, out);
    free(copy);
    return result;
}

static void check_refused(const uint8_t *bytes, size_t size, const char *what, size_t at)
{
    profile read;
    const tqkv_result result = parse(bytes, size, &read);
    CHECK(result == TQKV_CORRUPT || result == TQKV_UNSUPPORTED, "%s %d: %s", what, (int)at, tqkv_result_string(result));
    CHECK(!read.layers && read.n_layers == 0, "%s %d: something was read", what, (int)at);
}

static void check_read(const profile *read, const profile_made *made)
{
    REQUIRE(read->n_layers == made->n_layers, "%d layers", read->n_layers);
    for (int i = 0; i < read->n_layers; i++) {
        const profile_layer *layer = &read->layers[i];
        REQUIRE(layer->n_kv_heads == made->n_kv_heads && layer->head_dim == made->head_dim, "the shape of layer %d", i);
        for (size_t j = 0; j < (size_t)made->n_kv_heads * (size_t)made->head_dim; j++)
            CHECK(layer->center[j] == profile_value(i, false, j) &&
                      layer->channel_scale[j] == profile_value(i, true, j),
                  "value %d of layer %d", (int)j, i);
        const tqkv_format even = i % 2 ? TQKV_TQ4 : TQKV_I8, odd = i % 2 ? TQKV_I8 : TQKV_TQ4;
        CHECK(layer->key_format == (made->has_plan ? even : TQKV_FORMAT_DEFAULT), "keys of layer %d", i);
        CHECK(layer->value_format == (made->has_plan ? odd : TQKV_FORMAT_DEFAULT), "values of layer %d", i);
    }
}

/* What profile_make's file gives. The caller frees it. */
static profile read_made(const profile_made *made)
{
    profile_bytes file = profile_make(made);
    profile read;
    CHECK_RESULT(parse(file.bytes, file.size, &read), TQKV_OK);
    check_read(&read, made);
    free(file.bytes);
    return read;
}

/* What was read is written again, and read again. */
static void run_written(const void *row)
{
    const profile_made *made = (const profile_made *)row;
    profile first = read_made(made), second;
    size_t size = 0;
    uint8_t *written = profile_bytes_of(&first, &size);
    REQUIRE(written, "no memory");
    CHECK_RESULT(parse(written, size, &second), TQKV_OK);
    check_read(&second, made);
    profile_free(&first);
    profile_free(&second);
    free(written);
    CHECK_RESULT(profile_save("/no/such/folder/profile", &first), TQKV_IO);
}

static void run_damaged(const void *row)
{
    profile_bytes file = profile_make((const profile_made *)row);
    for (size_t size = 0; size < file.size; size++) check_refused(file.bytes, size, "cut to", size);
    for (size_t at = 0; at < file.size; at++)
        for (int bit = 0; bit < 8; bit += 7) {
            file.bytes[at] = (uint8_t)(file.bytes[at] ^ 1 << bit);
            check_refused(file.bytes, file.size, "changed at", at);
            file.bytes[at] = (uint8_t)(file.bytes[at] ^ 1 << bit);
        }
    profile_put_number(&file, 0, 1);
    check_refused(file.bytes, file.size, "longer than", file.size - 1);
    free(file.bytes);
}

/* The place of a text in the file; 0 if it is not there. */
static size_t find(const profile_bytes *file, const char *text)
{
    for (size_t at = 1; at + strlen(text) <= file->size; at++)
        if (!memcmp(file->bytes + at, text, strlen(text))) return at;
    return 0;
}

/* Writes over a part of the file, corrects the hash and expects that result. The file is freed. */
static void check_changed(profile_bytes *file, size_t at, const void *bytes, size_t n, tqkv_result expected)
{
    profile read;
    memcpy(file->bytes + at, bytes, n);
    profile_fix_hash(file->bytes, file->size, file->hash_at);
    const tqkv_result result = parse(file->bytes, file->size, &read);
    CHECK(result == expected, "changed at %d: %s", (int)at, tqkv_result_string(result));
    profile_free(&read);
    free(file->bytes);
}

/* Writes over what follows a text. */
static void check_edited(const profile_made *made, const char *text, size_t behind, const void *bytes, size_t n,
                         tqkv_result expected)
{
    profile_bytes file = profile_make(made);
    const size_t at = find(&file, text);
    REQUIRE(at != 0, "no %s", text);
    check_changed(&file, at + behind, bytes, n, expected);
}

/* Files whose hash is right and whose content is not. */
static void run_edited(const void *row)
{
    const profile_made *made = (const profile_made *)row;
    static const uint8_t two[4] = {2, 0, 0, 0}, many[4] = {255, 255, 255, 255}, none[8] = {0};
    check_edited(made, "tqkv.version", 16, two, 4, TQKV_UNSUPPORTED);
    check_edited(made, "tqkv.version", 16, none, 4, TQKV_CORRUPT);
    check_edited(made, "tqkv.layer_count", 20, many, 4, TQKV_CORRUPT);
    check_edited(made, "tqkv.layer_count", 20, none, 4, TQKV_CORRUPT);
    check_edited(made, "general.alignment", 21, none, 4, TQKV_CORRUPT);
    check_edited(made, "general.architecture", 32, "LLAM", 4, TQKV_CORRUPT);
    check_edited(made, "blk.0.key_center", 16, two + 1, 1, TQKV_CORRUPT); /* no dimensions */
    check_edited(made, "blk.0.key_center", 20, none, 8, TQKV_CORRUPT);
    check_edited(made, "blk.0.key_center", 20, many, 4, TQKV_CORRUPT);
    check_edited(made, "blk.0.key_center", 28, many, 4, TQKV_CORRUPT);
    check_edited(made, "blk.0.key_center", 36, two, 4, TQKV_CORRUPT); /* of another type */
    check_edited(made, "blk.0.key_center", 40, many, 4, TQKV_CORRUPT);
    check_edited(made, "blk.0.key_scale", 0, "blk.0.key_scald", 15, TQKV_CORRUPT);
    check_edited(made, "blk.1.key_scale", 0, "blk.9.key_scale", 15, TQKV_CORRUPT);
    check_edited(made, "blk.1.key_scale", 0, "blk.0.key_scale", 15, TQKV_CORRUPT); /* twice */
    check_edited(made, "tqkv.value_formats", 0, "tqkv.value_formatz", 18, TQKV_CORRUPT);
    check_edited(made, "tqkv.value_formats", 42, "tq9", 3, TQKV_CORRUPT);
}

/* NaN, infinity, 0 and -1 as the last scale, or as the last layer's first centre. */
static void run_values(const void *row)
{
    const profile_made *made = (const profile_made *)row;
    static const uint8_t bad[4][4] = {{0, 0, 0xc0, 0x7f}, {0, 0, 0x80, 0x7f}, {0, 0, 0, 0}, {0, 0, 0x80, 0xbf}};
    const size_t values = (size_t)made->n_kv_heads * (size_t)made->head_dim;
    for (int i = 0; i < 8; i++) {
        profile_bytes file = profile_make(made);
        const bool is_scale = i % 2;
        check_changed(&file, file.size - (is_scale ? 4 : 8 * values), bad[i / 2], 4,
                      i < 4 || is_scale ? TQKV_CORRUPT : TQKV_OK);
    }
}

/* Formats of a layer's cache: the plan's, or without one those that were there. */
static void check_desc(const profile *read, const profile_made *made, int index)
{
    tqkv_cache_desc desc = test_cache_desc(made->head_dim, made->n_kv_heads, made->n_kv_heads, 64);
    tqkv_cache *cache = NULL;
    desc.key_format = TQKV_TQ6;
    desc.value_format = TQKV_TQ2;
    CHECK(!profile_desc(read, index, &desc), "layer %d is refused", index);
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    CHECK(test_keys(cache)->format == (made->has_plan ? read->layers[index].key_format : TQKV_TQ6), "keys");
    CHECK(test_values(cache)->format == (made->has_plan ? read->layers[index].value_format : TQKV_TQ2), "values");
    tqkv_cache_destroy(cache);
}

/* A profile that does not fit says why, and changes nothing. */
static void check_unfit(const profile *read, int index, int head_dim, int n_kv_heads, const char *words)
{
    tqkv_cache_desc before = test_cache_desc(head_dim, n_kv_heads, 0, 0);
    before.key_format = TQKV_TQ6;
    tqkv_cache_desc desc = before;
    const char *reason = profile_desc(read, index, &desc);
    CHECK(reason && strstr(reason, words), "%s, not %s", reason ? reason : "no reason", words);
    CHECK(!memcmp(&desc, &before, sizeof desc), "the desc has changed");
}

static void run_desc(const void *row)
{
    const profile_made *made = (const profile_made *)row;
    profile read = read_made(made);
    for (int i = 0; i < made->n_layers; i++) check_desc(&read, made, i);
    check_unfit(&read, made->n_layers, made->head_dim, made->n_kv_heads, "fewer layers");
    check_unfit(&read, -1, made->head_dim, made->n_kv_heads, "fewer layers");
    check_unfit(&read, 0, made->head_dim + 32, made->n_kv_heads, "other heads");
    check_unfit(&read, 0, made->head_dim, made->n_kv_heads + 1, "other heads");
    tqkv_cache_desc shared = test_cache_desc(made->head_dim, made->n_kv_heads, 0, 0);
    shared.shared = true;
    CHECK(!profile_desc(&read, 0, &shared) && shared.value_format == shared.key_format, "shared: two formats");
    CHECK(profile_has_plan(&read) == made->has_plan, "the plan");
    profile_forget_plan(&read);
    CHECK(!profile_has_plan(&read), "a plan that was forgotten");
    profile_free(&read);
}

static void run_file(const void *row)
{
    const profile_made *made = (const profile_made *)row;
    char path[128];
    profile read;
    profile_bytes made_file = profile_make(made);
    snprintf(path, sizeof path, "/tmp/tqkv-profile-%p", (void *)&read);
    FILE *file = fopen(path, "wb");
    REQUIRE(file, "%s cannot be written", path);
    CHECK(fwrite(made_file.bytes, 1, made_file.size, file) == made_file.size, "%s was not written", path);
    fclose(file);
    CHECK_RESULT(profile_load(path, &read), TQKV_OK);
    check_read(&read, made);
    profile_free(&read);
    remove(path);
    CHECK_RESULT(profile_load(path, &read), TQKV_IO);
    free(made_file.bytes);
}

void test_profile_cases(void)
{
    static const profile_made made[] = {
        {2, 2, 32, true, false, 1, 32},   {3, 1, 80, false, true, 1, 64},   {1, 8, 128, false, false, 1, 4},
        {30, 3, 64, true, true, 1, 4096}, {12, 1, 48, false, false, 1, 32},
    };
    for (int i = 0; i < (int)(sizeof made / sizeof *made); i++) {
        test_add(run_written, &made[i], sizeof made[i], "profile/written/%d", i);
        test_add(run_desc, &made[i], sizeof made[i], "profile/desc/%d", i);
    }
    test_add(run_damaged, &made[0], sizeof made[0], "profile/damaged");
    test_add(run_edited, &made[0], sizeof made[0], "profile/edited");
    test_add(run_values, &made[0], sizeof made[0], "profile/values");
    test_add(run_file, &made[1], sizeof made[1], "profile/file");
}
