/* Snapshots of stores: they cross between linear, paged and ring stores; damaged bytes, wrong stores,
 * failing streams. */
#include "damage.h"
#include "reference.h"

enum { HEADS = 2, PAGE = 64, POOL = 5 * PAGE, TABLE = 4, HEADER = 64 /* its hash follows */ };
/* Few positions, over a page's end if there are pages. */
enum { SMALL_AT = PAGE - 1, SMALL_N = 3, SMALL_DIM = 32 };

typedef enum layout { LINEAR, PAGED, OTHER_PAGES, RING, LAYOUTS } layout;
static const char *const layout_names[LAYOUTS] = {"linear", "paged", "other_pages", "ring"};

/* An empty store with room for the positions that the tests use. */
static tqkv_store make_store(layout l, tqkv_format format, int head_dim)
{
    static const int32_t pages[2][TABLE] = {{3, 0, 4, 1}, {2, 4, 0, 3}};
    static const int capacities[LAYOUTS] = {200, POOL, POOL, 130};
    tqkv_store s = test_store(format, head_dim, HEADS, capacities[l], l == RING);
    if (l == PAGED || l == OTHER_PAGES) {
        s.pages = pages[l - PAGED];
        s.n_pages = TABLE;
        s.page_size = PAGE;
    }
    return s;
}

/* With 140 positions, of which a ring has forgotten 10. */
static tqkv_store make_full(layout l, tqkv_format format, int head_dim)
{
    tqkv_store s = make_store(l, format, head_dim);
    float *rows = test_rows(1, DATA_STUDENT, 140 * HEADS, head_dim);
    CHECK_RESULT(tqkv_encode(&s, rows, 140, 0), TQKV_OK);
    free(rows);
    return s;
}

static stream save(const tqkv_store *s, int64_t position, int n)
{
    stream to = stream_empty();
    CHECK_RESULT(tqkv_store_save(s, position, n, stream_write, &to), TQKV_OK);
    return to;
}

static tqkv_result load(const tqkv_store *s, int64_t position, int n, stream *from)
{
    stream_rewind(from);
    return tqkv_store_load(s, position, n, stream_read, from);
}

static bool is_same_row(const tqkv_store *a, const tqkv_store *b, int64_t position, int head)
{
    const size_t norms = (size_t)reference_norms_per_row(a->format, a->head_dim) * sizeof(float);
    return !memcmp(reference_codes_at(a, head, position), reference_codes_at(b, head, position),
                   reference_row_bytes(a->format, a->head_dim)) &&
           (!norms || !memcmp(reference_norms_at(a, head, position), reference_norms_at(b, head, position), norms));
}

/* No slot but those of n positions was written. */
static void check_others(const tqkv_store *s, int64_t position, int n)
{
    tqkv_store slots = *s;
    slots.pages = NULL;
    slots.ring = false;
    const size_t codes = reference_row_bytes(s->format, s->head_dim);
    const size_t norms = (size_t)reference_norms_per_row(s->format, s->head_dim) * sizeof(float);
    for (int slot = 0; slot < s->capacity; slot++) {
        bool named = false;
        for (int i = 0; i < n; i++) named = named || reference_slot(s, position + i) == slot;
        for (int h = 0; h < HEADS && !named; h++)
            CHECK(test_is_untouched(reference_codes_at(&slots, h, slot), codes) &&
                      (!norms || test_is_untouched(reference_norms_at(&slots, h, slot), norms)),
                  "slot %d was written", slot);
    }
}

/* ---- Round trips ---- */

typedef struct crossing_row {
    layout from, to;
    tqkv_format format;
    int head_dim;
} crossing_row;

/* Positions 40 to 139: over page ends, and around the ring. */
static void check_crossing(const void *parameters)
{
    enum { ELSEWHERE = 23 };
    const crossing_row *row = (const crossing_row *)parameters;
    tqkv_store from = make_full(row->from, row->format, row->head_dim);
    tqkv_store to = make_store(row->to, row->format, row->head_dim);
    tqkv_store linear = make_full(LINEAR, row->format, row->head_dim);
    stream saved = save(&from, 40, 100), expected = save(&linear, 40, 100);
    CHECK(stream_is_equal(&saved, &expected), "the bytes depend on where the positions lie");
    CHECK_RESULT(load(&to, 40, 100, &saved), TQKV_OK);
    CHECK(saved.at == saved.size, "%d of %d bytes were read", (int)saved.at, (int)saved.size);
    for (int p = 40; p < 140; p++)
        for (int h = 0; h < HEADS; h++) CHECK(is_same_row(&from, &to, p, h), "head %d of position %d", h, p);
    check_others(&to, 40, 100);
    stream again = save(&to, 40, 100);
    CHECK(stream_is_equal(&saved, &again), "saving after loading gives other bytes");
    test_store_free(&to); /* at other positions: an engine loads where there is room */
    to = make_store(row->to, row->format, row->head_dim);
    CHECK_RESULT(load(&to, ELSEWHERE, 99, &saved), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(load(&to, ELSEWHERE, 100, &saved), TQKV_OK);
    check_others(&to, ELSEWHERE, 100);
    for (int p = 0; p < 100; p++)
        CHECK(!memcmp(reference_codes_at(&from, 1, 40 + p), reference_codes_at(&to, 1, ELSEWHERE + p),
                      reference_row_bytes(row->format, row->head_dim)),
              "position %d elsewhere", p);
    stream_free(&saved);
    stream_free(&expected);
    stream_free(&again);
    test_store_free(&from);
    test_store_free(&to);
    test_store_free(&linear);
}

/* A ring has positions without end; no positions are a snapshot too. Snapshots follow one another in a stream. */
static void check_corners(const void *parameters)
{
    (void)parameters;
    const int64_t far = INT64_MAX - 130;
    tqkv_store ring = make_full(RING, TQKV_TQ4, 64), other = make_store(RING, TQKV_TQ4, 64);
    stream s = save(&ring, far, 130);
    CHECK_RESULT(tqkv_store_save(&ring, 7, 0, stream_write, &s), TQKV_OK);
    CHECK_RESULT(load(&other, far, 130, &s), TQKV_OK);
    CHECK_RESULT(tqkv_store_load(&other, 7, 0, stream_read, &s), TQKV_OK);
    CHECK(s.at == s.size, "%d of %d bytes were read", (int)s.at, (int)s.size);
    CHECK(!memcmp(ring.codes, other.codes, ring.codes_size), "another ring");
    CHECK_RESULT(load(&other, far + 1, 130, &s), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(load(&other, far, 131, &s), TQKV_OUT_OF_RANGE);
    stream_free(&s);
    test_store_free(&ring);
    test_store_free(&other);
}

/* Two positions would share a slot. Where no position is loaded a page may stand twice. */
static void check_page_twice(const void *parameters)
{
    (void)parameters;
    static const int32_t pages[TABLE] = {3, 3, 1, 1};
    tqkv_store from = make_full(LINEAR, TQKV_TQ4, 64), to = make_store(PAGED, TQKV_TQ4, 64);
    stream s = save(&from, SMALL_AT, SMALL_N), in_one = save(&from, PAGE, SMALL_N);
    to.pages = pages;
    CHECK_RESULT(load(&to, SMALL_AT, SMALL_N, &s), TQKV_INVALID_ARGUMENT);
    CHECK(s.calls == 0, "%d reads before the table was refused", s.calls);
    check_others(&to, SMALL_AT, 0);
    CHECK_RESULT(load(&to, PAGE, SMALL_N, &in_one), TQKV_OK);
    stream_free(&s);
    stream_free(&in_one);
    test_store_free(&from);
    test_store_free(&to);
}

/* ---- Damage ---- */

typedef struct small_row {
    layout l;
    tqkv_format format;
} small_row;

static tqkv_result save_store(const saved_thing *s, stream *to)
{
    return tqkv_store_save((const tqkv_store *)s->from, SMALL_AT, SMALL_N, stream_write, to);
}

/* Other positions stay as they are. */
static tqkv_result load_store(const saved_thing *s, stream *from)
{
    const tqkv_store *to = (const tqkv_store *)s->to;
    const tqkv_result result = load(to, SMALL_AT, SMALL_N, from);
    check_others(to, SMALL_AT, SMALL_N);
    return result;
}

static const small_row small[] = {{LINEAR, TQKV_F16}, {PAGED, TQKV_TQ5}, {RING, TQKV_I8}};

/* call: NULL, or that of the streams that fail */
static void damage_store(const small_row *row, const failing_call *call)
{
    tqkv_store from = make_full(row->l, row->format, SMALL_DIM), to = make_store(row->l, row->format, SMALL_DIM);
    const saved_thing s = {save_store, load_store, &from, &to};
    if (call)
        damage_calls(&s, call);
    else
        damage_bytes(&s);
    test_store_free(&from);
    test_store_free(&to);
}

static void check_damaged(const void *parameters) { damage_store(&small[*(const int *)parameters], NULL); }

static void check_failing(const void *parameters)
{
    const damage_row *row = (const damage_row *)parameters;
    damage_store(&small[row->index], &row->call);
}

static const field_row field_rows[] = {
    {"magic", 0, 8, 0, 0, 1, TQKV_CORRUPT},
    {"version", 8, 4, 0, 0, 1, TQKV_CORRUPT},
    {"size", 12, 4, 0, 0, 1, TQKV_CORRUPT},
    {"format", 16, 4, 0, 0, 1, TQKV_INVALID_ARGUMENT},
    {"head_dim", 20, 4, 0, 0, 1, TQKV_INVALID_ARGUMENT},
    {"n_kv_heads", 24, 4, 0, 0, 1, TQKV_INVALID_ARGUMENT},
    {"flags", 28, 4, 0, 0, 1, TQKV_INVALID_ARGUMENT},
    {"block_scale", 32, 4, 0, 0, 1, TQKV_INVALID_ARGUMENT},
    {"reserved", 36, 4, 0, 0, 1, TQKV_INVALID_ARGUMENT},
    {"position", 40, 8, 0, INT64_MAX, 1, TQKV_CORRUPT},
    {"n_positions", 48, 8, 0, 0, 1, TQKV_INVALID_ARGUMENT},
    {"center", 56, 8, 0, 0, 1, TQKV_INVALID_ARGUMENT},
};

/* A header that is refused: nothing is written. */
static tqkv_result load_nothing(const saved_thing *s, stream *from)
{
    const tqkv_store *to = (const tqkv_store *)s->to;
    const tqkv_result result = load(to, SMALL_AT, SMALL_N, from);
    check_others(to, SMALL_AT, 0);
    return result;
}

static void check_field(const void *parameters)
{
    const field_row *row = (const field_row *)parameters;
    tqkv_store from = make_full(PAGED, TQKV_TQ8, SMALL_DIM), to = make_store(PAGED, TQKV_TQ8, SMALL_DIM);
    const saved_thing s = {save_store, load_nothing, &from, &to};
    damage_field(&s, row, HEADER, (tqkv_result)row->set);
    test_store_free(&from);
    test_store_free(&to);
}

/* ---- Stores that are not the snapshot's ---- */

static float centers[2][HEADS * 512], scales[2][HEADS * 512];

/* With head_dim 512, a centre and a scale, what of them differs is refused, and nothing is written. */
static void check_store(const void *parameters)
{
    (void)parameters;
    tqkv_store from = make_store(LINEAR, TQKV_TQ8, 512);
    data_rows(1, DATA_GAUSSIAN, centers[0], HEADS, 512);
    memcpy(centers[1], centers[0], sizeof *centers);
    centers[1][HEADS * 512 - 1] += 1.0f;
    for (int i = 0; i < HEADS * 512; i++) scales[0][i] = scales[1][i] = 0.5f + (float)(i % 7);
    scales[1][HEADS * 512 - 1] = 0.25f;
    from.center = centers[0];
    from.channel_scale = scales[0];
    memset(from.codes, 1, from.codes_size);
    memset(from.norms, 1, from.norms_size);
    stream s = save(&from, 139, SMALL_N);
    for (int i = 0; i < 7; i++) {
        tqkv_store to = make_store(LINEAR, TQKV_TQ8, 512);
        to.center = i == 1 ? NULL : centers[i == 2];
        to.channel_scale = i == 3 ? NULL : scales[i == 4];
        to.block_scale = i == 5 ? 0.5f : i == 6 ? 1.0f : 0.0f;
        const bool same = i == 0 || i == 6;
        CHECK_RESULT(load(&to, 139, SMALL_N, &s), same ? TQKV_OK : TQKV_INVALID_ARGUMENT);
        CHECK(same || test_is_untouched(to.codes, to.codes_size), "%d: refused, but written", i);
        test_store_free(&to);
    }
    stream_free(&s);
    test_store_free(&from);
}

void test_store_snapshot_cases(void)
{
    static const int dims[] = {32, 64, 80, 512};
    for (int i = 0; i < LAYOUTS * LAYOUTS; i++) {
        const crossing_row row = {(layout)(i / LAYOUTS), (layout)(i % LAYOUTS), test_formats[i % TEST_FORMATS],
                                  dims[i % 4 ^ i / 4]};
        test_add(check_crossing, &row, sizeof row, "store_snapshot/crossing/%s-%s/%s/%d", layout_names[row.from],
                 layout_names[row.to], tqkv_format_name(row.format), row.head_dim);
    }
    for (int i = 0; i < 3; i++) {
        test_add(check_damaged, &i, sizeof i, "store_snapshot/damaged/%d", i);
        damage_add_calls(check_failing, "store_snapshot/failing", i);
    }
    for (size_t i = 0; i < sizeof field_rows / sizeof *field_rows; i++)
        test_add(check_field, &field_rows[i], sizeof *field_rows, "store_snapshot/field/%s", field_rows[i].name);
    test_add(check_store, NULL, 0, "store_snapshot/store");
    test_add(check_corners, NULL, 0, "store_snapshot/corners");
    test_add(check_page_twice, NULL, 0, "store_snapshot/page_twice");
}
