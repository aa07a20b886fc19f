/* tqkv_attend_batch: each item has the bits of tqkv_attend alone; all or nothing. */
#include "attend_fixture.h"
#include "counting.h"

#include <pthread.h>

enum { MAX_ITEMS = 12, THREADS = 3 };

/* ---- Hooks ---- */

typedef struct hook {
    tqkv_task task;
    void *context;
    int count, first;
} hook;

static void *run_share(void *argument)
{
    const hook *share = (const hook *)argument;
    for (int i = share->first; i < share->count; i += THREADS) share->task(share->context, i);
    return NULL;
}

static void run_on_threads(void *user, int count, tqkv_task task, void *context)
{
    pthread_t threads[THREADS];
    hook shares[THREADS];
    ++*(int *)user;
    for (int i = 0; i < THREADS; i++) {
        shares[i].task = task;
        shares[i].context = context;
        shares[i].count = count;
        shares[i].first = i;
        if (pthread_create(&threads[i], NULL, run_share, &shares[i]) != 0) exit(2);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
}

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
    CHECK_RESULT(attend_batch(b), TQKV_OK);
    check_outputs(b, "no hook");
    b->items[0].parallel.user = &calls;
    b->items[0].parallel.run = test_run_backwards;
    if (b->n > 1) b->items[1].allocator.alloc = counting_alloc; /* not looked at */
    CHECK_RESULT(attend_batch(b), TQKV_OK);
    check_outputs(b, "backwards");
    CHECK(one_use ? calls == 1 : calls > 1, "%d uses of the hook", calls);
    b->items[0].parallel.run = run_on_threads;
    CHECK_RESULT(attend_batch(b), TQKV_OK);
    check_outputs(b, "on threads");
}

static void check_bits(const void *parameters)
{
    const int seed = *(const int *)parameters;
    batch *b = make_batch((uint64_t)seed, 1 + seed * 5 % MAX_ITEMS);
    check_hooks(b, true);
    free_batch(b);
}

/* Sums that fill the memory of several waves: of short windows across the end of a stretch, with many rows. */
static void check_waves(const void *parameters)
{
    (void)parameters;
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

/* One bad item, and no output is written. */
static void check_bad_items(const void *parameters)
{
    const int bad = *(const int *)parameters;
    batch *b = make_batch(1, 3);
    ((float *)(uintptr_t)b->q[bad])[0] = (float)NAN;
    CHECK_RESULT(attend_batch(b), TQKV_NOT_FINITE);
    ((float *)(uintptr_t)b->q[bad])[0] = 0.0f;
    b->items[bad].end = -1;
    CHECK_RESULT(attend_batch(b), TQKV_INVALID_ARGUMENT);
    b->items[bad] = b->problems[bad].attention;
    void *out = b->out[bad];
    b->out[bad] = NULL;
    CHECK_RESULT(attend_batch(b), TQKV_INVALID_ARGUMENT);
    b->out[bad] = out;
    check_untouched(b);
    free_batch(b);
}

/* Outputs may stand in any order, but not in one another, nor where another item reads. */
static void check_overlaps(const void *parameters)
{
    (void)parameters;
    batch *b = (batch *)test_alloc(sizeof *b);
    memset(b, 0, sizeof *b);
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    row.sinks = SINKS_SOME;
    row.tree = true;
    row.bits_alone = true;
    for (int i = 0; i < 3; i++) make_item(b, &row);
    const size_t n = b->bytes[0] / sizeof(float);
    float *block = (float *)test_alloc_filled(4 * n * sizeof *block, 0xff);
    void *own[3] = {b->out[0], b->out[1], b->out[2]};
    for (int i = 0; i < 3; i++) b->out[i] = block + (size_t)(3 - i) * n; /* descending */
    CHECK_RESULT(attend_batch(b), TQKV_OK);
    check_outputs(b, "descending");
    b->out[1] = block + 2 * n + 1;
    CHECK_RESULT(attend_batch(b), TQKV_INVALID_ARGUMENT);
    for (int i = 0; i < 3; i++) b->out[i] = block + (size_t)i * n - (size_t)(i == 2); /* the last two share a value */
    CHECK_RESULT(attend_batch(b), TQKV_INVALID_ARGUMENT);
    void *const read[] = {b->problems[1].q, b->problems[1].keys.codes, b->problems[2].values.norms,
                          b->problems[1].sinks, b->problems[2].tree};
    for (int i = 0; i < 5; i++) {
        b->out[0] = read[i];
        b->out[1] = block;
        CHECK_RESULT(attend_batch(b), TQKV_INVALID_ARGUMENT);
    }
    for (int i = 0; i < 3; i++) b->out[i] = own[i];
    check_untouched(b);
    free(block);
    free_batch(b);
}

/* Outputs that ascend, with the queries between them; then query i in the place of output j. */
static void check_interleaved(const void *parameters)
{
    enum { N = 7 };
    (void)parameters;
    batch *b = (batch *)test_alloc(sizeof *b);
    memset(b, 0, sizeof *b);
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    row.bits_alone = true;
    for (int i = 0; i < N; i++) make_item(b, &row);
    const size_t n = b->bytes[0] / sizeof(float);
    float *block = (float *)test_alloc((2 * N + 1) * n * sizeof *block);
    void *own[N];
    for (int i = 0; i < N; i++) {
        own[i] = b->out[i];
        b->out[i] = block + (size_t)(2 * i) * n;
        b->q[i] = memcpy(block + (size_t)(2 * i + 1) * n, b->problems[i].q, n * sizeof(float));
    }
    CHECK_RESULT(attend_batch(b), TQKV_OK);
    check_outputs(b, "interleaved");
    for (int i = 0; i < N; i++) {
        const void *q = b->q[i];
        for (int j = 0; j < N; j++) {
            memcpy(block + (size_t)(2 * j) * n, b->problems[i].q, n * sizeof(float));
            b->q[i] = b->out[j];
            CHECK_RESULT(attend_batch(b), TQKV_INVALID_ARGUMENT);
        }
        b->q[i] = q;
    }
    for (int i = 0; i < N; i++) b->out[i] = own[i];
    free(block);
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

/* Outputs at random places with random strides are refused exactly if two share a value. */
static void check_random_outputs(const void *parameters)
{
    enum { N = 3, DIM = 32, VALUES = 4096, TRIES = 400 };
    data_random random = {(uint64_t) * (const int *)parameters};
    batch *b = (batch *)test_alloc(sizeof *b);
    float *block = (float *)test_alloc(VALUES * sizeof *block);
    unsigned char *marks = (unsigned char *)test_alloc(VALUES);
    void *own[N];
    int refused = 0;
    memset(b, 0, sizeof *b);
    for (int i = 0; i < N; i++) {
        attend_row row = attend_default_row(TQKV_TQ4, TQKV_TQ4, DIM);
        row.n_kv_heads = 1;
        row.group = 1 + i;
        row.n_queries = 3 - i;
        row.end = row.key_capacity = row.value_capacity = 4;
        make_item(b, &row);
        own[i] = b->out[i];
    }
    for (int attempt = 0; attempt < TRIES; attempt++) {
        const size_t inner = (size_t)(3 + data_below(&random, 6)) * DIM / 3,
                     outer = (size_t)(9 + data_below(&random, 9)) * DIM;
        const bool by_token = data_below(&random, 2) == 0;
        bool overlap = false;
        memset(marks, 0, VALUES);
        for (int i = 0; i < N; i++) {
            const size_t at = (size_t)data_below(&random, 60) * DIM / 2;
            b->items[i].output_strides.token = by_token ? outer : inner;
            b->items[i].output_strides.head = by_token ? inner : outer;
            b->out[i] = block + at;
            overlap = mark_rows(marks, at, &b->items[i], DIM) || overlap;
        }
        refused += overlap;
        CHECK_RESULT(attend_batch(b), overlap ? TQKV_INVALID_ARGUMENT : TQKV_OK);
        for (int i = 0; i < N && !overlap; i++) check_strided(b, i);
    }
    CHECK(refused > TRIES / 8 && refused < TRIES * 7 / 8, "%d of %d refused", refused, TRIES);
    for (int i = 0; i < N; i++) b->out[i] = own[i];
    free(marks);
    free(block);
    free_batch(b);
}

static void check_arguments(const void *parameters)
{
    (void)parameters;
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
static void check_scratch(const void *parameters)
{
    (void)parameters;
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
static void check_no_queries(const void *parameters)
{
    (void)parameters;
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
    test_add(check_overlaps, NULL, 0, "batch/overlaps");
    for (int i = 0; i < 3; i++) test_add(check_random_outputs, &i, sizeof i, "batch/random_outputs/%d", i);
    test_add(check_interleaved, NULL, 0, "batch/interleaved");
    test_add(check_arguments, NULL, 0, "batch/arguments");
    test_add(check_scratch, NULL, 0, "batch/scratch");
}
