/* tqkv_metal_attend against the double-precision reference on the same codes, in a concurrent encoder. */
#include "host.h"
#include "tests/attend_fixture.h"

static const tqkv_metal_buffer none = {nil, 0};

typedef struct attend_buffers {
    tqkv_metal_store keys, values, ends[4];
    tqkv_metal_attention attention;
    tqkv_metal_buffer q, out, scratch;
    size_t size, scratch_size; /* of q and out */
} attend_buffers;

static size_t scratch_for(const tqkv_metal_attention *a)
{
    size_t bytes = 0;
    CHECK_RESULT(HOST_SCRATCH(&bytes, attend, a, host_none, host_none, host_none), TQKV_OK);
    return bytes;
}

static void open_buffers(attend_buffers *b, const attend_problem *p)
{
    const tqkv_attention *from = &p->attention;
    memset(b, 0, sizeof *b);
    b->keys = host_store(&p->keys);
    b->values = host_store(&p->values);
    tqkv_metal_attention *a = &b->attention;
    a->keys = &b->keys;
    a->values = &b->values;
    a->attention = *from;
    const tqkv_metal_store **const to[] = {&a->first.keys, &a->first.values, &a->last.keys, &a->last.values};
    for (int i = 0; i < 4; i++) {
        if (!p->ends[i / 2][i % 2].codes) continue;
        b->ends[i] = host_store(&p->ends[i / 2][i % 2]);
        *to[i] = &b->ends[i];
    }
    if (p->sinks) a->sinks = host_buffer(p->sinks, (size_t)from->n_heads * sizeof(float));
    if (p->tree) a->tree = host_buffer(p->tree, (size_t)from->n_queries * sizeof(uint64_t));
    b->size = p->n_rows * p->head_dim * sizeof(float);
    b->q = host_buffer(p->q, b->size);
    b->out = host_buffer(p->out, b->size);
    b->scratch_size = scratch_for(a);
    b->scratch = host_zeros(b->scratch_size);
    memset(host_contents(b->scratch), 0xff, b->scratch_size);
}

static void close_buffers(attend_buffers *b)
{
    host_store_release(&b->keys);
    host_store_release(&b->values);
    for (int i = 0; i < 4; i++)
        if (b->ends[i].codes.buffer) host_store_release(&b->ends[i]);
    host_release(b->q);
    host_release(b->out);
    host_release(b->scratch);
    if (b->attention.sinks.buffer) host_release(b->attention.sinks);
    if (b->attention.tree.buffer) host_release(b->attention.tree);
}

static tqkv_result attend(const attend_buffers *b)
{
    host_work work = host_begin(true);
    tqkv_result r = HOST(test_host.metal, work.encoder, attend, &b->attention, b->q, b->scratch, b->out);
    host_end(&work);
    return r;
}

static void run_attend(const void *parameters)
{
    attend_problem problem;
    attend_buffers buffers;
    attend_set_up_floats(&problem, parameters);
    open_buffers(&buffers, &problem);
    CHECK_RESULT(attend(&buffers), TQKV_OK);
    attend_check(&problem, host_contents(buffers.out), "attend");
    close_buffers(&buffers);
    attend_tear_down(&problem);
}

/* Buffers of a slice. */
typedef struct slice_buffers {
    tqkv_metal_buffer out, max, sum;
} slice_buffers;

static slice_buffers open_slice(const attend_problem *p)
{
    const slice_buffers s = {host_zeros(p->n_rows * p->value_dim * sizeof(float)),
                             host_zeros(p->n_rows * sizeof(float)), host_zeros(p->n_rows * sizeof(float))};
    return s;
}

static void close_slice(slice_buffers *s)
{
    host_release(s->out);
    host_release(s->max);
    host_release(s->sum);
}

/* Records three slices into one encoder, each merged into the first, then the end. In order: a serial encoder. */
static tqkv_result attend_in_slices(const attend_buffers *b, const attend_problem *p, slice_buffers *slices)
{
    tqkv_metal *m = test_host.metal;
    const tqkv_metal_attention *a = &b->attention;
    const reference_shape shape = reference_attention_shape(&p->attention);
    const int all = (int)(shape.end - shape.oldest), counts[] = {all / 3, 0, all - all / 3};
    int64_t first = shape.oldest;
    host_work work = host_begin(false);
    tqkv_result r = TQKV_OK;
    for (int i = 0; i < 3 && r == TQKV_OK; i++) {
        slice_buffers *s = &slices[i > 0];
        r = HOST(m, work.encoder, attend_partial, a, b->q, first, counts[i], b->scratch, s->out, s->max, s->sum);
        first += counts[i];
        if (i > 0 && r == TQKV_OK)
            r = HOST(m, work.encoder, attend_merge, a, slices->out, slices->max, slices->sum, a, s->out, s->max,
                     s->sum);
    }
    if (r == TQKV_OK) r = HOST(m, work.encoder, attend_finish, a, slices->out, slices->max, slices->sum, b->out);
    host_end(&work);
    return r;
}

static void run_slices(const void *parameters)
{
    attend_problem problem;
    attend_buffers b;
    attend_set_up_floats(&problem, parameters);
    open_buffers(&b, &problem);
    slice_buffers slices[2] = {open_slice(&problem), open_slice(&problem)};
    CHECK_RESULT(attend_in_slices(&b, &problem, slices), TQKV_OK);
    attend_check(&problem, host_contents(b.out), "slices");
    for (int i = 0; i < 2; i++) close_slice(&slices[i]);
    close_buffers(&b);
    attend_tear_down(&problem);
}

static void add_slices(void)
{
    for (int i = 0; i < 6; i++) {
        attend_row row =
            attend_default_row(i % 2 ? TQKV_I8 : TQKV_F16, i % 3 ? TQKV_TQ4 : TQKV_F16, i % 3 == 2 ? 48 : 64);
        row.key_ring = row.value_ring = i % 2 != 0;
        row.end = i % 2 ? 1000 : 45;
        row.group = i == 5 ? 4 : 2;
        row.n_queries = 1 + i;
        row.sinks = i > 2 ? SINKS_SOME : SINKS_NONE;
        test_add(run_slices, &row, sizeof row, "attend/slices/%d", i);
    }
}

/* What the calls over slices refuse, and in which words. */
static void run_slice_refusals(const void *parameters)
{
    attend_problem problem;
    attend_buffers b;
    tqkv_metal *m = test_host.metal;
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    (void)parameters;
    attend_set_up_floats(&problem, &row);
    open_buffers(&b, &problem);
    slice_buffers s = open_slice(&problem), other = open_slice(&problem);
    const tqkv_metal_attention *a = &b.attention;
    host_work work = host_begin(false);
    id<MTLComputeCommandEncoder> e = work.encoder;
    CHECK_REFUSED(m, HOST(m, e, attend_partial, a, b.q, 30, 11, b.scratch, s.out, s.max, s.sum), TQKV_OUT_OF_RANGE,
                  "attend_partial");
    CHECK_REFUSED(m, HOST(m, e, attend_partial, a, b.q, 0, 9, b.scratch, s.out, none, s.sum), TQKV_INVALID_ARGUMENT,
                  "max: no buffer");
    CHECK_REFUSED(m, HOST(m, e, attend_partial, a, b.q, 0, 9, b.scratch, s.out, s.sum, s.sum), TQKV_INVALID_ARGUMENT,
                  "max and sum overlap");
    CHECK_REFUSED(m, HOST(m, nil, attend_partial, a, b.q, 0, 9, b.scratch, s.out, s.max, s.sum), TQKV_INVALID_ARGUMENT,
                  "no encoder");
    CHECK_RESULT(HOST(NULL, e, attend_partial, a, b.q, 0, 9, b.scratch, s.out, s.max, s.sum), TQKV_INVALID_ARGUMENT);
    CHECK_REFUSED(m, HOST(m, e, attend_merge, a, s.out, s.max, s.sum, a, s.out, other.max, other.sum),
                  TQKV_INVALID_ARGUMENT, "overlap");
    CHECK_REFUSED(m, HOST(m, e, attend_merge, NULL, s.out, s.max, s.sum, a, other.out, other.max, other.sum),
                  TQKV_INVALID_ARGUMENT, "attend_merge");
    CHECK_REFUSED(m, HOST(m, e, attend_merge, a, s.out, s.max, s.sum, NULL, other.out, other.max, other.sum),
                  TQKV_INVALID_ARGUMENT, "attend_merge");
    CHECK_REFUSED(m, HOST(m, e, attend_finish, a, s.out, s.max, s.sum, s.out), TQKV_INVALID_ARGUMENT,
                  "out and src_out overlap");
    s.max.offset += 4;
    CHECK_REFUSED(m, HOST(m, e, attend_finish, a, s.out, s.max, s.sum, b.out), TQKV_INVALID_ARGUMENT, "src_max: needs");
    s.max.offset -= 4;
    host_end(&work);
    close_slice(&s);
    close_slice(&other);
    close_buffers(&b);
    attend_tear_down(&problem);
}

/* Scratch sized before the first position suffices up to the last one. */
static void run_scratch_grows(const void *parameters)
{
    attend_problem problem;
    attend_buffers b;
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 32);
    (void)parameters;
    row.end = row.key_capacity = row.value_capacity = 4000;
    attend_set_up_floats(&problem, &row);
    open_buffers(&b, &problem);
    const size_t most = b.scratch_size;
    b.attention.attention.end = 0;
    CHECK(scratch_for(&b.attention) == most, "an empty cache asks for less");
    for (b.attention.attention.end = 0; b.attention.attention.end <= 4000; b.attention.attention.end += 800)
        CHECK_RESULT(attend(&b), TQKV_OK);
    CHECK(most > problem.n_rows * 34 * sizeof(float), "4000 positions are not split");
    close_buffers(&b);
    attend_tear_down(&problem);
}

/* Buffers that are missing, too short, or overlap; the rest of the call is right. */
static void refuse_buffers(attend_buffers whole)
{
    tqkv_metal *m = test_host.metal;
    attend_buffers b;
    b = whole, b.scratch.offset += 4;
    CHECK_REFUSED(m, attend(&b), TQKV_INVALID_ARGUMENT, "scratch: needs");
    b = whole, b.scratch = none;
    CHECK_REFUSED(m, attend(&b), TQKV_INVALID_ARGUMENT, "scratch: no buffer");
    b = whole, b.out = b.q;
    CHECK_REFUSED(m, attend(&b), TQKV_INVALID_ARGUMENT, "q and out overlap");
    b = whole, b.out = b.scratch;
    CHECK_REFUSED(m, attend(&b), TQKV_INVALID_ARGUMENT, "overlap");
    b = whole, b.attention.sinks = b.scratch;
    CHECK_REFUSED(m, attend(&b), TQKV_INVALID_ARGUMENT, "sinks and scratch overlap");
    b = whole, b.attention.sinks.offset += 8;
    CHECK_REFUSED(m, attend(&b), TQKV_INVALID_ARGUMENT, "sinks: needs");
    b = whole, b.q.offset += 2;
    CHECK_REFUSED(m, attend(&b), TQKV_INVALID_ARGUMENT, "q: offset");
}

static void run_refusals(const void *parameters)
{
    attend_problem problem;
    attend_buffers whole, b;
    tqkv_metal *m = test_host.metal;
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    (void)parameters;
    row.sinks = SINKS_SOME;
    attend_set_up_floats(&problem, &row);
    open_buffers(&whole, &problem);
    refuse_buffers(whole);
    b = whole, b.attention.attention.end = row.key_capacity + 1;
    CHECK_REFUSED(m, attend(&b), TQKV_OUT_OF_RANGE, "attend");
    b = whole, b.attention.attention.n_heads = 3;
    CHECK_REFUSED(m, attend(&b), TQKV_INVALID_ARGUMENT, "attend");
    b = whole, b.attention.attention.window = -1;
    CHECK_REFUSED(m, attend(&b), TQKV_INVALID_ARGUMENT, "attend");
    b = whole, b.attention.attention.n_queries = INT32_MAX;
    CHECK_REFUSED(m, attend(&b), TQKV_INVALID_ARGUMENT, "attend");
    b = whole, b.attention.keys = NULL;
    CHECK_REFUSED(m, attend(&b), TQKV_INVALID_ARGUMENT, "attend");
    CHECK_RESULT(HOST(NULL, nil, attend, &whole.attention, whole.q, whole.scratch, whole.out), TQKV_INVALID_ARGUMENT);
    CHECK_REFUSED(m, HOST(m, nil, attend, &whole.attention, whole.q, whole.scratch, whole.out), TQKV_INVALID_ARGUMENT,
                  "no encoder");
    CHECK(!memcmp(host_contents(whole.out), problem.out, whole.size), "a refused call has written");
    CHECK_RESULT(attend(&whole), TQKV_OK);
    attend_check(&problem, host_contents(whole.out), "after refusals");
    close_buffers(&whole);
    attend_tear_down(&problem);
}

#ifdef STANDIN
/* A library with the kernel `tables` alone: the refusal names the kernel that a call wants. */
typedef struct wanted_kernel {
    char library[20], kernel[40];
    int group, matrix_group;
} wanted_kernel;

static void run_kernel_wanted(const void *parameters)
{
    const wanted_kernel *c = parameters;
    char path[400];
    tqkv_metal *m = NULL;
    REQUIRE(test_host.stale, "needs --stale");
    snprintf(path, sizeof path, "%s/%s.metallib", test_host.stale, c->library);
    const tqkv_metal_desc desc = {.library_path = path, .device = test_host.device};
    CHECK_RESULT(tqkv_metal_create(&desc, &m), TQKV_OK);
    attend_problem problem;
    attend_buffers b;
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    row.group = c->group;
    attend_set_up_floats(&problem, &row);
    open_buffers(&b, &problem);
    b.attention.matrix_group = c->matrix_group;
    host_work work = host_begin(false);
    CHECK_REFUSED(m, HOST(m, work.encoder, attend, &b.attention, b.q, b.scratch, b.out), TQKV_METAL_ERROR, c->kernel);
    host_end(&work);
    close_buffers(&b);
    attend_tear_down(&problem);
    tqkv_metal_destroy(m);
}

/* A group of matrix_group and more multiplies matrices unless the shaders find another order of their elements. */
static void add_kernels_wanted(void)
{
    const wanted_kernel as_expected = {"tables_alone", "tqkv_attend_matrix_d64", 8, 0},
                        otherwise = {"matrices", "tqkv_attend_d64", 8, 0},
                        narrow = {"tables_alone", "tqkv_attend_d64", 4, 0},
                        asked = {"tables_alone", "tqkv_attend_matrix_d64", 2, 2};
    test_add(run_kernel_wanted, &as_expected, sizeof as_expected, "attend/matrices/as_expected");
    test_add(run_kernel_wanted, &otherwise, sizeof otherwise, "attend/matrices/in_another_order");
    test_add(run_kernel_wanted, &narrow, sizeof narrow, "attend/matrices/narrow");
    test_add(run_kernel_wanted, &asked, sizeof asked, "attend/matrices/narrow_asked");
}
#endif

static void add(attend_row row, const char *what) { test_add(run_attend, &row, sizeof row, "attend/%s", what); }

static void add_named(attend_row row, const char *what, int number)
{
    test_add(run_attend, &row, sizeof row, "attend/%s/%d", what, number);
}

static void add_shapes(void)
{
    const int groups[] = {1, 3, 8, 9, 16}, queries[] = {1, 2, 5, 17};
    for (int g = 0; g < 5; g++)
        for (int q = 0; q < 4; q++) {
            attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
            row.group = groups[g];
            row.n_queries = queries[q];
            test_add(run_attend, &row, sizeof row, "attend/group%d/queries%d", groups[g], queries[q]);
        }
}

static void add_residencies(void)
{
    /* capacity, end, kv_len, window, ring */
    const int rows[][5] = {{48, 0, 0, 0, 0},     {48, 1, 0, 0, 0},    {7, 5, 0, 0, 0},
                           {7, 23, 0, 0, 1},     {50, 1050, 0, 0, 1}, {50, 1037, 21, 0, 1},
                           {96, 1010, 0, 40, 1}, {100, 90, 33, 0, 0}, {100, 90, 0, 1, 0}};
    for (int i = 0; i < 9; i++) {
        attend_row row = attend_default_row(TQKV_TQ4, TQKV_F16, 64);
        row.key_capacity = row.value_capacity = rows[i][0];
        row.end = rows[i][1];
        row.kv_len = rows[i][2];
        row.window = rows[i][3];
        row.key_ring = row.value_ring = rows[i][4] != 0;
        row.n_queries = 1 + i % 3;
        add_named(row, "resident", i);
    }
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ5, 64);
    row.key_ring = row.value_ring = true;
    row.key_capacity = 70;
    row.value_capacity = 45;
    row.end = 1000;
    add(row, "resident/different_capacities");
}

static void add_long(void)
{
    /* end, n_kv_heads, window: whole and split contexts */
    const int rows[][3] = {{600, 1, 0}, {1500, 1, 0}, {2100, 2, 0}, {2100, 1, 700}, {4200, 1, 0}};
    for (int i = 0; i < 5; i++) {
        attend_row row = attend_default_row(i % 2 ? TQKV_I8 : TQKV_TQ6, i % 2 ? TQKV_TQ4 : TQKV_TQ8, 32);
        row.end = rows[i][0];
        row.key_capacity = row.value_capacity = rows[i][0] + 5;
        row.n_kv_heads = rows[i][1];
        row.window = rows[i][2];
        row.sinks = SINKS_SOME;
        add_named(row, "long", rows[i][0] + rows[i][2]);
    }
}

static void add_options(void)
{
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    row.softcap = 5.0f;
    row.query_size = 20.0f;
    add(row, "softcap");
    row = attend_default_row(TQKV_TQ8, TQKV_TQ8, 64);
    row.scale = 0.3f;
    add(row, "scale");
    for (int sinks = SINKS_SOME; sinks <= SINKS_MINUS_INFINITY; sinks++) {
        row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
        row.sinks = (attend_sinks)sinks;
        row.n_queries = 45; /* some see no position */
        add_named(row, "sinks", sinks);
    }
    for (int bases = 1; bases < 4; bases++) {
        row = attend_default_row(TQKV_TQ4, TQKV_TQ5, 128);
        row.query_basis = bases & 1 ? TQKV_ROTATED : TQKV_ORIGINAL;
        row.output_basis = bases & 2 ? TQKV_ROTATED : TQKV_ORIGINAL;
        add_named(row, "bases", bases);
    }
    row = attend_default_row(TQKV_F16, TQKV_TQ8, 128);
    row.values_unrotated = true;
    add(row, "hybrid");
    row = attend_default_row(TQKV_TQ6, TQKV_TQ8, 512);
    row.block_scale = 1.25f;
    add(row, "block_scale");
}

/* Positions that are kept as halves: up to four dispatches. */
static void add_ends(void)
{
    for (int i = 0; i < 6; i++) {
        attend_row row = attend_default_row(i % 2 ? TQKV_I8 : TQKV_TQ4, i % 3 ? TQKV_TQ4 : TQKV_F16, 64);
        row.key_ring = row.value_ring = i % 2 != 0;
        row.end = i % 2 ? 1000 : 45;
        row.group = i > 3 ? 4 : 2;
        row.n_queries = 1 + i;
        row.exact_first = i % 3 == 1 ? 0 : 5;
        row.exact_last = i == 2 ? 0 : 20;
        row.codes_of_ends = i == 5;
        row.sinks = i > 2 ? SINKS_SOME : SINKS_NONE;
        add_named(row, "ends", i);
    }
}

void attend_host_cases(void)
{
    for (int k = 0; k < TEST_FORMATS; k++)
        for (int v = 0; v < TEST_FORMATS; v++) {
            attend_row row = attend_default_row(test_formats[k], test_formats[v], 64);
            test_add(run_attend, &row, sizeof row, "attend/pair/%s_%s", tqkv_format_name(test_formats[k]),
                     tqkv_format_name(test_formats[v]));
        }
    for (int d = 0; d < TQKV__KERNEL_DIMS; d++) {
        attend_row row = attend_default_row(test_formats[d % TEST_FORMATS], TQKV_TQ4, TQKV__KERNEL_DIM(d));
        row.n_queries = 3;
        add_named(row, "head_dim", row.head_dim);
    }
    add_shapes();
    add_residencies();
    add_long();
    add_options();
    test_add(run_scratch_grows, NULL, 0, "attend/scratch");
    test_add(run_refusals, NULL, 0, "refusals/attend");
    add_ends();
    add_slices();
    test_add(run_slice_refusals, NULL, 0, "refusals/slices");
#ifdef STANDIN
    add_kernels_wanted();
#endif
}
