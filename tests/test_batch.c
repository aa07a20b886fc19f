/* tqkv_attend_batch: each item has the bits of tqkv_attend alone; all or nothing. */
#include "attend_fixture.h"
#include "counting.h"
#include "examples/thread_pool.h"

enum { MAX_ITEMS = 12 };

/* ---- A batch ---- */

typedef struct batch {
    int n;
    attend_problem problems[MAX_ITEMS];
    tqkv_attention items[MAX_ITEMS];
    const void *q[MAX_ITEMS];
    void *out[MAX_ITEMS];
    size_t bytes[MAX_ITEMS]; /* of each output */
} batch;

static void make_item(batch *b, const attend_row *row)
{
    const int i = b->n++;
    attend_problem *p = &b->problems[i];
    attend_set_up(p, row);
    b->bytes[i] = p->n_rows * p->value_dim * sizeof(float);
    b->items[i] = p->attention;
    b->q[i] = p->q;
    b->out[i] = test_alloc_filled(b->bytes[i], 0xff);
    CHECK_RESULT(tqkv_attend(&p->attention, p->q, p->out), TQKV_OK);
}

static void free_batch(batch *b)
{
    for (int i = 0; i < b->n; i++) {
        attend_tear_down(&b->problems[i]);
        free(b->out[i]);
    }
    free(b);
}

/* Different formats, sizes, lengths, options and numbers of queries; about every fourth has several stretches. */
static batch *make_batch(uint64_t seed, int n)
{
    data_random random = {seed};
    batch *b = (batch *)test_alloc(sizeof *b);
    memset(b, 0, sizeof *b);
    while (b->n < n) {
        const int i = b->n + (int)seed;
        attend_row row = attend_default_row(test_formats[i % TEST_FORMATS], test_formats[(3 * i + 1) % TEST_FORMATS],
                                            test_all_head_dims[data_below(&random, 7)]);
        row.value_dim = test_all_head_dims[data_below(&random, 7)];
        row.n_kv_heads = 1 + data_below(&random, 2);
        row.group = 1 + data_below(&random, 4);
        row.n_queries = 1 + data_below(&random, 5);
        row.end = i % 4 ? 1 + data_below(&random, 200) : 2000 + data_below(&random, 400);
        row.key_capacity = row.value_capacity = (int)row.end + data_below(&random, 3);
        row.key_ring = row.value_ring = i % 3 == 0;
        row.window = i % 5 == 2 ? 70 : 0;
        row.softcap = i % 6 == 1 ? 3.0f : 0.0f;
        row.sinks = i % 2 ? SINKS_SOME : SINKS_NONE;
        row.tree = i % 5 == 1;
        row.key_center = i % 3 == 1 ? 2.0f : 0.0f;
        row.key_spread = row.value_spread = i % 4 == 1 ? 8.0f : 0.0f;
        row.bits_alone = true;
        make_item(b, &row);
    }
    return b;
}

static tqkv_result attend_batch(batch *b) { return tqkv_attend_batch(b->items, b->n, b->q, b->out); }

static void check_outputs(batch *b, const char *what)
{
    for (int i = 0; i < b->n; i++) {
        CHECK(!memcmp(b->out[i], b->problems[i].out, b->bytes[i]), "%s: item %d of %d has other bits", what, i, b->n);
        memset(b->out[i], 0xff, b->bytes[i]);
    }
}

static void check_untouched(const batch *b)
{
    for (int i = 0; i < b->n; i++) CHECK(test_is_untouched(b->out[i], b->bytes[i]), "item %d was written", i);
}

static void check_hooks(batch *b, bool one_use)
{
    int calls = 0;
    thread_pool pool;
    CHECK_RESULT(attend_batch(b), TQKV_OK);
    check_outputs(b, "no hook");
    b->items[0].parallel.user = &calls;
    b->items[0].parallel.run = test_run_backwards;
    if (b->n > 1) b->items[1].allocator.alloc = counting_alloc; /* not looked at */
    CHECK_RESULT(attend_batch(b), TQKV_OK);
    check_outputs(b, "backwards");
    CHECK(one_use ? calls == 1 : calls > 1, "%d uses of the hook", calls);
    pool_start(&pool, 3);
    b->items[0].parallel.user = &pool;
    b->items[0].parallel.run = pool_run;
    CHECK_RESULT(attend_batch(b), TQKV_OK);
    check_outputs(b, "on threads");
    pool_stop(&pool);
}

static void check_bits(const void *parameters)
{
    const int seed = *(const int *)parameters;
    batch *b = make_batch((uint64_t)seed, 1 + seed * 5 % MAX_ITEMS);
    check_hooks(b, true);
    free_batch(b);
}

/* Sums that fill the memory of several waves: of short windows across the end of a stretch, with many rows. */
static void check_waves(NO_ROW)
{
    batch *b = (batch *)test_alloc(sizeof *b);
    memset(b, 0, sizeof *b);
    for (int i = 0; i < 4; i++) {
        attend_row row = attend_default_row(TQKV_TQ4, TQKV_TQ4, i == 2 ? 32 : 512);
        row.n_kv_heads = 1;
        row.group = i == 2 ? 1 : 8;
        row.n_queries = i == 2 ? 1 : 64;
        row.key_ring = row.value_ring = true;
        row.key_capacity = row.value_capacity = 80;
        row.window = 10;
        row.end = 2048 + 10 * i;
        row.bits_alone = true;
        make_item(b, &row);
    }
    check_hooks(b, false);
    free_batch(b);
}

/* One bad item, and no output is written: NaN, a bad end, no output, or one where another item reads. */
static void check_bad_items(const void *parameters)
{
    const int bad = *(const int *)parameters;
    batch *b = make_batch(1, 3);
    const attend_problem *other = &b->problems[bad ? 0 : 1];
    void *const own = b->out[bad];
    void *const read[] = {NULL, other->q, other->keys.codes, other->values.norms, other->sinks, other->tree};
    ((float *)(uintptr_t)b->q[bad])[0] = (float)NAN;
    CHECK_RESULT(attend_batch(b), TQKV_NOT_FINITE);
    ((float *)(uintptr_t)b->q[bad])[0] = 0.0f;
    b->items[bad].end = -1;
    CHECK_RESULT(attend_batch(b), TQKV_INVALID_ARGUMENT);
    b->items[bad] = b->problems[bad].attention;
    for (int i = 0; i < (int)(sizeof read / sizeof *read); i++) {
        b->out[bad] = read[i];
        CHECK_RESULT(attend_batch(b), TQKV_INVALID_ARGUMENT);
    }
    b->out[bad] = own;
    check_untouched(b);
    free_batch(b);
}

/* Marks the values of block that an item writes; returns whether one was marked before. */
static bool mark_rows(unsigned char *marks, size_t at, const tqkv_attention *item, int head_dim)
{
    bool twice = false;
    for (int t = 0; t < item->n_queries; t++)
        for (int h = 0; h < item->n_heads; h++)
            for (int i = 0; i < head_dim; i++) {
                unsigned char *mark = &marks[at + (size_t)t * item->output_strides.token +
                                             (size_t)h * item->output_strides.head + (size_t)i];
                twice = twice || *mark;
                *mark = 1;
            }
    return twice;
}

/* The rows of an item's output, with strides, are those of its problem. */
static void check_strided(const batch *b, int i)
{
    const tqkv_strides s = b->items[i].output_strides;
    const int heads = b->items[i].n_heads, dim = (int)b->problems[i].value_dim;
    for (int r = 0; r < b->items[i].n_queries * heads; r++)
        CHECK(!memcmp(b->problems[i].out + r * dim,
                      (const float *)b->out[i] + (size_t)(r / heads) * s.token + (size_t)(r % heads) * s.head,
                      (size_t)dim * sizeof(float)),
              "item %d, row %d", i, r);
}

/* The largest mark among n. */
static int largest_mark(const unsigned char *marks, size_t n)
{
    int largest = 0;
    for (size_t i = 0; i < n; i++) largest = marks[i] > largest ? marks[i] : largest;
    return largest;
}

enum { PLACED_DIM = 32, PLACED_VALUES = 16384 };

/* Puts outputs and most queries of some items at random places of a block, and marks them. True where an output shares
 * a value with queries or with another one. */
static bool place_at_random(batch *b, float *block, unsigned char *marks, data_random *random)
{
    const size_t inner = (size_t)(3 + data_below(random, 6)) * PLACED_DIM / 3,
                 outer = (size_t)(9 + data_below(random, 9)) * PLACED_DIM;
    const bool by_token = data_below(random, 2) == 0;
    bool overlap = false;
    memset(marks, 0, PLACED_VALUES);
    for (int i = 0; i < b->n; i++) {
        const size_t at = (size_t)data_below(random, 120 * b->n) * PLACED_DIM / 2;
        b->items[i].output_strides.token = by_token ? outer : inner;
        b->items[i].output_strides.head = by_token ? inner : outer;
        b->out[i] = block + at;
        overlap = mark_rows(marks, at, &b->items[i], PLACED_DIM) || overlap;
    }
    for (int i = 0; i < b->n; i++) {
        const size_t at = (size_t)data_below(random, 120 * b->n) * PLACED_DIM / 2,
                     n = b->problems[i].n_rows * PLACED_DIM;
        const float *own_out = (const float *)b->out[i];
        const int mark = largest_mark(marks + at, n);
        b->q[i] = b->problems[i].q;
        /* queries of another item, or perhaps between rows of the own output, which is refused */
        if (mark > 1 || (block + at + n > own_out && block + at < own_out + 4 * outer)) continue;
        b->q[i] = memcpy(block + at, b->q[i], n * sizeof *block);
        memset(marks + at, 2, n);
        overlap = mark || overlap;
    }
    return overlap;
}

/* Such calls are refused exactly where there is an overlap. */
static void check_random_places(const void *parameters)
{
    enum { N = 7, TRIES = 400 };
    data_random random = {(uint64_t) * (const int *)parameters};
    batch *b = (batch *)test_alloc(sizeof *b);
    float *block = (float *)test_alloc(PLACED_VALUES * sizeof *block);
    unsigned char *marks = (unsigned char *)test_alloc(PLACED_VALUES);
    void *own[N];
    int refused = 0;
    memset(b, 0, sizeof *b);
    for (int i = 0; i < N; i++) {
        attend_row row = attend_default_row(TQKV_TQ4, TQKV_TQ4, PLACED_DIM);
        row.n_kv_heads = 1;
        row.group = 1 + i % 3;
        row.n_queries = 3 - i % 3;
        row.end = row.key_capacity = row.value_capacity = 4;
        make_item(b, &row);
        own[i] = b->out[i];
    }
    for (int attempt = 0; attempt < TRIES; attempt++) {
        b->n = 1 + data_below(&random, N);
        const bool overlap = place_at_random(b, block, marks, &random);
        refused += overlap;
        CHECK_RESULT(attend_batch(b), overlap ? TQKV_INVALID_ARGUMENT : TQKV_OK);
        for (int i = 0; i < b->n && !overlap; i++) check_strided(b, i);
    }
    CHECK(refused > TRIES / 4 && refused < TRIES * 3 / 4, "%d of %d refused", refused, TRIES);
    b->n = N;
    for (int i = 0; i < N; i++) b->out[i] = own[i];
    free(marks);
    free(block);
    free_batch(b);
}

static void check_arguments(NO_ROW)
{
    batch *b = make_batch(2, 2);
    CHECK_RESULT(tqkv_attend_batch(b->items, 0, b->q, b->out), TQKV_OK);
    CHECK_RESULT(tqkv_attend_batch(b->items, -1, b->q, b->out), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_attend_batch(NULL, 2, b->q, b->out), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_attend_batch(b->items, 2, NULL, b->out), TQKV_INVALID_ARGUMENT);
    test_explained = NULL;
    CHECK_RESULT(tqkv_attend_batch(b->items, 2, b->q, NULL), TQKV_INVALID_ARGUMENT);
    CHECK(test_explained != NULL, "no text");
    b->items[0].allocator.alloc = counting_alloc;
    CHECK_RESULT(attend_batch(b), TQKV_INVALID_ARGUMENT);
    check_untouched(b);
    free_batch(b);
}

/* One sequence that is far longer than the others, which have most of the rows: 13 MiB, and sums of all rows. */
static void check_scratch(NO_ROW)
{
    batch *b = (batch *)test_alloc(sizeof *b);
    int calls = 0;
    counting counter = {0, 0, 0, 0, 0};
    size_t rows = 0;
    memset(b, 0, sizeof *b);
    for (int i = 0; i < MAX_ITEMS; i++) {
        attend_row row = attend_default_row(TQKV_TQ2, TQKV_TQ2, 32);
        row.n_kv_heads = 1;
        row.group = i ? 16 : 1;
        row.n_queries = i ? 256 : 1;
        row.end = row.key_capacity = row.value_capacity = i ? 8 : 16384;
        row.bits_alone = true;
        make_item(b, &row);
        rows += (size_t)(row.n_queries * row.group);
    }
    b->items[0].allocator = counting_allocator(&counter);
    b->items[0].parallel.user = &calls;
    b->items[0].parallel.run = test_run_backwards;
    CHECK_RESULT(attend_batch(b), TQKV_OK);
    CHECK(counter.largest <= (13u << 20) + rows * 34 * sizeof(float), "%d bytes of scratch", (int)counter.largest);
    CHECK_NO_LEAK(&counter);
    free_batch(b);
}

/* Items without queries, of which nothing else is looked at, change no bit of the others. */
static void check_no_queries(NO_ROW)
{
    batch *b = make_batch(5, 6);
    const tqkv_attention all[6] = {b->items[0], b->items[1], b->items[2], b->items[3], b->items[4], b->items[5]};
    for (unsigned without = 0; without < 64; without += 7) {
        const void *q[6];
        void *out[6];
        for (int i = 0; i < 6; i++) {
            const bool has = !(without >> i & 1);
            b->items[i] = all[i];
            if (!has) b->items[i].n_queries = 0;
            if (!has) b->items[i].tree = NULL;
            q[i] = has ? b->q[i] : NULL;
            out[i] = has ? b->out[i] : NULL;
            memset(b->out[i], 0xff, b->bytes[i]);
        }
        CHECK_RESULT(tqkv_attend_batch(b->items, b->n, q, out), TQKV_OK);
        for (int i = 0; i < 6; i++)
            CHECK((without >> i & 1) || !memcmp(b->out[i], b->problems[i].out, b->bytes[i]), "item %d of %x", i,
                  without);
    }
    b->items[5].n_queries = 0;
    b->items[5].n_heads = 0;
    CHECK_RESULT(attend_batch(b), TQKV_INVALID_ARGUMENT);
    free_batch(b);
}

void test_batch_cases(void)
{
    test_add(check_no_queries, NULL, 0, "batch/no_queries");
    for (int i = 0; i < 8; i++) test_add(check_bits, &i, sizeof i, "batch/bits/%d", i);
    for (int i = 0; i < 3; i++) test_add(check_bad_items, &i, sizeof i, "batch/bad_item/%d", i);
    test_add(check_waves, NULL, 0, "batch/waves");
    for (int i = 0; i < 3; i++) test_add(check_random_places, &i, sizeof i, "batch/random_places/%d", i);
    test_add(check_arguments, NULL, 0, "batch/arguments");
    test_add(check_scratch, NULL, 0, "batch/scratch");
}
