/* How the plan of attention divides the context, the query rows and the kernels. */
#include "plan_fixture.h"

/* Few threadgroups of short stretches, all of one section, have strands, but attend_matrix of long rows and of many
   columns. n: stretches, before the end of which `end` positions of the store lie */
static int expected_strands(const tqkv_metal_dispatch *d, int64_t n, int64_t end)
{
    const int first = attend_args(d).first_stretch, columns = constant(d, TQKV_FC_COLUMNS);
    const bool matrix = d->kernel.family == TQKV_METAL_ATTEND_MATRIX,
               has_strands = !matrix || (columns <= 16 && d->kernel.head_dim * TQKV__DIM_UNIT <= 256);
    const bool short_ones = first + n <= attend_args(d).n_short && (first + n - 1) / 16 == first / 16;
    return has_strands && short_ones && end > 128 && d->grid[0] * d->grid[1] * (size_t)n <= 64 ? 4 : 1;
}

/* Stretches of 512 positions up to 8192 and of 2048 beyond, all threadgroups together at least once. */
static void check_stretches(const tqkv_metal_dispatch d[2], int64_t end, size_t scratch)
{
    const int64_t stretches = end <= 8192 ? (end + 511) / 512 : 16 + (end - 8192 + 2047) / 2048;
    const int64_t n = stretches > 1 ? stretches : 1, sections = (n + 15) / 16;
    const size_t row = ((size_t)d->kernel.head_dim * TQKV__DIM_UNIT + 2) * sizeof(float),
                 n_rows = (size_t)merge_args(d).n_rows;
    const bool full = d->grid[0] * d->grid[1] >= 256, each = !full && n_rows * row * (size_t)n <= 32 << 20;
    const tqkv_metal_binding state = binding(d, "scratch");
    const int strands = each ? expected_strands(d, n, end) : 1;
    CHECK(attend_args(d).strands == strands && merge_args(d).strands == strands, "%d strands", attend_args(d).strands);
    CHECK(constant(d, TQKV_FC_STRANDS) == (strands > 1), "a pipeline without strands, or with");
    CHECK(state.at.offset + state.size <= scratch, "%zu bytes of scratch", state.at.offset + state.size);
    CHECK(attend_args(d).first_stretch == 0 && attend_args(d).stretch_tiles == 16 && attend_args(d).n_short == 16,
          "the stretches");
    CHECK((int64_t)d->grid[2] == (full   ? 1
                                  : each ? n * strands
                                         : sections),
          "%zu splits, %d stretches", d->grid[2], (int)n);
    CHECK(attend_args(d).sections_each == (full   ? sections
                                           : each ? 0
                                                  : 1),
          "%d sections each", attend_args(d).sections_each);
    CHECK(state.at.offset + state.size == n_rows * (row * (full && sections > 1 ? 2 : d->grid[2]) + 2 * sizeof(float)),
          "partial results");
    CHECK(merge_args(d).n_partials == (int)d->grid[2] &&
              merge_args(d).section == (strands > 1 ? strands
                                        : each      ? 16
                                                    : 1) &&
              merge_args(d).before == 0,
          "the merge");
}

/* Contexts of all lengths: the blocks hold all rows, and the splits fit into the scratch of
 * tqkv_metal_plan_attend_scratch. */
static void check_split(const void *row)
{
    const int head_dim = *(const int *)row, groups[] = {1, 3, 8, 16}, queries[] = {1, 2, 9, 64, 300};
    for (int g = 0; g < 4; g++)
        for (int q = 0; q < 5; q++) {
            const int capacity = 90000, rows = groups[g] * queries[q];
            const tqkv_metal_store keys = plan_store(TQKV_TQ4, head_dim, capacity, false, 0),
                                   values = plan_store(TQKV_TQ8, head_dim, capacity, false, 2);
            size_t scratch = 0;
            tqkv_metal_attention a = plan_attention(&keys, &values);
            a.attention.n_heads = 3 * groups[g];
            a.attention.n_queries = queries[q];
            CHECK_RESULT(plan_scratch(&a, &scratch), TQKV_OK);
            for (a.attention.end = 0; a.attention.end <= capacity; a.attention.end += 2500) {
                tqkv_metal_plan plan;
                const tqkv_metal_dispatch *const d = plan.d;
                CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
                const int columns = constant(d, TQKV_FC_COLUMNS);
                const bool matrix = d->kernel.family == TQKV_METAL_ATTEND_MATRIX;
                const int most = matrix ? TQKV__MOST_MATRIX_COLUMNS(head_dim) : TQKV__MAX_COLUMNS(head_dim);
                const int blocks = (int)d->grid[1], even = (rows + blocks - 1) / blocks;
                CHECK(columns <= most && columns * blocks >= rows && columns * (blocks - 1) < rows,
                      "%d rows as %d blocks of %d", rows, blocks, columns);
                CHECK(queries[q] == 1 ? columns == even : columns < 2 * even && (columns & (columns - 1)) == 0,
                      "%d columns for %d rows of %d queries", columns, rows, queries[q]);
                check_stretches(d, a.attention.end, scratch);
            }
        }
}

/* The group, head_dim and matrix_group choose the kernel, never the number of queries: a query has the same bits in
   company. The other kernel can take its place in the same scratch. */
static void check_kernel(int head_dim, int group, int matrix_group, int n_queries)
{
    const tqkv_metal_store keys = plan_store(TQKV_TQ4, head_dim, 3000, false, 0),
                           values = plan_store(TQKV_TQ8, head_dim, 3000, false, 2);
    const bool shared = head_dim == 448 || head_dim == 512,
               has_matrices = shared || head_dim == 64 || head_dim == 128 || head_dim == 256;
    const bool matrix = has_matrices && group >= (matrix_group ? matrix_group : 8);
    const int rows = group * n_queries;
    size_t scratch = 0;
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.attention.n_heads = 3 * group;
    a.attention.n_queries = n_queries;
    a.attention.end = 3000;
    a.matrix_group = matrix_group;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(d[0].kernel.family == (matrix ? TQKV_METAL_ATTEND_MATRIX : TQKV_METAL_ATTEND), "group %d of %d, %d queries",
          group, matrix_group, n_queries);
    CHECK_RESULT(plan_scratch(&a, &scratch), TQKV_OK);
    check_stretches(d, a.attention.end, scratch);
    CHECK(!(matrix && shared) || d[0].n_simdgroups == TQKV__LONG_SIMDGROUPS, "%d simdgroups", d[0].n_simdgroups);
    test_plan_columns(d, false, 16);
    const int columns = constant(d, TQKV_FC_COLUMNS);
    CHECK(d[0].kernel.family == TQKV_METAL_ATTEND && columns <= TQKV__MAX_COLUMNS(head_dim) &&
              columns * (int)d[0].grid[1] >= rows,
          "%d rows as %zu blocks of %d", rows, d[0].grid[1], columns);
    CHECK(d[0].memory_each[2] > 0 && d[0].memory[2] == 0, "the memory of another kernel");
}

static void check_kernels(const void *row)
{
    (void)row;
    for (int i = 0; i < TQKV__KERNEL_DIMS; i++)
        for (int group = 1; group <= 8; group++)
            for (int matrix_group = 0; matrix_group <= 5; matrix_group++)
                for (int n_queries = 1; n_queries <= 40; n_queries += 13)
                    check_kernel(TQKV__KERNEL_DIM(i), group, matrix_group, n_queries);
}

/* A window has the stretches that its queries see together, wherever it stands, and all of a ring that wraps. */
static void check_window(const void *row)
{
    tqkv_metal_store keys = plan_store(TQKV_TQ4, 64, 200000, false, 0), values = keys;
    size_t scratch = 0;
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.attention.window = 1000;
    for (a.attention.n_queries = 1; a.attention.n_queries < 700; a.attention.n_queries += 300) {
        a.attention.end = 0;
        CHECK_RESULT(plan_scratch(&a, &scratch), TQKV_OK);
        for (; a.attention.end < 200000; a.attention.end += 997) {
            const int64_t seen = a.attention.end - 999 - a.attention.n_queries, first = seen < 0 ? 0 : seen;
            CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
            CHECK(attend_args(d).first_stretch == first / 512 && attend_args(d).n_short == INT_MAX, "stretch %d",
                  attend_args(d).first_stretch);
            const int64_t n = (a.attention.end ? a.attention.end - 1 : 0) / 512 - first / 512 + 1;
            CHECK(attend_args(d).strands == expected_strands(d, n, a.attention.end), "%d strands",
                  attend_args(d).strands);
            CHECK((int64_t)d[0].grid[2] == n * attend_args(d).strands, "%zu splits before %d", d[0].grid[2],
                  (int)a.attention.end);
            CHECK(binding(d, "scratch").at.offset + binding(d, "scratch").size <= scratch, "%zu bytes", scratch);
        }
    }
    keys.shape.ring = values.shape.ring = true;
    a.attention.n_queries = 1;
    a.attention.end = 200100;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(attend_args(d).first_stretch == 0 && d[0].grid[2] == 391, "%zu splits of a ring that wraps", d[0].grid[2]);
    CHECK_RESULT(plan_scratch(&a, &scratch), TQKV_OK);
    CHECK(binding(d, "scratch").at.offset + binding(d, "scratch").size <= scratch, "%zu bytes of a ring", scratch);
}

/* Slices of 69,000 positions, in the scratch that is asked for. */
static void check_partial_ranges(const tqkv_metal_attention *a)
{
    size_t scratch = 0;
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    CHECK_RESULT(plan_scratch(a, &scratch), TQKV_OK);
    for (int first = 0; first < 69000; first += 1777)
        for (int count = 0; count <= 69000 - first; count += 9999) {
            CHECK_RESULT(tqkv_metal_plan_attend_partial(a, at(4, 0), first, count, at(5, 0), at(6, 0), at(6, 4096),
                                                        at(6, 8192), &plan),
                         TQKV_OK);
            for (int i = 0; i < 2; i++) check_dispatch(&d[i]);
            CHECK(attend_args(d).kv_len == 69000 - first && attend_args(d).slice_end == count &&
                      attend_args(d).key_oldest_slot == first,
                  "positions %d to %d of %d", attend_args(d).key_oldest_slot, attend_args(d).slice_end,
                  attend_args(d).kv_len);
            CHECK(binding(d, "scratch").at.offset + binding(d, "scratch").size <= scratch, "%zu bytes", scratch);
        }
}

/* A slice is a context that begins with its first position and sees none from its end on. */
static void check_partial(const void *row)
{
    tqkv_metal_store keys = plan_store(TQKV_TQ4, 64, 70000, false, 0), values = keys;
    tqkv_metal_plan plan;
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.sinks = at(7, 8192);
    a.attention.end = 69000;
    for (int window = 0; window <= 40000; window += 20000) {
        a.attention.window = window;
        check_partial_ranges(&a);
    }
    a.attention.window = 0;
    a.attention.kv_len = 5000;
    CHECK_RESULT(tqkv_metal_plan_attend_partial(&a, none, 63999, 1, none, none, none, none, &plan), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_metal_plan_attend_partial(&a, none, 68999, 2, none, none, none, none, &plan), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_metal_plan_attend_partial(&a, none, INT64_MAX, 1, none, none, none, none, &plan),
                 TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_metal_plan_attend_partial(&a, none, 65000, -1, none, none, none, none, &plan),
                 TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_attend_partial(NULL, none, 0, 1, none, none, none, none, &plan),
                 TQKV_INVALID_ARGUMENT);
}

/* Two attentions over the same keys, to outputs in both bases. */
typedef struct plan_slices {
    tqkv_metal_store keys, values[2];
    tqkv_metal_attention a[2];
} plan_slices;

static void set_up_slices(plan_slices *s)
{
    const tqkv_format formats[] = {TQKV_TQ4, TQKV_F16};
    memset(s, 0, sizeof *s);
    s->keys = plan_store(TQKV_I8, 192, 100, false, 0);
    for (int i = 0; i < 2; i++) {
        s->values[i] = plan_store(formats[i], 128, 100, false, 2);
        s->a[i].keys = &s->keys;
        s->a[i].values = &s->values[i];
        s->a[i].attention.n_heads = 6;
        s->a[i].attention.n_queries = 1;
        s->a[i].attention.output_type = TQKV_TYPE_BF16;
    }
}

/* Without queries there is nothing to do; NULL is refused. a: of two slices */
static void check_no_queries(tqkv_metal_attention *a)
{
    tqkv_metal_plan plan;
    a[0].attention.n_queries = a[1].attention.n_queries = 0;
    CHECK_RESULT(tqkv_metal_plan_attend(a, none, none, none, &plan), TQKV_OK);
    CHECK(!plan.n, "attend: %d dispatches", plan.n);
    CHECK_RESULT(tqkv_metal_plan_attend_partial(a, none, 0, 0, none, none, none, none, &plan), TQKV_OK);
    CHECK(!plan.n, "partial: %d dispatches", plan.n);
    CHECK_RESULT(tqkv_metal_plan_attend_merge(a, none, none, none, a, none, none, none, &plan), TQKV_OK);
    CHECK(!plan.n, "merge: %d dispatches", plan.n);
    CHECK_RESULT(tqkv_metal_plan_attend_finish(a, none, none, none, none, &plan), TQKV_OK);
    CHECK(!plan.n, "finish: %d dispatches", plan.n);
    CHECK_RESULT(tqkv_metal_plan_attend_finish(NULL, none, none, none, none, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_attend_finish(a, none, none, none, none, NULL), TQKV_INVALID_ARGUMENT);
}

/* Buffers of slices lie apart, and slices that merge are of the same values and queries. */
static void check_slice_refusals(const void *row)
{
    plan_slices s;
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    tqkv_metal_attention *const a = s.a;
    const size_t size = 6 * 128 * sizeof(float);
    (void)row;
    set_up_slices(&s);
    CHECK_RESULT(tqkv_metal_plan_attend_merge(a, at(4, 0), at(4, size), at(4, size + 24), a, at(4, size + 48), at(5, 0),
                                              at(4, size + 20), &plan),
                 TQKV_OK);
    CHECK(!strcmp(overlapping(d), "max"), "src_sum in max: %s", overlapping(d));
    s.values[0].center = at(8, 0);
    CHECK_RESULT(tqkv_metal_plan_attend_merge(a, none, none, none, &a[1], none, none, none, &plan),
                 TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_attend_finish(a, at(4, 0), at(5, size), at(5, size + 24), at(4, 2), &plan), TQKV_OK);
    CHECK(*overlapping(d), "src_out is out");
    a[1].attention.n_queries = 2;
    CHECK_RESULT(tqkv_metal_plan_attend_merge(a, none, none, none, &a[1], none, none, none, &plan),
                 TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_attend_merge(a, none, none, none, NULL, none, none, none, &plan),
                 TQKV_INVALID_ARGUMENT);
    check_no_queries(a);
}

/* Keys and values with 20 first and 700 newest positions as halves. */
typedef struct plan_ends {
    tqkv_metal_store keys, values, first, last;
    tqkv_metal_attention a;
} plan_ends;

static void set_up_ends(plan_ends *e, int exact_last, int room)
{
    e->keys = plan_store(TQKV_TQ4, 64, 9000, false, 0);
    e->values = plan_store(TQKV_I8, 64, 9000, false, 2);
    e->first = plan_store(TQKV_F16, 64, 20, false, 4);
    e->last = plan_store(TQKV_F16, 64, room, true, 4);
    e->first.shape.rotation = e->last.shape.rotation = TQKV_ROTATION_ON;
    e->a = plan_attention(&e->keys, &e->values);
    e->a.first.keys = e->a.first.values = &e->first;
    e->a.last.keys = e->a.last.values = &e->last;
    e->a.attention.first.n = 20;
    e->a.attention.last.n = exact_last;
    e->a.attention.end = 2000;
}

/* A dispatch for the first positions, for the others, for the last ones, and the merge,
 * in the scratch that is asked for. */
static void check_ends(const void *row)
{
    plan_ends e;
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    size_t scratch = 0;
    (void)row;
    set_up_ends(&e, 700, 704);
    CHECK_RESULT(plan_scratch(&e.a, &scratch), TQKV_OK);
    for (e.a.attention.end = 0; e.a.attention.end <= 9000; e.a.attention.end += 113) {
        const int end = (int)e.a.attention.end, most = end > 720 ? 4 : end > 20 ? 3 : 2;
        CHECK_RESULT(tqkv_metal_plan_attend(&e.a, at(1, 0), at(6, 0), at(7, 0), &plan), TQKV_OK);
        CHECK(plan.n == most, "%d dispatches at %d", plan.n, end);
        check_plan(&plan);
        CHECK(binding(&d[plan.n - 1], "scratch").at.offset + binding(&d[plan.n - 1], "scratch").size <= scratch,
              "%zu bytes", scratch);
    }
}

static void check_ends_refusals(const void *row)
{
    plan_ends e;
    tqkv_metal_plan plan;
    (void)row;
    set_up_ends(&e, 700, 704);
    e.first.shape.rotation = TQKV_ROTATION_DEFAULT;
    CHECK_RESULT(tqkv_metal_plan_attend(&e.a, none, none, none, &plan), TQKV_INVALID_ARGUMENT);
    e.first.shape.rotation = TQKV_ROTATION_ON;
    e.first.center = at(7, 0);
    CHECK_RESULT(tqkv_metal_plan_attend(&e.a, none, none, none, &plan), TQKV_INVALID_ARGUMENT);
    e.first.center = none;
    e.first.shape.capacity = 19;
    CHECK_RESULT(tqkv_metal_plan_attend(&e.a, none, none, none, &plan), TQKV_OUT_OF_RANGE);
    e.first.shape.capacity = 20;
    e.a.attention.first.n = -1;
    CHECK_RESULT(tqkv_metal_plan_attend(&e.a, none, none, none, &plan), TQKV_INVALID_ARGUMENT);
    e.a.attention.first.n = 1500; /* meets the last, and has keys only */
    e.a.first.values = NULL;
    e.first.shape.capacity = 1500;
    CHECK_RESULT(tqkv_metal_plan_attend(&e.a, none, none, none, &plan), TQKV_UNSUPPORTED);
}

/* Where newest halves begin by the arguments of a part, for its query i, counted as positions of the context. */
static int boundary_of(const tqkv_metal_dispatch *d, int query)
{
    const tqkv__attend_args args = attend_args(d);
    const int by_query = args.first_newest + query - args.exact_last + 1, first = (int)2000 - args.kv_len;
    return first + (by_query > args.exact_from ? by_query : args.exact_from);
}

/* Several queries: the codes and the newest halves overlap, and each query has a boundary of its own,
 * in every part the same. */
static void check_ends_by_query(const void *row)
{
    plan_ends e;
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    (void)row;
    set_up_ends(&e, 100, 192);
    e.a.attention.n_queries = 9;
    for (int ahead = 0; ahead < 2; ahead++) {
        e.a.attention.non_causal = ahead;
        CHECK_RESULT(plan_attend(&e.a, &plan), TQKV_OK);
        CHECK(plan.n == 4 && constant(d, TQKV_FC_HALVES) == TQKV__ALL_POSITIONS &&
                  constant(d + 1, TQKV_FC_HALVES) == TQKV__BEFORE_HALVES &&
                  constant(d + 2, TQKV_FC_HALVES) == TQKV__NEWEST_HALVES,
              "%d dispatches", plan.n);
        CHECK(attend_args(d + 1).kv_len == 1980 && attend_args(d + 1).slice_end == 1880 &&
                  attend_args(d + 2).kv_len == (ahead ? 100 : 108) &&
                  attend_args(d + 2).slice_end == attend_args(d + 2).kv_len,
              "codes up to the last query's boundary, halves from the first one's on");
        for (int i = 0; i < 9; i++)
            CHECK(boundary_of(d + 1, i) == (ahead ? 1900 : 1892 + i) && boundary_of(d + 2, i) == boundary_of(d + 1, i),
                  "query %d: %d", i, boundary_of(d + 1, i));
    }
    e.a.attention.non_causal = false;
    e.a.attention.last.from = 1897;
    CHECK_RESULT(plan_attend(&e.a, &plan), TQKV_OK);
    CHECK(attend_args(d + 2).kv_len == 103 && boundary_of(d + 1, 0) == 1897 && boundary_of(d + 2, 8) == 1900,
          "what an edit took away");
    e.a.attention.last.from = 3000;
    CHECK_RESULT(plan_attend(&e.a, &plan), TQKV_OK);
    CHECK(plan.n == 3 && boundary_of(d + 1, 8) == 3000, "nothing is left: %d", boundary_of(d + 1, 8));
}

/* A ring has room for the newest halves of all queries, or refuses them. */
static void check_room_of_ends(const void *row)
{
    plan_ends e;
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    (void)row;
    set_up_ends(&e, INT_MAX, 192); /* all of the context */
    e.a.attention.n_queries = 9;
    CHECK_RESULT(plan_attend(&e.a, &plan), TQKV_OUT_OF_RANGE);
    e.last.shape.capacity = 9024;
    CHECK_RESULT(plan_attend(&e.a, &plan), TQKV_OK);
    CHECK(plan.n == 3 && boundary_of(d + 1, 8) <= 20, "all newest: %d", boundary_of(d + 1, 8));
    e.last.shape.capacity = 128;
    e.a.attention.last.n = 100;
    e.a.attention.n_queries = 29;
    CHECK_RESULT(plan_attend(&e.a, &plan), TQKV_OK);
    e.a.attention.n_queries = 30; /* the first query's first halves are gone */
    CHECK_RESULT(plan_attend(&e.a, &plan), TQKV_OUT_OF_RANGE);
}

/* Lists of newest halves: ranks of a query are where they are alone. */
static void check_ends_of_lists(const void *row)
{
    const tqkv_metal_store keys = plan_store(TQKV_TQ4, 64, 9000, false, 0);
    tqkv_metal_store last = plan_store(TQKV_F16, 64, 192, true, 4);
    tqkv_metal_plan plan;
    size_t scratch;
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &keys);
    last.shape.rotation = TQKV_ROTATION_ON;
    a.last.keys = &last;
    a.list = at(7, 0);
    a.attention.last.n = 100;
    a.attention.list.block = 16;
    a.attention.list.length = 3;
    for (int end = 1900; end < 2500; end += 7)
        for (int n = 1; n <= 64; n += 9) {
            a.attention.end = end;
            a.attention.n_queries = n;
            CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
            CHECK_RESULT(plan_scratch(&a, &scratch), TQKV_OK);
            const tqkv__attend_args args = attend_args(&plan.d[3]);
            const int low = end - n - 99, block = low / 16 * 16;
            CHECK(plan.n == 5 && args.kv_len == end - low && args.list_base == block % 512 &&
                      args.list_slots == INT_MAX,
                  "ranks from %d on, block %d", args.list_base, block);
            CHECK(constant(&plan.d[0], TQKV_FC_HALVES) == TQKV__BEFORE_HALVES &&
                      constant(&plan.d[1], TQKV_FC_HALVES) == TQKV__NEWEST_HALVES,
                  "the lists' parts");
            const tqkv_metal_binding state = binding(&plan.d[4], "scratch");
            CHECK(state.at.offset + state.size <= scratch, "%zu bytes of scratch", scratch);
        }
}

/* Scratch that no size_t counts. */
static void check_large_scratch(const void *row)
{
    tqkv_metal_store keys = plan_store(TQKV_TQ4, 1024, INT_MAX - 63, false, 0), values = keys;
    tqkv_metal_store first = plan_store(TQKV_F16, 1024, INT_MAX - 63, false, 4);
    size_t scratch = 0;
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    first.shape.rotation = TQKV_ROTATION_ON;
    a.first.keys = a.first.values = &first;
    a.attention.n_queries = 1 << 24;
    a.attention.n_heads = 96;
    CHECK_RESULT(plan_scratch(&a, &scratch), TQKV_OK);
    a.attention.first.n = INT_MAX - 63;
    CHECK_RESULT(plan_scratch(&a, &scratch), TQKV_INVALID_ARGUMENT);
    keys.shape.n_kv_heads = values.shape.n_kv_heads = first.shape.n_kv_heads = 1;
    a.list = at(3, 0);
    a.attention.first.n = a.attention.n_heads = a.attention.list.block = 1;
    a.attention.n_queries = INT_MAX;
    a.attention.list.length = 1 << 20;
    CHECK_RESULT(plan_scratch(&a, &scratch), TQKV_OK);
    a.attention.list.length = (1 << 30) - 100; /* rows of lists, once for each part */
    CHECK_RESULT(plan_scratch(&a, &scratch), TQKV_INVALID_ARGUMENT);
}

void test_plan_split_cases(void)
{
    for (int i = 0; i < TQKV__KERNEL_DIMS; i++) {
        const int head_dim = TQKV__KERNEL_DIM(i);
        test_add(check_split, &head_dim, sizeof head_dim, "plan/split/d%d", head_dim);
    }
    test_add(check_kernels, NULL, 0, "plan/kernels");
    test_add(check_window, NULL, 0, "plan/window");
    test_add(check_partial, NULL, 0, "plan/slice/partial");
    test_add(check_slice_refusals, NULL, 0, "plan/slice/refusals");
    test_add(check_ends, NULL, 0, "plan/ends");
    test_add(check_ends_refusals, NULL, 0, "plan/ends/refusals");
    test_add(check_ends_by_query, NULL, 0, "plan/ends/by_query");
    test_add(check_room_of_ends, NULL, 0, "plan/ends/room");
    test_add(check_ends_of_lists, NULL, 0, "plan/ends/lists");
    test_add(check_large_scratch, NULL, 0, "plan/large_scratch");
}
