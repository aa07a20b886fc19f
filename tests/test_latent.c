/* Streams that are keys and values at once, and keys of two parts: attention against double precision, and its bits. */
#include "attend_option_list.h"
#include "counting.h"

void test_check_attend(const void *parameters);

/* ---- Against double precision ---- */

/* What number i has: a tail, shared streams, or both. */
static void make_latent(int i, attend_row *row)
{
    static const int tail_dims[5] = {64, 32, 48, 128, 80};
    row->shared = i % 3 > 0;
    row->tail_dim = i % 3 == 1 ? 0 : tail_dims[i / 3 % 5];
    row->tail_format = i % 2 ? test_formats[i / 2 % TEST_FORMATS] : TQKV_F16;
}

/* Each option, with sizes, formats and the three forms in turn. */
static void add_options(void)
{
    static const int dims[7] = {64, 512, 96, 128, 448, 32, 256};
    const int n_options = (int)(sizeof options / sizeof *options);
    for (int i = 0; i < n_options; i++)
        for (int turn = i; turn < i + 2; turn++) {
            attend_row row = attend_default_row(test_formats[turn % TEST_FORMATS],
                                                test_formats[turn / 3 % TEST_FORMATS], dims[turn % 7]);
            make_latent(turn, &row);
            options[i].apply(&row);
            row.tail_center = row.key_center;
            test_add(test_check_attend, &row, sizeof row, "latent/%s/%d+%d", options[i].name, row.head_dim,
                     row.tail_dim);
        }
}

/* Each pair of formats of the two parts, with groups of all loops. */
static void add_pairs(void)
{
    static const int groups[7] = {1, 2, 3, 5, 8, 16, 64};
    for (int i = 0; i < TEST_FORMATS * TEST_FORMATS; i++) {
        const tqkv_format keys = test_formats[i / TEST_FORMATS], tail = test_formats[i % TEST_FORMATS];
        attend_row row = attend_default_row(keys, keys, i % 9 == 0 ? 512 : test_all_head_dims[i % TEST_ALL_HEAD_DIMS]);
        row.shared = i % 4 != 1;
        row.tail_dim = test_all_head_dims[(3 * i + 2) % 9];
        row.tail_format = tail;
        row.n_kv_heads = 1 + i % 2;
        row.group = groups[i % 7];
        row.end = 3 + 17 * i % 101;
        row.key_capacity = row.value_capacity = 110;
        test_add(test_check_attend, &row, sizeof row, "latent/pair/%s-%s/%d+%d", tqkv_format_name(keys),
                 tqkv_format_name(tail), row.head_dim, row.tail_dim);
    }
}

/* ---- Bits ---- */

typedef struct bits_row {
    tqkv_format keys, tail;
    int head_dim, tail_dim, group;
} bits_row;

static attend_row shape_of(const bits_row *row)
{
    attend_row shape = attend_default_row(row->keys, row->keys, row->head_dim);
    shape.shared = true;
    shape.tail_dim = row->tail_dim;
    shape.tail_format = row->tail;
    shape.key_center = shape.tail_center = 0.5f;
    shape.n_kv_heads = row->group > 16 ? 1 : 2;
    shape.group = row->group;
    shape.n_queries = 3;
    shape.end = shape.key_capacity = 150;
    shape.bits_alone = true;
    return shape;
}

static void check_same(const attend_problem *p, const tqkv_attention *a, const float *q, const char *what)
{
    const size_t size = p->n_rows * p->value_dim * sizeof(float);
    float *out = (float *)test_alloc_filled(size, 0xff);
    CHECK_RESULT(tqkv_attend(a, q, out), TQKV_OK);
    CHECK(!memcmp(out, p->out, size), "%s: other bits", what);
    free(out);
}

/* One stream gives the bits of two equal ones, however it is described and wherever it lies. */
static void check_copies(const attend_problem *p)
{
    tqkv_attention a = p->attention;
    tqkv_store again = *a.keys, copy = *a.keys;
    a.values = &again;
    check_same(p, &a, p->q, "a second description");
    copy.codes = test_alloc(copy.codes_size);
    memcpy(copy.codes, again.codes, copy.codes_size);
    if (copy.norms_size) {
        copy.norms = (float *)test_alloc(copy.norms_size);
        memcpy(copy.norms, again.norms, copy.norms_size);
    }
    a.values = &copy;
    check_same(p, &a, p->q, "a copy");
    test_store_free(&copy);
}

/* Pages hold the same positions as a linear store. */
static void check_pages(const attend_problem *p)
{
    enum { PAGE = 64, PAGES = 3 };
    static const int32_t table[PAGES] = {3, 0, 6};
    tqkv_attention a = p->attention;
    const tqkv_store *from[2] = {a.keys, a.tail};
    tqkv_store pools[2];
    for (int i = 0; i < 2; i++) {
        pools[i] = test_store(from[i]->format, from[i]->head_dim, from[i]->n_kv_heads, 7 * PAGE, false);
        pools[i].center = from[i]->center;
        pools[i].pages = table;
        pools[i].n_pages = PAGES;
        pools[i].page_size = PAGE;
        stream s = stream_empty();
        CHECK_RESULT(tqkv_store_save(from[i], 0, (int)a.end, stream_write, &s), TQKV_OK);
        CHECK_RESULT(tqkv_store_load(&pools[i], 0, (int)a.end, stream_read, &s), TQKV_OK);
        stream_free(&s);
    }
    a.keys = a.values = &pools[0];
    a.tail = &pools[1];
    check_same(p, &a, p->q, "pages");
    test_store_free(&pools[0]);
    test_store_free(&pools[1]);
}

/* Each query alone, and half of the queries in a batch with the others. */
static void check_company(const attend_problem *p)
{
    const tqkv_attention *a = &p->attention;
    const size_t heads = (size_t)a->n_heads, n_queries = (size_t)a->n_queries, n = heads * p->value_dim;
    tqkv_attention items[8];
    const void *q[8];
    void *out[8];
    float *rows = (float *)test_alloc_filled(n_queries * n * sizeof(float), 0xff);
    for (size_t i = 0; i < n_queries; i++) {
        items[i] = *a;
        items[i].n_queries = 1;
        items[i].end = a->end - (int64_t)(n_queries - 1 - i);
        q[i] = p->q + i * heads * p->head_dim;
        out[i] = rows + i * n;
        CHECK_RESULT(tqkv_attend(&items[i], q[i], out[i]), TQKV_OK);
        CHECK(!memcmp(out[i], p->out + i * n, n * sizeof(float)), "query %d alone: other bits", (int)i);
    }
    memset(rows, 0xff, n_queries * n * sizeof(float));
    CHECK_RESULT(tqkv_attend_batch(items, (int)n_queries, q, out), TQKV_OK);
    CHECK(!memcmp(rows, p->out, n_queries * n * sizeof(float)), "a batch: other bits");
    free(rows);
}

/* Queries of bfloat16 are floats: both parts of a row are found. */
static void check_types(const attend_problem *p)
{
    const size_t n = p->n_rows * p->head_dim;
    uint16_t *narrow = (uint16_t *)test_alloc(n * sizeof *narrow);
    tqkv_attention a = p->attention;
    a.query_type = TQKV_TYPE_BF16;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &p->q[i], sizeof bits);
        narrow[i] = (uint16_t)(bits >> 16);
        bits &= 0xffff0000u;
        memcpy(&p->q[i], &bits, sizeof bits);
    }
    CHECK_RESULT(tqkv_attend(&p->attention, p->q, p->out), TQKV_OK);
    check_same(p, &a, (const float *)(const void *)narrow, "bfloat16");
    free(narrow);
}

static void check_bits(const void *parameters)
{
    const attend_row shape = shape_of((const bits_row *)parameters);
    attend_problem p;
    attend_set_up(&p, &shape);
    CHECK_RESULT(tqkv_attend(&p.attention, p.q, p.out), TQKV_OK);
    check_copies(&p);
    if (p.attention.tail) check_pages(&p);
    check_company(&p);
    check_types(&p);
    attend_tear_down(&p);
}

static void add_bits(void)
{
    static const bits_row rows[] = {{TQKV_TQ4, TQKV_F16, 512, 64, 64},  {TQKV_I8, TQKV_I8, 512, 64, 128},
                                    {TQKV_TQ5, TQKV_I8, 448, 64, 16},   {TQKV_TQ3, TQKV_F16, 512, 0, 64},
                                    {TQKV_F16, TQKV_F16, 512, 64, 64},  {TQKV_TQ6, TQKV_TQ2, 128, 32, 33},
                                    {TQKV_TQ2, TQKV_TQ5, 1024, 128, 8}, {TQKV_TQ6_BYTES, TQKV_F16, 576, 48, 70},
                                    {TQKV_I8, TQKV_TQ4, 64, 64, 1},     {TQKV_TQ4, TQKV_I8, 256, 96, 2}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const bits_row row = rows[i];
        test_add(check_bits, &row, sizeof row, "latent/bits/%s-%s/%d+%d/%d", tqkv_format_name(row.keys),
                 tqkv_format_name(row.tail), row.head_dim, row.tail_dim, row.group);
    }
}

void test_latent_cases(void)
{
    add_options();
    add_pairs();
    add_bits();
}
