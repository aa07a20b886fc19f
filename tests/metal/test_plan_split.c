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
static void check_stretches(const tqkv_metal_plan *plan, int64_t end)
{
    const tqkv_metal_dispatch *const d = plan->d;
    const int64_t stretches = end <= 8192 ? (end + 511) / 512 : 16 + (end - 8192 + 2047) / 2048;
    const int64_t n = stretches > 1 ? stretches : 1, sections = (n + 15) / 16;
    const size_t row = ((size_t)d->kernel.head_dim * TQKV__DIM_UNIT + 2) * sizeof(float),
                 n_rows = (size_t)merge_args(d).n_rows;
    const bool full = d->grid[0] * d->grid[1] >= 256, each = !full && n_rows * row * (size_t)n <= 32 << 20;
    const int strands = each ? expected_strands(d, n, end) : 1, section = strands > 1 ? strands : each ? 16 : 1;
    const int64_t splits = full ? 1 : each ? n * strands : sections;
    CHECK(attend_args(d).strands == strands && merge_args(d).strands == strands, "%d strands", attend_args(d).strands);
    CHECK(constant(d, TQKV_FC_STRANDS) == (strands > 1), "a pipeline without strands, or with");
    CHECK(attend_args(d).first_stretch == 0 && attend_args(d).stretch_tiles == 16 && attend_args(d).n_short == 16,
          "the stretches");
    CHECK((int64_t)d->grid[2] == splits, "%zu splits, %d stretches", d->grid[2], (int)n);
    CHECK(attend_args(d).sections_each == (full ? sections : !each), "%d sections each", attend_args(d).sections_each);
    CHECK(plan_end(plan, at(SCRATCH, 0)) ==
              n_rows * (row * (full && sections > 1 ? 2 : d->grid[2]) + 2 * sizeof(float)),
          "partial results");
    CHECK(merge_args(d).n_partials == splits && merge_args(d).section == section && merge_args(d).before == 0,
          "the merge");
}

/* Contexts of all lengths, in pages, too, whose slots take memory: the blocks hold all rows, and the splits fit into
 * the scratch that the plan without it tells. */
static void check_split(const void *row)
{
    const int head_dim = *(const int *)row, groups[] = {1, 3, 8, 16}, queries[] = {1, 2, 9, 64, 300};
    for (int g = 0; g < 8; g++)
        for (int q = 0; q < 5; q++) {
            const int capacity = 90048, group = groups[g % 4], rows = group * queries[q];
            tqkv_metal_store keys = plan_store(TQKV_TQ4, head_dim, capacity, false, 0),
                             values = plan_store(TQKV_TQ8, head_dim, capacity, false, 2);
            keys.shape.page_size = values.shape.page_size = 64;
            keys.shape.n_pages = values.shape.n_pages = capacity / 64;
            if (g >= 4) keys.pages = at(MORE, 0), values.pages = at(MORE, 8192);
            tqkv_metal_attention a = plan_attention(&keys, &values);
            a.attention.n_heads = 3 * group;
            a.attention.n_queries = queries[q];
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
                check_stretches(&plan, a.attention.end);
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
    check_stretches(&plan, a.attention.end);
    CHECK(!(matrix && shared) || d[0].n_simdgroups == TQKV__LONG_SIMDGROUPS, "%d simdgroups", d[0].n_simdgroups);
    test_plan_columns(d, false, 16);
    const int columns = constant(d, TQKV_FC_COLUMNS);
    CHECK(d[0].kernel.family == TQKV_METAL_ATTEND && columns <= TQKV__MAX_COLUMNS(head_dim) &&
              columns * (int)d[0].grid[1] >= rows,
          "%d rows as %zu blocks of %d", rows, d[0].grid[1], columns);
    CHECK(d[0].memory_each[2] > 0 && d[0].memory[2] == 0, "the memory of another kernel");
}

static void check_kernels(NO_ROW)
{
    for (int i = 0; i < TQKV__KERNEL_DIMS; i++)
        for (int group = 1; group <= 8; group++)
            for (int matrix_group = 0; matrix_group <= 5; matrix_group++)
                for (int n_queries = 1; n_queries <= 40; n_queries += 13)
                    check_kernel(TQKV__KERNEL_DIM(i), group, matrix_group, n_queries);
}

/* A window has the stretches that its queries see together, wherever it stands, and all of a ring that wraps. */
static void check_window(NO_ROW)
{
    tqkv_metal_store keys = plan_store(TQKV_TQ4, 64, 200000, false, 0), values = keys;
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.attention.window = 1000;
    for (a.attention.n_queries = 1; a.attention.n_queries < 700; a.attention.n_queries += 300) {
        for (a.attention.end = 0; a.attention.end < 200000; a.attention.end += 997) {
            const int64_t seen = a.attention.end - 999 - a.attention.n_queries, first = seen < 0 ? 0 : seen;
            CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
            CHECK(attend_args(d).first_stretch == first / 512 && attend_args(d).n_short == INT_MAX, "stretch %d",
                  attend_args(d).first_stretch);
            const int64_t n = (a.attention.end ? a.attention.end - 1 : 0) / 512 - first / 512 + 1;
            CHECK(attend_args(d).strands == expected_strands(d, n, a.attention.end), "%d strands",
                  attend_args(d).strands);
            CHECK((int64_t)d[0].grid[2] == n * attend_args(d).strands, "%zu splits before %d", d[0].grid[2],
                  (int)a.attention.end);
        }
    }
    keys.shape.ring = values.shape.ring = true;
    a.attention.n_queries = 1;
    a.attention.end = 200100;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(attend_args(d).first_stretch == 0 && d[0].grid[2] == 391, "%zu splits of a ring that wraps", d[0].grid[2]);
}

/* A slice is a context that begins with its first position and sees none from its end on: slices of 69,000 positions,
   in the scratch that is asked for. */
static void check_partial(NO_ROW)
{
    const tqkv_metal_store keys = plan_store(TQKV_TQ4, 64, 70000, false, 0);
    tqkv_metal_plan plan, sizes;
    tqkv_metal_attention a = plan_attention(&keys, &keys);
    a.sinks = at(MORE, 8192);
    a.attention.end = 69000;
    for (a.attention.window = 0; a.attention.window <= 40000; a.attention.window += 20000)
        for (int first = 0; first < 69000; first += 1777)
            for (int count = 0; count <= 69000 - first; count += 9999) {
                CHECK_RESULT(check_plan(tqkv_metal_plan_attend_partial(&a, at(Q, 0), first, count, at(SCRATCH, 0),
                                                                       at(OUT, 0), at(OUT, 4096), at(OUT, 8192), &plan),
                                        &plan),
                             TQKV_OK);
                CHECK_RESULT(tqkv_metal_plan_attend(&a, none, none, none, &sizes), TQKV_OK);
                const tqkv__attend_args args = attend_args(plan.d);
                CHECK(args.kv_len == 69000 - first && args.slice_end == count && args.key_oldest_slot == first,
                      "positions %d to %d of %d", args.key_oldest_slot, args.slice_end, args.kv_len);
                CHECK(plan_end(&plan, at(SCRATCH, 0)) <= sizes.scratch_size, "%zu bytes", sizes.scratch_size);
            }
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
}
