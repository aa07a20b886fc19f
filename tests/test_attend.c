/* Attention against the double-precision reference: formats, shapes, slices and the parallel hook. */
#include "attend_fixture.h"

#include <fenv.h>
#include <pthread.h>

/* ---- The parallel hook: three threads, shuffled tasks ---- */

enum { THREADS = 3 };

typedef struct task_pool {
    tqkv_task task;
    void *context;
    int *order; /* [count] */
    int count, calls;
} task_pool;

typedef struct task_thread {
    const task_pool *pool;
    int first;
} task_thread;

static void *run_share(void *argument)
{
    const task_thread *thread = (const task_thread *)argument;
    for (int i = thread->first; i < thread->pool->count; i += THREADS)
        thread->pool->task(thread->pool->context, thread->pool->order[i]);
    return NULL;
}

static int *shuffled(int count, uint64_t seed)
{
    data_random random = {seed};
    int *order = (int *)test_alloc(sizeof(int) * (size_t)count);
    for (int i = 0; i < count; i++) {
        int j = data_below(&random, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    return order;
}

static void run_on_threads(void *user, int count, tqkv_task task, void *context)
{
    task_pool *pool = (task_pool *)user;
    pthread_t threads[THREADS];
    task_thread shares[THREADS];
    pool->task = task;
    pool->context = context;
    pool->count = count;
    pool->calls++;
    pool->order = shuffled(count, (uint64_t)count);
    for (int t = 0; t < THREADS; t++) {
        shares[t].pool = pool;
        shares[t].first = t;
        if (pthread_create(&threads[t], NULL, run_share, &shares[t]) != 0) exit(2);
    }
    for (int t = 0; t < THREADS; t++) pthread_join(threads[t], NULL);
    free(pool->order);
}

static void run_reversed(void *user, int count, tqkv_task task, void *context)
{
    ((task_pool *)user)->calls++;
    for (int i = count - 1; i >= 0; i--) task(context, i);
}

/* The result with the hook must have the bits of the serial one. */
static void attend_in_parallel(attend_problem *problem, bool reversed)
{
    size_t bytes = problem->n_rows * problem->value_dim * sizeof(float);
    float *serial = (float *)test_alloc(bytes);
    task_pool pool;
    memset(&pool, 0, sizeof pool);
    CHECK_RESULT(tqkv_attend(&problem->attention, problem->q, serial), TQKV_OK);
    problem->attention.parallel.run = reversed ? run_reversed : run_on_threads;
    problem->attention.parallel.user = &pool;
    CHECK_RESULT(tqkv_attend(&problem->attention, problem->q, problem->out), TQKV_OK);
    CHECK(!memcmp(serial, problem->out, bytes), "parallel and serial results differ");
    CHECK(pool.calls > 0, "the hook was not called");
    problem->attention.parallel.user = NULL; /* the pool goes out of scope */
    free(serial);
}

/* The caller's rounding mode changes no bit, where stretches are merged by the calling thread neither. */
static void check_mode(const void *parameters)
{
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, *(const int *)parameters);
    row.end = row.key_capacity = row.value_capacity = 5000;
    row.sinks = SINKS_SOME;
    row.key_center = row.value_center = 3.0f;
    attend_problem problem;
    attend_set_up(&problem, &row);
    const size_t bytes = problem.n_rows * problem.value_dim * sizeof(float);
    float *out = (float *)test_alloc(bytes);
    task_pool pool;
    memset(&pool, 0, sizeof pool);
    CHECK_RESULT(tqkv_attend(&problem.attention, problem.q, problem.out), TQKV_OK);
    problem.attention.parallel.run = run_reversed;
    problem.attention.parallel.user = &pool;
#ifdef FE_UPWARD
    fesetround(FE_UPWARD);
#endif
    CHECK_RESULT(tqkv_attend(&problem.attention, problem.q, out), TQKV_OK);
#ifdef FE_UPWARD
    fesetround(FE_TONEAREST);
#endif
    CHECK(!memcmp(out, problem.out, bytes), "the rounding mode changes the output");
    free(out);
    attend_tear_down(&problem);
}

/* ---- Slices ---- */

enum { SLICES = 6 };

typedef struct slice {
    float *out, *max, *sum;
} slice;

static slice make_slice(const attend_problem *problem)
{
    slice s;
    s.out = (float *)test_alloc_filled(problem->n_rows * problem->value_dim * sizeof(float), 0xff);
    s.max = (float *)test_alloc_filled(problem->n_rows * sizeof(float), 0xff);
    s.sum = (float *)test_alloc_filled(problem->n_rows * sizeof(float), 0xff);
    return s;
}

static void free_slice(slice *s)
{
    free(s->out);
    free(s->max);
    free(s->sum);
}

/* Cuts [oldest, end) at random places. Two of them are equal, which makes an empty slice. cuts: [SLICES + 1] */
static void cut(const attend_problem *problem, data_random *random, int64_t *cuts)
{
    reference_shape shape = reference_attention_shape(&problem->attention);
    for (int i = 0; i <= SLICES; i++) cuts[i] = shape.oldest + data_below(random, (int)(shape.end - shape.oldest + 1));
    cuts[0] = shape.oldest;
    cuts[SLICES] = shape.end;
    cuts[2] = cuts[3];
    for (int i = 1; i <= SLICES; i++)
        for (int j = i; j > 0 && cuts[j - 1] > cuts[j]; j--) {
            int64_t larger = cuts[j - 1];
            cuts[j - 1] = cuts[j];
            cuts[j] = larger;
        }
}

static void check_empty_slice(const attend_problem *problem, const slice *s)
{
    for (size_t i = 0; i < problem->n_rows; i++)
        CHECK(s->max[i] == -(float)INFINITY && s->sum[i] == 0.0f, "empty slice: max %g, sum %g", (double)s->max[i],
              (double)s->sum[i]);
    for (size_t i = 0; i < problem->n_rows * problem->value_dim; i++)
        CHECK(s->out[i] == 0.0f, "empty slice: out %g", (double)s->out[i]);
}

/* Attends slice by slice, then merges pairs of slices in a random order. */
static void attend_in_slices(attend_problem *problem, uint64_t seed)
{
    const tqkv_attention *a = &problem->attention;
    data_random random = {seed};
    slice slices[SLICES];
    int64_t cuts[SLICES + 1];
    cut(problem, &random, cuts);
    for (int i = 0; i < SLICES; i++) {
        slice *s = &slices[i];
        *s = make_slice(problem);
        int count = (int)(cuts[i + 1] - cuts[i]);
        CHECK_RESULT(tqkv_attend_partial(a, problem->q, cuts[i], count, s->out, s->max, s->sum), TQKV_OK);
        if (count == 0) check_empty_slice(problem, s);
    }
    for (int left = SLICES; left > 1; left--) {
        int into = data_below(&random, left), from = (into + 1 + data_below(&random, left - 1)) % left;
        slice *d = &slices[into], *s = &slices[from];
        CHECK_RESULT(tqkv_attend_merge(a, d->out, d->max, d->sum, a, s->out, s->max, s->sum), TQKV_OK);
        free_slice(s);
        slices[from] = slices[left - 1];
    }
    CHECK_RESULT(tqkv_attend_finish(a, slices[0].out, slices[0].max, slices[0].sum), TQKV_OK);
    memcpy(problem->out, slices[0].out, problem->n_rows * problem->value_dim * sizeof(float));
    free_slice(&slices[0]);
}

/* ---- One case ---- */

void test_check_attend(const void *parameters)
{
    const attend_row *row = (const attend_row *)parameters;
    attend_problem problem;
    attend_set_up(&problem, row);
    switch (row->way) {
    case WAY_WHOLE:
        CHECK_RESULT(tqkv_attend(&problem.attention, problem.q, problem.out), TQKV_OK);
        break;
    case WAY_SLICES:
        attend_in_slices(&problem, (uint64_t)row->head_dim);
        break;
    case WAY_PARALLEL:
        attend_in_parallel(&problem, false);
        break;
    case WAY_REVERSED:
        attend_in_parallel(&problem, true);
        break;
    }
    attend_check(&problem, problem.out, "out");
    attend_tear_down(&problem);
}

/* ---- Slices over stores of different formats: a prompt in one pair, what follows in another ---- */

typedef struct bases_row {
    tqkv_format first, second; /* of the values; the keys are I8 */
    bool second_unrotated;
    int head_dim;
} bases_row;

static void check_merge_bases(const void *parameters)
{
    const bases_row *row = (const bases_row *)parameters;
    attend_row shape = attend_default_row(TQKV_I8, TQKV_F16, row->head_dim); /* the answer: all values as halves */
    shape.n_queries = 3;
    shape.sinks = SINKS_SOME;
    attend_problem problem;
    attend_set_up(&problem, &shape);
    const int cut = 21, end = (int)shape.end, n_kv_heads = shape.n_kv_heads;
    float *rows = (float *)test_alloc((size_t)(end * n_kv_heads * row->head_dim) * sizeof(float));
    CHECK_RESULT(tqkv_decode(&problem.values, 0, end, TQKV_ORIGINAL, rows), TQKV_OK);
    tqkv_store values[2];
    tqkv_attention a[2];
    slice slices[2];
    for (int i = 0; i < 2; i++) {
        values[i] = test_store(i ? row->second : row->first, row->head_dim, n_kv_heads, end, false);
        values[i].rotation = (i && row->second_unrotated) ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
        CHECK_RESULT(tqkv_encode(&values[i], rows, end, 0), TQKV_OK);
        a[i] = problem.attention;
        a[i].values = &values[i];
        slices[i] = make_slice(&problem);
        CHECK_RESULT(tqkv_attend_partial(&a[i], problem.q, i ? cut : 0, i ? end - cut : cut, slices[i].out,
                                         slices[i].max, slices[i].sum),
                     TQKV_OK);
    }
    CHECK_RESULT(tqkv_attend_merge(&a[0], slices[0].out, slices[0].max, slices[0].sum, &a[1], slices[1].out,
                                   slices[1].max, slices[1].sum),
                 TQKV_OK);
    CHECK_RESULT(tqkv_attend_finish(&a[0], slices[0].out, slices[0].max, slices[0].sum), TQKV_OK);
    const double limit = row->second_unrotated ? 0.5 : 0.02; /* of a sum in the wrong basis: more than 1 */
    for (size_t i = 0; i < problem.n_rows; i++) {
        const double error =
            reference_relative_error(slices[0].out + i * (size_t)row->head_dim,
                                     problem.expected + i * (size_t)row->head_dim, (size_t)row->head_dim);
        CHECK(error < limit, "row %d: relative error %.3g", (int)i, error);
    }
    for (int i = 0; i < 2; i++) {
        free_slice(&slices[i]);
        test_store_free(&values[i]);
    }
    free(rows);
    attend_tear_down(&problem);
}

static void add_merge_bases(void)
{
    static const bases_row rows[] = {{TQKV_F16, TQKV_I8, false, 64},  {TQKV_I8, TQKV_F16, false, 128},
                                     {TQKV_TQ8, TQKV_TQ8, true, 256}, {TQKV_I8, TQKV_TQ8, false, 32},
                                     {TQKV_F16, TQKV_TQ8, true, 512}, {TQKV_TQ8, TQKV_F16, false, 1024}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        test_add(check_merge_bases, &rows[i], sizeof *rows, "attend/merge_bases/%s-%s%s/%d",
                 tqkv_format_name(rows[i].first), tqkv_format_name(rows[i].second),
                 rows[i].second_unrotated ? "_unrotated" : "", rows[i].head_dim);
}

/* The parts that tqkv_attend_partial gives: max is the largest score, sum is the sum of exp(score - max). */
static void check_partial_parts(const void *parameters)
{
    int d = *(const int *)parameters;
    attend_row row = attend_default_row(TQKV_TQ6, TQKV_F16, d);
    row.n_queries = 3;
    row.softcap = 3.0f;
    attend_problem problem;
    attend_set_up(&problem, &row);
    slice s = make_slice(&problem);
    CHECK_RESULT(tqkv_attend_partial(&problem.attention, problem.q, 8, 20, s.out, s.max, s.sum), TQKV_OK);
    for (size_t i = 0; i < problem.n_rows; i++) {
        double largest = -INFINITY, sum = 0.0, scores[20], query[REFERENCE_MAX_DIM], key[REFERENCE_MAX_DIM];
        for (int j = 0; j < d; j++) query[j] = (double)problem.q[i * (size_t)d + (size_t)j];
        for (int p = 0; p < 20; p++) {
            reference_decode_as(REFERENCE_INTEGERS, &problem.keys, (int)(i % 4) / 2, 8 + p, key);
            scores[p] = reference_score(&problem.attention, query, key, 1.0 / sqrt((double)d));
            largest = scores[p] > largest ? scores[p] : largest;
        }
        for (int p = 0; p < 20; p++) sum += exp(scores[p] - largest);
        /* sum is relative to max: compare their product sum * exp(max). */
        double held = (double)s.sum[i] * exp((double)s.max[i]), expected = sum * exp(largest);
        CHECK(fabs(held - expected) <= problem.tolerance * expected, "row %d: sum * exp(max) is %g, not %g", (int)i,
              held, expected);
        CHECK(fabs((double)s.max[i] - largest) <= problem.tolerance, "row %d: max %g, not %g", (int)i, (double)s.max[i],
              largest);
    }
    free_slice(&s);
    attend_tear_down(&problem);
}

/* Calls without queries look at no array, and heads have no default. */
static void check_no_queries(const void *parameters)
{
    (void)parameters;
    attend_row row = attend_default_row(TQKV_TQ4, TQKV_I8, 64);
    attend_problem problem;
    float sentinel[4] = {42.0f, 42.0f, 42.0f, 42.0f};
    attend_set_up(&problem, &row);
    tqkv_attention a = problem.attention;
    a.n_queries = 0;
    for (int i = 0; i < 2; i++) {
        float *out = i ? sentinel : NULL;
        CHECK_RESULT(tqkv_attend(&a, out, out), TQKV_OK);
        CHECK_RESULT(tqkv_attend_partial(&a, out, 0, 3, out, out, out), TQKV_OK);
        CHECK_RESULT(tqkv_attend_merge(&a, out, out, out, &a, out, out, out), TQKV_OK);
        CHECK_RESULT(tqkv_attend_finish(&a, out, out, out), TQKV_OK);
    }
    for (int i = 0; i < 4; i++) CHECK(sentinel[i] == 42.0f, "a value was written");
    CHECK_RESULT(tqkv_attend_partial(&a, NULL, 0, 1 << 20, NULL, NULL, NULL), TQKV_OUT_OF_RANGE);
    for (int n_queries = 0; n_queries < 2; n_queries++) {
        a.n_queries = n_queries;
        a.n_heads = 0;
        CHECK_RESULT(tqkv_attend(&a, problem.q, problem.out), TQKV_INVALID_ARGUMENT);
        CHECK_RESULT(tqkv_attend_finish(&a, problem.out, sentinel, sentinel), TQKV_INVALID_ARGUMENT);
    }
    attend_tear_down(&problem);
}

/* ---- One position, exactly ---- */

typedef struct exact_row {
    tqkv_format format;
    int head_dim, group;
} exact_row;

/* A store of one position and one KV head, with a query for each of `group` heads, in the basis of the codes. */
static void open_position(const exact_row *row, tqkv_store *s, tqkv_attention *a)
{
    memset(s, 0, sizeof *s);
    memset(a, 0, sizeof *a);
    s->format = row->format;
    s->head_dim = row->head_dim;
    s->n_kv_heads = s->capacity = 1;
    s->codes_size = reference_row_bytes(row->format, row->head_dim);
    s->norms_size = (size_t)reference_norms_per_row(row->format, row->head_dim) * sizeof(float);
    s->codes = test_alloc(s->codes_size);
    s->norms = (float *)test_alloc(s->norms_size);
    a->keys = a->values = s;
    a->n_heads = row->group;
    a->n_queries = 1;
    a->end = 1;
    a->scale = 1.0f;
    a->query_basis = a->output_basis = TQKV_ROTATED;
}

/* Any bytes are codes; the norms differ by block. */
static void fill_position(tqkv_store *s, data_random *random)
{
    uint8_t *codes = (uint8_t *)s->codes;
    for (size_t i = 0; i < s->codes_size; i++) codes[i] = (uint8_t)data_bits(random);
    for (size_t i = 0; i < s->norms_size / sizeof(float); i++) s->norms[i] = 0.7f + (float)data_below(random, 1000);
}

/* A query with a single 1 gives one element of the key as its score. A single position gives its value the weight 1. So
   attention must return the decoded row, in whatever way and order it looks codes up. */
static void check_exact(const void *parameters)
{
    const exact_row *row = (const exact_row *)parameters;
    const int d = row->head_dim, group = row->group;
    const size_t size = sizeof(float) * (size_t)(group * d);
    data_random random = {(uint64_t)(d + group)};
    tqkv_store store;
    tqkv_attention attention;
    open_position(row, &store, &attention);
    float *q = (float *)test_alloc(size), *out = (float *)test_alloc(size);
    tqkv_store stored = store; /* which the reference leaves as it is */
    double decoded[REFERENCE_MAX_DIM];
    stored.rotation = TQKV_ROTATION_OFF;
    for (int first = 0; first < d; first += group) {
        float max[8], sum[8];
        fill_position(&store, &random);
        reference_decode_as(REFERENCE_INTEGERS, &stored, 0, 0, decoded);
        memset(q, 0, size);
        for (int g = 0; g < group; g++) q[g * d + (first + g) % d] = 1.0f;
        CHECK_RESULT(tqkv_attend_partial(&attention, q, 0, 1, out, max, sum), TQKV_OK);
        for (int g = 0; g < group; g++) {
            const double key = decoded[(first + g) % d];
            CHECK(fabs((double)max[g] - key) <= 1e-6 * fabs(key), "element %d of the key", (first + g) % d);
            for (int i = 0; i < d; i++)
                CHECK(fabs((double)out[g * d + i] - decoded[i]) <= 1e-6 * fabs(decoded[i]), "element %d of the value",
                      i);
        }
    }
    free(store.codes);
    free(store.norms);
    free(q);
    free(out);
}

static void add_exact(void)
{
    for (int f = 0; f < TEST_FORMATS; f++)
        for (int i = 0; i < TEST_ALL_HEAD_DIMS * 5; i++) {
            const int head_dim = test_all_head_dims[i % TEST_ALL_HEAD_DIMS];
            const exact_row row = {test_formats[f], head_dim, 1 + i / TEST_ALL_HEAD_DIMS};
            const bool power = (head_dim & (head_dim - 1)) == 0; /* of the other sizes two groups each */
            if (!power && (row.group + f + head_dim / 16) % 5 > 1) continue;
            if (row.format == TQKV_F16) continue; /* random bytes may be NaN */
            test_add(check_exact, &row, sizeof row, "attend/exact/%s/%d/%d", tqkv_format_name(row.format), row.head_dim,
                     row.group);
        }
}

/* ---- Every pair of formats; the other parameters vary with it ---- */

static void add_pair(int index)
{
    static const int queries[7] = {1, 2, 3, 5, 17, 33, 65};
    static const int lengths[9] = {1, 7, 31, 32, 64, 65, 100, 129, 200};
    static const int windows[5] = {0, 0, 1, 9, 40};
    tqkv_format keys = test_formats[index / TEST_FORMATS], values = test_formats[index % TEST_FORMATS];
    attend_row row = attend_default_row(keys, values, test_head_dims[(index + index / TEST_FORMATS) % 6]);
    row.n_queries = queries[index % 7];
    row.group = 1 + index % 16;
    row.n_kv_heads = row.group * row.n_queries * row.head_dim > 65536 ? 1 : 1 + index % 3;
    row.end = lengths[index % 9];
    row.window = windows[index % 5];
    row.key_ring = row.value_ring = index % 2 != 0;
    row.key_capacity = row.key_ring ? (int)row.end / 2 + 1 + index % 40 : (int)row.end + index % 3;
    row.value_capacity = row.key_capacity;
    if (index % 4 == 3) row.softcap = 5.0f;
    if (index % 8 >= 6) row.sinks = SINKS_SOME;
    test_add(test_check_attend, &row, sizeof row, "attend/pair/%s-%s/%d", tqkv_format_name(keys),
             tqkv_format_name(values), row.head_dim);
}

static void add_query_counts(void)
{
    for (int n = 1; n <= 65; n++) {
        attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 32 << n % 3);
        row.n_queries = n;
        row.group = 1 + n % 5;
        row.n_kv_heads = 1;
        row.end = 70;
        row.key_capacity = row.value_capacity = 70;
        row.window = n % 3 ? 0 : 20;
        test_add(test_check_attend, &row, sizeof row, "attend/queries/%d", n);
    }
}

static void add_groups(void)
{
    for (int group = 1; group <= 16; group++)
        for (int d = 0; d < 6; d++) {
            attend_row row = attend_default_row(test_formats[(group + d) % TEST_FORMATS],
                                                test_formats[(group + 3 * d) % TEST_FORMATS], test_head_dims[d]);
            row.group = group;
            row.n_queries = 1 + (group + d) % 3;
            test_add(test_check_attend, &row, sizeof row, "attend/group/%d/%d", group, row.head_dim);
        }
}

/* The sizes that are no power of two, with I8 keys and TQ4 values, and with random formats and options. */
static void add_sizes(void)
{
    for (int i = 0; i < TEST_ALL_HEAD_DIMS * 5; i++) {
        const int head_dim = test_all_head_dims[i / 5], seed = i % 5;
        data_random random = {(uint64_t)i};
        attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, head_dim);
        if ((head_dim & (head_dim - 1)) == 0) continue;
        if (seed > 0) {
            row.key_format = test_formats[data_below(&random, TEST_FORMATS)];
            row.value_format = test_formats[data_below(&random, TEST_FORMATS)];
            row.end = 1 + data_below(&random, 130);
            row.window = data_below(&random, 2) * 20;
            row.softcap = data_below(&random, 3) == 0 ? 5.0f : 0.0f;
            row.sinks = data_below(&random, 3) == 0 ? SINKS_SOME : SINKS_NONE;
        }
        row.way = seed == 1 ? WAY_SLICES : WAY_WHOLE;
        row.n_kv_heads = 1;
        row.group = 1 + data_below(&random, 6);
        row.n_queries = 1 + data_below(&random, 3);
        row.key_capacity = row.value_capacity = (int)row.end;
        test_add(test_check_attend, &row, sizeof row, "attend/size/%d/%s-%s/seed%d", head_dim,
                 tqkv_format_name(row.key_format), tqkv_format_name(row.value_format), i);
    }
}

void test_attend_cases(void)
{
    add_sizes();
    add_merge_bases();
    test_add(check_no_queries, NULL, 0, "attend/no_queries");
    for (int i = 0; i < TEST_FORMATS * TEST_FORMATS; i++) add_pair(i);
    add_query_counts();
    add_groups();
    add_exact();
    for (int d = 0; d < 6; d += 2)
        test_add(check_mode, &test_head_dims[d], sizeof(int), "attend/mode/%d", test_head_dims[d]);
    for (int d = 0; d < 6; d++)
        test_add(check_partial_parts, &test_head_dims[d], sizeof(int), "attend/partial_parts/%d", test_head_dims[d]);
}
