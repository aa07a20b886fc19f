/* tqkv_metal_attend against the double-precision reference on the same codes, in a concurrent encoder. */
#include "host.h"
#include "tests/metal/random_attend.h"

static const tqkv_metal_buffer none = {nil, 0};

typedef struct attend_buffers {
    tqkv_metal_store stores[7]; /* keys, values, tail, first keys and values, last keys and values */
    tqkv_metal_attention attention;
    tqkv_metal_buffer q, out, scratch;
    size_t q_size, size, scratch_size; /* size: of out */
} attend_buffers;

static size_t scratch_for(const tqkv_metal_attention *a)
{
    size_t bytes = 0;
    CHECK_RESULT(HOST_SCRATCH(&bytes, attend, a, host_none, host_none, host_none), TQKV_OK);
    return bytes;
}

/* Halves have the centre and the scales of the codes. */
static void open_stores(attend_buffers *b, const attend_problem *p)
{
    const tqkv_store *const from[] = {&p->keys,       &p->values,     &p->tail,      &p->ends[0][0],
                                      &p->ends[0][1], &p->ends[1][0], &p->ends[1][1]};
    tqkv_metal_attention *a = &b->attention;
    const tqkv_metal_store **const to[] = {&a->keys,         &a->values,    &a->tail,       &a->first.keys,
                                           &a->first.values, &a->last.keys, &a->last.values};
    for (int i = 0; i < 7; i++) {
        tqkv_store s = *from[i];
        if (!s.codes) continue;
        if (i > 2) s.center = s.channel_scale = NULL;
        b->stores[i] = host_store(&s);
        if (i > 2) b->stores[i].center = b->stores[1 - i % 2].center;
        if (i > 2) b->stores[i].channel_scale = b->stores[1 - i % 2].channel_scale;
        *to[i] = &b->stores[i];
    }
    if (!p->values.codes) a->values = a->keys;
}

static void open_buffers(attend_buffers *b, const attend_problem *p)
{
    const tqkv_attention *from = &p->attention;
    tqkv_metal_attention *a = &b->attention;
    memset(b, 0, sizeof *b);
    a->attention = *from;
    open_stores(b, p);
    if (p->sinks) a->sinks = host_buffer(p->sinks, (size_t)from->n_heads * sizeof(float));
    if (p->tree) a->tree = host_buffer(p->tree, (size_t)from->n_queries * sizeof(uint64_t));
    const size_t entries = (size_t)(from->n_queries * (from->list.heads ? from->list.heads : 1) * from->list.length);
    if (p->list) a->list = host_buffer(p->list, entries * sizeof(int32_t));
    b->q_size = p->n_rows * p->head_dim * sizeof(float);
    b->size = p->n_rows * p->value_dim * sizeof(float);
    b->q = host_buffer(p->q, b->q_size);
    b->out = host_buffer(p->out, b->size);
    b->scratch_size = scratch_for(a);
    b->scratch = host_zeros(b->scratch_size);
    memset(host_contents(b->scratch), 0xff, b->scratch_size);
}

static void close_buffers(attend_buffers *b)
{
    for (int i = 0; i < 7; i++) {
        if (i > 2) b->stores[i].center = b->stores[i].channel_scale = none;
        host_store_release(&b->stores[i]);
    }
    const tqkv_metal_buffer all[] = {
        b->q, b->out, b->scratch, b->attention.sinks, b->attention.tree, b->attention.list};
    for (int i = 0; i < 6; i++)
        if (all[i].buffer) host_release(all[i]);
}

static tqkv_result attend(const attend_buffers *b)
{
    host_work work = host_begin(true);
    (void)HOST_PREPARE(test_host.metal, attend, &b->attention, none, none, none);
    host_count_calls();
    tqkv_result r = HOST(test_host.metal, work.encoder, attend, &b->attention, b->q, b->scratch, b->out);
    host_check_no_calls();
    host_end(&work);
    return r;
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
    for (int i = 0; i < 3; first += counts[i++])
        CHECK_RESULT(HOST_PREPARE(m, attend_partial, a, none, first, counts[i], none, none, none, none), TQKV_OK);
    CHECK_RESULT(HOST_PREPARE(m, attend_merge, a, none, none, none, a, none, none, none), TQKV_OK);
    CHECK_RESULT(HOST_PREPARE(m, attend_finish, a, none, none, none, none), TQKV_OK);
    first = shape.oldest;
    host_count_calls();
    for (int i = 0; i < 3 && r == TQKV_OK; i++) {
        slice_buffers *s = &slices[i > 0];
        r = HOST(m, work.encoder, attend_partial, a, b->q, first, counts[i], b->scratch, s->out, s->max, s->sum);
        first += counts[i];
        if (i > 0 && r == TQKV_OK)
            r = HOST(m, work.encoder, attend_merge, a, slices->out, slices->max, slices->sum, a, s->out, s->max,
                     s->sum);
    }
    if (r == TQKV_OK) r = HOST(m, work.encoder, attend_finish, a, slices->out, slices->max, slices->sum, b->out);
    host_check_no_calls();
    host_end(&work);
    return r;
}

/* An attention at random: in a concurrent encoder, and of some seeds in slices. */
static void run_random(const void *parameters)
{
    static const int head_dims[] = {64, 32, 128, 512, 80, 448, 192, 64, 48, 256, 96, 1024};
    const int seed = *(const int *)parameters;
    attend_row row = random_attend(seed, head_dims[seed % 12], seed % 16 == 11 ? 1500 : 60);
    if (row.key_center > 1.0f) row.key_center = 0.5f; /* which maxima of slices have */
    if (row.n_queries > 12) row.n_queries = 12;
    if (row.list_block && row.end > 10000) row.end = 10000;
    row.poison = POISON_NONE;
    attend_problem problem;
    attend_buffers b;
    attend_set_up_floats(&problem, &row);
    open_buffers(&b, &problem);
    CHECK_RESULT(attend(&b), TQKV_OK);
    attend_check(&problem, host_contents(b.out), "attend");
    if (seed % 3 == 0) {
        slice_buffers slices[2] = {open_slice(&problem), open_slice(&problem)};
        CHECK_RESULT(attend_in_slices(&b, &problem, slices), TQKV_OK);
        attend_check(&problem, host_contents(b.out), "slices");
        for (int i = 0; i < 2; i++) close_slice(&slices[i]);
    }
    close_buffers(&b);
    attend_tear_down(&problem);
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

void attend_host_cases(void)
{
    for (int seed = 0; seed < 120; seed++) test_add(run_random, &seed, sizeof seed, "attend/random/%d", seed);
    test_add(run_scratch_grows, NULL, 0, "attend/scratch");
    test_add(run_refusals, NULL, 0, "refusals/attend");
    test_add(run_slice_refusals, NULL, 0, "refusals/slices");
#ifdef STANDIN
    add_kernels_wanted();
#endif
}
