/* Snapshots of stores: damaged bytes and failing streams. Between stores of all layouts they cross in
 * test_snapshot_history.c. */
#include "damage.h"

enum { HEADS = 2, PAGE = 64, POOL = 5 * PAGE, TABLE = 4, HEADER = 64 /* its hash follows */ };
/* Few positions, over a page's end if there are pages. */
enum { SMALL_AT = PAGE - 1, SMALL_N = 3, SMALL_DIM = 32 };

typedef enum layout { LINEAR, PAGED, RING } layout;

/* An empty store with room for 140 positions, or for the newest 130. */
static tqkv_store make_store(layout l, tqkv_format format, int head_dim)
{
    static const int32_t pages[TABLE] = {3, 0, 4, 1};
    static const int capacities[] = {200, POOL, 130};
    tqkv_store s = test_store(format, head_dim, HEADS, capacities[l], l == RING);
    if (l == PAGED) {
        s.pages = pages;
        s.n_pages = TABLE;
        s.page_size = PAGE;
    }
    return s;
}

/* With 140 positions. */
static tqkv_store make_full(layout l, tqkv_format format, int head_dim)
{
    tqkv_store s = make_store(l, format, head_dim);
    float *rows = test_rows(1, DATA_STUDENT, 140 * HEADS, head_dim);
    CHECK_RESULT(tqkv_encode(&s, rows, 140, 0), TQKV_OK);
    free(rows);
    return s;
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
    const tqkv_result result = tqkv_store_load(to, SMALL_AT, SMALL_N, stream_read, from);
    damage_others(to, SMALL_AT, SMALL_N);
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
    const tqkv_result result = tqkv_store_load(to, SMALL_AT, SMALL_N, stream_read, from);
    damage_others(to, SMALL_AT, 0);
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

void test_store_snapshot_cases(void)
{
    for (int i = 0; i < 3; i++) {
        test_add(check_damaged, &i, sizeof i, "store_snapshot/damaged/%d", i);
        damage_add_calls(check_failing, "store_snapshot/failing", i);
    }
    for (size_t i = 0; i < sizeof field_rows / sizeof *field_rows; i++)
        test_add(check_field, &field_rows[i], sizeof *field_rows, "store_snapshot/field/%s", field_rows[i].name);
}
