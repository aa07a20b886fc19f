/* Rows of half and bfloat16: the bytes of their floats going in, the rounded floats coming out, bit for bit. */
#include "cache_fixture.h"
#include "data.h"
#include "reference.h"
#include "runner.h"

#include <math.h>

enum { HEADS = 2, TOKENS = 5 };

static const tqkv_type types[] = {TQKV_TYPE_F32, TQKV_TYPE_F16, TQKV_TYPE_BF16};
static const char *const type_names[] = {"f32", "f16", "bf16"};

static size_t size_of(tqkv_type type) { return type == TQKV_TYPE_F32 ? sizeof(float) : sizeof(uint16_t); }

/* Rounds values to the type, in place, and returns them in it. */
static void *typed_copy(tqkv_type type, float *values, size_t n)
{
    uint16_t *halves = (uint16_t *)test_alloc(n * size_of(type));
    if (type == TQKV_TYPE_F32) memcpy(halves, values, n * sizeof(float));
    for (size_t i = 0; type != TQKV_TYPE_F32 && i < n; i++) {
        halves[i] = reference_narrow(type, values[i]);
        values[i] = (float)reference_wide(type, halves[i]);
    }
    return halves;
}

/* Are the typed values the rounded floats? */
static void check_rounded(tqkv_type type, const void *typed, const float *floats, size_t n, const char *what)
{
    const uint16_t *halves = (const uint16_t *)typed;
    if (type == TQKV_TYPE_F32) CHECK(!memcmp(typed, floats, n * sizeof(float)), "%s: other floats", what);
    for (size_t i = 0; type != TQKV_TYPE_F32 && i < n; i++) {
        const uint16_t expected = reference_narrow(type, floats[i]);
        CHECK(halves[i] == expected, "%s, value %d: %.9g became %04x, not %04x", what, (int)i, (double)floats[i],
              halves[i], expected);
    }
}

/* ---- Encoding and decoding ---- */

typedef struct codec_row {
    tqkv_format format;
    tqkv_type type;
    int head_dim;
} codec_row;

/* What decode writes of a zero is its centre: floats of any bits, rounded. floats: [n], finite;
 * n: a multiple of 1024 */
static void check_decoded_center(tqkv_type type, const float *floats, int n)
{
    enum { D = 1024 };
    tqkv_store s = test_store(TQKV_F16, D, n / D, 1, false);
    uint16_t *out = (uint16_t *)test_alloc_filled((size_t)n * sizeof *out, 0xff);
    memset(s.codes, 0, s.codes_size);
    s.type = type;
    s.center = floats;
    CHECK_RESULT(tqkv_decode(&s, 0, 1, TQKV_ORIGINAL, out), TQKV_OK);
    check_rounded(type, out, floats, (size_t)n, "center");
    test_store_free(&s);
    free(out);
}

/* All values of the type, all midpoints of neighbours, and the floats beside each. */
static void check_rounding(const void *parameters)
{
    enum { N = 65536 };
    const tqkv_type type = *(const tqkv_type *)parameters;
    const uint16_t infinity = type == TQKV_TYPE_F16 ? 0x7c00 : 0x7f80;
    float *floats = (float *)test_alloc(N * sizeof(float));
    for (int step = -2; step <= 2; step++) {
        for (int i = 0; i < N; i++) {
            const uint16_t magnitude = (uint16_t)(i & 0x7fff), below = magnitude < infinity ? magnitude : 0;
            const double low = reference_wide(type, below);
            double high = reference_wide(type, (uint16_t)(below + 1));
            if (below + 1 == infinity) high = type == TQKV_TYPE_F16 ? 65536.0 : ldexp(1.0, 128);
            const float middle = step == -2 ? (float)low : (float)((low + high) / 2);
            const float beside = step == -1  ? nextafterf(middle, 0.0f)
                                 : step == 1 ? nextafterf(middle, INFINITY)
                                 : step == 2 ? middle * 1.5f
                                             : middle;
            floats[i] = i & 0x8000 ? -beside : beside;
            if (!isfinite(floats[i]) || floats[i] == 0.0f) floats[i] = 1e5f; /* a centre is finite; 0 - 0 is 0 */
        }
        check_decoded_center(type, floats, N);
    }
    free(floats);
}

/* NaN and infinity at each place of the rows; the largest value is neither. */
static void check_not_finite(const void *parameters)
{
    const codec_row *row = (const codec_row *)parameters;
    const int n = 3 * HEADS * row->head_dim;
    const uint16_t infinity = row->type == TQKV_TYPE_F16 ? 0x7c00 : 0x7f80;
    const uint16_t bad[] = {infinity, (uint16_t)(infinity | 0x8000), (uint16_t)(infinity + 1), 0xffff};
    const uint16_t good[] = {(uint16_t)(infinity - 1), (uint16_t)((infinity - 1) | 0x8000)};
    uint16_t *src = (uint16_t *)test_alloc_filled((size_t)n * sizeof *src, 0);
    tqkv_store s = test_store(row->format, row->head_dim, HEADS, 3, false);
    s.type = row->type;
    for (int i = 0; i < n; i++) {
        src[i] = bad[i % 4];
        CHECK_RESULT(tqkv_encode(&s, src, 3, 0), TQKV_NOT_FINITE);
        src[i] = good[i % 2];
    }
    CHECK_RESULT(tqkv_encode(&s, src, 3, 0), TQKV_OK);
    test_store_free(&s);
    free(src);
}

/* ---- Attention ---- */

/* NaN and infinite results, in whatever type: bytes of a half store that no encoder wrote. */
static void check_wild_outputs(const void *parameters)
{
    enum { D = 64 };
    static const uint16_t patterns[] = {0x7e00, 0x7c00, 0xfc00, 0x7c01, 0xfe55};
    const tqkv_type type = *(const tqkv_type *)parameters;
    tqkv_store s = test_store(TQKV_F16, D, 1, 1, false);
    float q[D] = {0}, floats[D];
    uint16_t out[D];
    tqkv_attention a;
    memset(&a, 0, sizeof a);
    for (int i = 0; i < D; i++) {
        uint8_t *code = (uint8_t *)s.codes + 2 * i;
        code[0] = (uint8_t)patterns[i % 5];
        code[1] = (uint8_t)(patterns[i % 5] >> 8);
    }
    tqkv_store keys = test_store(TQKV_F16, D, 1, 1, false);
    memset(keys.codes, 0, keys.codes_size);
    a.keys = &keys;
    a.values = &s;
    a.n_heads = a.n_queries = 1;
    a.end = 1;
    CHECK_RESULT(tqkv_attend(&a, q, floats), TQKV_OK);
    a.output_type = type;
    CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
    const uint16_t infinity = type == TQKV_TYPE_F16 ? 0x7c00 : 0x7f80;
    for (int i = 0; i < D; i++) {
        const bool nan = isnan(floats[i]);
        CHECK(nan == ((out[i] & 0x7fff) > infinity), "value %d: %g became %04x", i, (double)floats[i], out[i]);
        if (!nan) CHECK(out[i] == reference_narrow(type, floats[i]), "value %d is %04x", i, out[i]);
    }
    test_store_free(&s);
    test_store_free(&keys);
}

/* ---- Caches ---- */

/* A snapshot keeps the type of its cache, which no other type can take the place of. */
static void check_type_of_snapshot(tqkv_type type, const stream *floats, const stream *typed)
{
    const tqkv_type other = type == TQKV_TYPE_F16 ? TQKV_TYPE_BF16 : TQKV_TYPE_F16;
    const struct {
        const stream *snapshot;
        tqkv_type asked, wanted;
        tqkv_result result;
    } rows[] = {{typed, TQKV_TYPE_F32, TQKV_TYPE_F32, TQKV_OK}, /* the type is the caller's, whoever wrote it */
                {typed, type, type, TQKV_OK},
                {typed, other, other, TQKV_OK},
                {floats, TQKV_TYPE_F32, TQKV_TYPE_F32, TQKV_OK},
                {floats, other, other, TQKV_OK}};
    for (int i = 0; i < 5; i++) {
        stream file = *rows[i].snapshot;
        tqkv_cache *cache;
        tqkv_cache_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.type = rows[i].asked;
        file.at = 0;
        CHECK_RESULT(tqkv_cache_load(&desc, stream_read, &file, &cache), rows[i].result);
        CHECK(!cache || test_keys(cache)->type == rows[i].wanted, "case %d: type %d", i, (int)test_keys(cache)->type);
        tqkv_cache_destroy(cache);
    }
}

/* Rows of floats, and the same in another type: keys, values, queries. */
typedef struct cache_rows {
    float *floats[3];
    void *typed[3];
} cache_rows;

enum { CACHE_DIM = 96, CACHE_VALUE_DIM = 48, CACHE_N = 9, CACHE_QUERIES = 3 };

static cache_rows make_cache_rows(tqkv_type type)
{
    const int n_queries = CACHE_QUERIES * CACHE_HEADS * CACHE_GROUP,
              sizes[3] = {CACHE_N * CACHE_HEADS * CACHE_DIM, CACHE_N * CACHE_HEADS * CACHE_VALUE_DIM,
                          n_queries * CACHE_DIM};
    cache_rows rows = {{cache_data(1, CACHE_N, CACHE_DIM), cache_data(2, CACHE_N, CACHE_VALUE_DIM),
                        test_rows(3, DATA_GAUSSIAN, n_queries, CACHE_DIM)},
                       {NULL, NULL, NULL}};
    for (int i = 0; i < 3; i++) rows.typed[i] = typed_copy(type, rows.floats[i], (size_t)sizes[i]);
    return rows;
}

/* A typed cache has the bytes of a float cache with the same values; its outputs are the rounded floats. */
static void check_cache(const void *parameters)
{
    static const char *const names[4] = {"floats", "typed", "loaded", "forked"};
    const tqkv_type type = *(const tqkv_type *)parameters;
    const size_t n_out = CACHE_QUERIES * CACHE_HEADS * CACHE_GROUP * CACHE_VALUE_DIM;
    const cache_row shape = {TQKV_I8, TQKV_TQ4, CACHE_DIM, 16, false, 0, -1};
    cache_rows rows = make_cache_rows(type);
    float *out[4];
    tqkv_cache *caches[4];
    stream snapshots[2];
    tqkv_cache_desc desc = cache_desc(&shape, NULL), same;
    memset(&same, 0, sizeof same);
    desc.value_dim = CACHE_VALUE_DIM;
    for (int i = 0; i < 4; i++) {
        const void *const k = i ? rows.typed[0] : rows.floats[0], *const v = i ? rows.typed[1] : rows.floats[1],
                          *const q = i ? rows.typed[2] : rows.floats[2];
        desc.type = i ? type : TQKV_TYPE_F32;
        out[i] = (float *)test_alloc_filled(n_out * sizeof(float), 0xff);
        CHECK_RESULT(i == 2   ? tqkv_cache_load(&desc, stream_read, &snapshots[1], &caches[i])
                     : i == 3 ? tqkv_cache_fork(caches[1], &same, &caches[i])
                              : tqkv_cache_create(&desc, &caches[i]),
                     TQKV_OK);
        REQUIRE(caches[i], "no cache");
        CHECK(test_values(caches[i])->type == desc.type, "the stores' type is another");
        if (i < 2) CHECK_RESULT(tqkv_cache_append(caches[i], k, v, CACHE_N), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(caches[i], q, CACHE_QUERIES, out[i]), TQKV_OK);
        if (i < 2) snapshots[i] = stream_of_cache(caches[i]);
        if (i) check_rounded(type, out[i], out[0], n_out, names[i]);
    }
    CHECK(snapshots[0].size == snapshots[1].size &&
              !memcmp(snapshots[0].bytes + 136, snapshots[1].bytes + 136, snapshots[0].size - 136),
          "the type shows in the snapshot behind the header");
    check_type_of_snapshot(type, &snapshots[0], &snapshots[1]);
    for (int i = 0; i < 4; i++) {
        tqkv_cache_destroy(caches[i]);
        free(out[i]);
    }
    for (int i = 0; i < 3; i++) {
        free(rows.floats[i]);
        free(rows.typed[i]);
    }
    for (int i = 0; i < 2; i++) stream_free(&snapshots[i]);
}

void test_types_cases(void)
{
    for (int i = 1; i < 3; i++) {
        const codec_row rows[2] = {{TQKV_F16, types[i], 48}, {TQKV_TQ2, types[i], 64}};
        test_add(check_rounding, &types[i], sizeof types[i], "types/rounding/%s", type_names[i]);
        for (int j = 0; j < 2; j++)
            test_add(check_not_finite, &rows[j], sizeof rows[j], "types/not_finite/%s/%d", type_names[i],
                     rows[j].head_dim);
        test_add(check_wild_outputs, &types[i], sizeof types[i], "types/wild_outputs/%s", type_names[i]);
        test_add(check_cache, &types[i], sizeof types[i], "types/cache/%s", type_names[i]);
    }
}
