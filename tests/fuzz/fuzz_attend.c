/* make fuzz FUZZERS=attend SECONDS=60; AFL++: make fuzz-afl FUZZERS=attend. Attention over arbitrary code and norm
   bytes, shapes, page tables, trees and options. */
#include "fuzz.h"

enum { MAX_BYTES = 1 << 16, MAX_QUERIES = 66, FEW_QUERIES = 6, MAX_GROUP = 5, MAX_CAPACITY = 256, MAX_PAGES = 8 };

typedef struct problem {
    tqkv_store keys, values, tail; /* values: zeros if the keys are the values; tail: zeros without one */
    int32_t pages[2][MAX_PAGES];   /* of keys and of values */
    tqkv_attention attention;
    float sinks[3 * MAX_GROUP];
    uint64_t tree[MAX_QUERIES];
    float *q, *out; /* [n_queries][n_heads][key_dim or value_dim] */
    size_t n_out, n_rows;
    int key_dim, value_dim; /* key_dim: with the tail's */
    bool is_tame;           /* all numbers have ordinary size, so double precision can check the result */
} problem;

/* Codes: the input's bytes, repeated and mixed. Norms: the input's bit patterns; if tame, values near 1. */
static void fill_store(fuzz_input *input, tqkv_store *s, bool is_tame)
{
    data_random random = {fuzz_bits(input, 4)};
    float *center = (float *)(uintptr_t)s->center;
    if (center && is_tame) fuzz_data(fuzz_byte(input), DATA_STUDENT, center, s->n_kv_heads, s->head_dim);
    if (center && !is_tame) fuzz_rows(input, center, s->n_kv_heads, s->head_dim);
    s->codes = test_alloc(s->codes_size);
    uint8_t *codes = (uint8_t *)s->codes;
    for (size_t i = 0; i < s->codes_size; i++) codes[i] = (uint8_t)data_bits(&random);
    for (size_t i = 0; is_tame && s->format == TQKV_F16 && i < s->codes_size; i += 2)
        codes[i + 1] = (uint8_t)((codes[i + 1] & 0x83) | 0x3c); /* 1 <= |x| < 2 */
    if (!s->norms_size) return;
    s->norms = (float *)test_alloc(s->norms_size);
    size_t n = s->norms_size / sizeof(float), period = (size_t)fuzz_range(input, 1, 16);
    float unit = s->format == TQKV_I8 ? 0.01f : s->head_dim < 512 ? sqrtf((float)s->head_dim) : 1.0f;
    for (size_t i = 0; i < n; i++) {
        s->norms[i] = i < period ? fuzz_float(input) : s->norms[i - period];
        if (is_tame) s->norms[i] = unit * (0.5f + (float)data_below(&random, 1000) * 0.001f);
    }
}

/* A table of pages in any order, shared ones too; now and then one that is not there. */
static void add_pages(tqkv_store *s, uint8_t flags, int32_t *pages)
{
    data_random random = {(uint64_t)flags << 8 | (uint64_t)s->capacity};
    s->ring = false;
    const int sizes[] = {64, 128, 1, 16, 48};
    s->page_size = sizes[data_below(&random, 5)];
    s->n_pages = data_below(&random, MAX_PAGES + 1);
    s->pages = pages;
    const int n = 1 + s->capacity % (MAX_CAPACITY / s->page_size);
    s->capacity = n * s->page_size;
    for (int i = 0; i < MAX_PAGES; i++)
        pages[i] = data_below(&random, 16) ? data_below(&random, n) : flags % 2 ? -1 : n;
}

static tqkv_store read_store(fuzz_input *input, int head_dim, int n_kv_heads, int32_t *pages)
{
    tqkv_store s;
    memset(&s, 0, sizeof s);
    s.format = test_formats[fuzz_range(input, 0, TEST_FORMATS - 1)];
    s.head_dim = head_dim;
    s.n_kv_heads = n_kv_heads;
    s.capacity = fuzz_range(input, 1, 200);
    uint8_t flags = fuzz_byte(input);
    s.ring = (flags & 1) != 0;
    s.rotation = (flags & 14) == 14 ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
    s.block_scale = flags & 16 ? 0.75f : 0.0f;
    if (flags & 32) s.center = fuzz_new_floats(1, n_kv_heads, head_dim);
    if (flags & 64) add_pages(&s, flags, pages);
    s.codes_size = tqkv_codes_size(&s);
    s.norms_size = tqkv_norms_size(&s);
    return s;
}

static void read_options(fuzz_input *input, problem *p, bool many)
{
    tqkv_attention *a = &p->attention;
    const int64_t rooms[2] = {reference_room(a->keys), reference_room(a->values)};
    const int room = (int)(rooms[0] < rooms[1] ? rooms[0] : rooms[1]), smaller = room < 255 ? room : 255;
    uint8_t flags = fuzz_byte(input);
    const int group = fuzz_range(input, 0, MAX_GROUP);
    a->n_heads = (group ? group : 1) * p->keys.n_kv_heads;
    a->n_queries = fuzz_range(input, 0, FEW_QUERIES) * (many ? MAX_QUERIES / FEW_QUERIES : 1);
    a->end = flags & 1 ? (int64_t)fuzz_bits(input, 8) : fuzz_range(input, 0, smaller);
    a->kv_len = flags & 2 ? fuzz_range(input, 0, smaller) : 0;
    a->window = flags & 4 ? fuzz_range(input, 0, 255) : 0;
    a->scale = flags & 8 ? (p->is_tame ? 0.03f : fuzz_float(input)) : 0.0f;
    a->softcap = flags & 16 ? (p->is_tame ? 5.0f : fuzz_float(input)) : 0.0f;
    a->query_basis = flags & 32 ? TQKV_ROTATED : TQKV_ORIGINAL;
    a->output_basis = flags & 64 ? TQKV_ROTATED : TQKV_ORIGINAL;
    if (flags & 128) a->sinks = p->sinks;
    for (int i = 0; i < 3 * MAX_GROUP; i++)
        p->sinks[i] = p->is_tame ? (float)i * 0.25f - 1.0f : flags & 128 ? fuzz_float(input) : 0.0f;
}

/* A byte a query from the input; if there are many, bits that hide a quarter of the others from each. */
static void read_tree(fuzz_input *input, problem *p, bool many)
{
    data_random random = {1};
    p->attention.tree = p->tree;
    for (int i = 0; i < FEW_QUERIES; i++) p->tree[i] = fuzz_bits(input, 1);
    for (int i = 0; many && i < MAX_QUERIES; i++) p->tree[i] = data_bits(&random) | data_bits(&random);
}

/* A second part of the keys, in their slots. */
static tqkv_store read_tail(fuzz_input *input, const tqkv_store *keys)
{
    tqkv_store s = *keys;
    const uint8_t shape = fuzz_byte(input), flags = fuzz_byte(input);
    s.format = test_formats[shape % TEST_FORMATS];
    s.head_dim = test_all_head_dims[shape / TEST_FORMATS % 9];
    s.rotation = TQKV_ROTATION_DEFAULT;
    s.center = flags & 1 ? fuzz_new_floats(1, s.n_kv_heads, s.head_dim) : NULL;
    s.codes_size = tqkv_codes_size(&s);
    s.norms_size = tqkv_norms_size(&s);
    return s;
}

static void free_centers(problem *p)
{
    free((void *)(uintptr_t)p->keys.center);
    free((void *)(uintptr_t)p->values.center);
    free((void *)(uintptr_t)p->tail.center);
}

/* Without queries no array is looked at, whatever else is wrong; the problem then has one. */
static void check_no_queries(problem *p)
{
    if (p->attention.n_queries) return;
    const tqkv_result r = tqkv_attend(&p->attention, NULL, NULL);
    if (r == TQKV_OK) CHECK_RESULT(tqkv_attend_finish(&p->attention, NULL, NULL, NULL), TQKV_OK);
    p->attention.n_queries = 1;
}

static bool set_up(fuzz_input *input, problem *p)
{
    memset(p, 0, sizeof *p);
    const uint8_t kind = fuzz_byte(input);
    p->is_tame = kind & 1;
    int head_dim = fuzz_head_dim(input), n_kv_heads = fuzz_range(input, 1, 3);
    const int value_dim = kind & 128 ? test_all_head_dims[(kind >> 2 & 31) % TEST_ALL_HEAD_DIMS] : head_dim;
    p->keys = read_store(input, head_dim, n_kv_heads, p->pages[0]);
    const bool shared = !(kind & 128) && kind & 4, tailed = !(kind & 128) && kind & 8;
    if (!shared) p->values = read_store(input, value_dim, n_kv_heads, p->pages[1]);
    if (tailed) p->tail = read_tail(input, &p->keys);
    const bool valid = p->keys.codes_size && (shared || p->values.codes_size); /* some formats are never unrotated */
    if (!valid || p->keys.codes_size + p->values.codes_size + p->tail.codes_size > MAX_BYTES) {
        free_centers(p);
        return false;
    }
    p->attention.keys = &p->keys;
    p->attention.values = shared ? &p->keys : &p->values;
    p->attention.tail = tailed ? &p->tail : NULL;
    p->key_dim = head_dim + p->tail.head_dim;
    p->value_dim = value_dim;
    const bool many = (kind & 66) == 66;
    read_options(input, p, many);
    if (kind & 2) read_tree(input, p, many);
    fill_store(input, &p->keys, p->is_tame);
    if (!shared) fill_store(input, &p->values, p->is_tame);
    if (tailed) fill_store(input, &p->tail, p->is_tame);
    check_no_queries(p);
    p->n_rows = (size_t)p->attention.n_heads * (size_t)p->attention.n_queries;
    p->n_out = p->n_rows * (size_t)value_dim;
    p->q = fuzz_new_floats((int)p->n_rows, p->key_dim, 1);
    p->out = fuzz_new_floats((int)p->n_rows, value_dim, 1);
    if (p->is_tame)
        fuzz_data(fuzz_byte(input), DATA_GAUSSIAN, p->q, (int)p->n_rows, p->key_dim);
    else
        fuzz_rows(input, p->q, (int)p->n_rows, p->key_dim);
    return true;
}

static void tear_down(problem *p)
{
    free_centers(p);
    test_store_free(&p->keys);
    test_store_free(&p->values);
    test_store_free(&p->tail);
    free(p->q);
    free(p->out);
}

static bool is_seen(const tqkv_attention *a, int64_t position)
{
    reference_shape shape = reference_attention_shape(a);
    for (int i = 0; i < shape.n_queries; i++)
        if (reference_is_visible(a, i, position)) return true;
    return false;
}

/* Overwrites every slot that no query sees. */
static void overwrite_unseen(const tqkv_attention *a, const tqkv_store *s)
{
    bool seen[MAX_CAPACITY] = {false};
    reference_shape shape = reference_attention_shape(a);
    size_t norms = (size_t)reference_norms_per_row(s->format, s->head_dim) * sizeof(float);
    tqkv_store slots = *s;
    slots.pages = NULL;
    for (int64_t at = shape.oldest; at < shape.end; at++)
        if (is_seen(a, at)) seen[reference_slot(s, at)] = true;
    for (int slot = 0; slot < s->capacity; slot++)
        for (int head = 0; !seen[slot] && head < s->n_kv_heads; head++) {
            memset((void *)(uintptr_t)reference_codes_at(&slots, head, slot), 0xff,
                   reference_row_bytes(s->format, s->head_dim));
            if (norms) memset((void *)(uintptr_t)reference_norms_at(&slots, head, slot), 0xff, norms);
        }
}

/* A linear store with the rows that some query sees of a paged one. */
static tqkv_store without_pages(const tqkv_attention *a, const tqkv_store *paged)
{
    const size_t codes = reference_row_bytes(paged->format, paged->head_dim);
    const size_t norms = (size_t)reference_norms_per_row(paged->format, paged->head_dim) * sizeof(float);
    tqkv_store s = *paged;
    s.pages = NULL;
    s.capacity = (int)(a->end > 0 ? a->end : 1);
    s.codes_size = tqkv_codes_size(&s);
    s.norms_size = tqkv_norms_size(&s);
    s.codes = calloc(1, s.codes_size);
    s.norms = (float *)calloc(1, s.norms_size + 1);
    if (!s.codes || !s.norms) exit(2);
    for (int64_t at = 0; at < a->end; at++)
        for (int head = 0; head < s.n_kv_heads && is_seen(a, at); head++) {
            memcpy((void *)(uintptr_t)reference_codes_at(&s, head, at), reference_codes_at(paged, head, at), codes);
            if (norms)
                memcpy((void *)(uintptr_t)reference_norms_at(&s, head, at), reference_norms_at(paged, head, at), norms);
        }
    return s;
}

/* The same bits; which NaN a row that sees NaN gives is left open. */
static bool is_same(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, sizeof *a) != 0 && (a[i] == a[i] || b[i] == b[i])) return false;
    return true;
}

/* Neither the order of tasks nor the content of unseen slots changes a bit of the result. */
static void check_same_again(problem *p)
{
    float *again = fuzz_new_floats((int)p->n_out, 1, 1);
    tqkv_attention other = p->attention;
    other.parallel.run = fuzz_run_backwards;
    CHECK_RESULT(tqkv_attend(&other, p->q, again), TQKV_OK);
    CHECK(is_same(again, p->out, p->n_out), "other bits in another order of tasks");
    overwrite_unseen(&p->attention, &p->keys);
    if (p->values.codes) overwrite_unseen(&p->attention, &p->values);
    if (p->tail.codes) overwrite_unseen(&p->attention, &p->tail);
    CHECK_RESULT(tqkv_attend(&p->attention, p->q, again), TQKV_OK);
    CHECK(is_same(again, p->out, p->n_out), "slots that are not seen were read");
    free(again);
}

/* One call for this sequence and one with its newest query alone: the same bits. */
static void check_batch(const problem *p)
{
    const size_t one = p->n_out / (size_t)p->attention.n_queries;
    const size_t q_one = p->n_rows * (size_t)p->key_dim / (p->n_out / one);
    float *outs = fuzz_new_floats((int)(p->n_out + one), 1, 1);
    tqkv_attention items[2] = {p->attention, p->attention};
    items[1].n_queries = 1;
    items[1].tree = NULL;
    const void *q[2] = {p->q, p->q + p->n_rows * (size_t)p->key_dim - q_one};
    void *out[2] = {outs, outs + p->n_out};
    const tqkv_result alone = tqkv_attend(&items[1], q[1], out[1]);
    float *expected = fuzz_new_floats((int)one, 1, 1);
    memcpy(expected, out[1], one * sizeof *expected);
    memset(outs, 0xff, (p->n_out + one) * sizeof *outs);
    CHECK_RESULT(tqkv_attend_batch(items, 2, q, out), alone);
    if (alone == TQKV_OK)
        CHECK(is_same(outs, p->out, p->n_out) && is_same(outs + p->n_out, expected, one), "other bits in a batch");
    else
        CHECK(fuzz_is_untouched(outs, (p->n_out + one) * sizeof *outs), "a bad item, but written");
    free(outs);
    free(expected);
}

static void check_numbers(const problem *p, const float *out, const double *expected)
{
    size_t d = (size_t)p->value_dim;
    for (size_t row = 0; row < p->n_rows; row++) {
        double error = reference_relative_error(out + row * d, expected + row * d, d);
        CHECK(error <= reference_attention_tolerance(&p->attention, 1.0), "row %d: relative error %.3g", (int)row,
              error);
    }
}

/* Attends over two slices, merges and finishes them. */
static void attend_in_slices(const problem *p, int64_t cut, float *out)
{
    reference_shape shape = reference_attention_shape(&p->attention);
    const tqkv_attention *a = &p->attention;
    float *memory = fuzz_new_floats((int)(p->n_out + 4 * p->n_rows), 1, 1);
    float *max = memory, *sum = max + p->n_rows, *max2 = sum + p->n_rows, *sum2 = max2 + p->n_rows;
    float *out2 = sum2 + p->n_rows;
    int64_t middle = shape.oldest + cut % (shape.end - shape.oldest + 1);
    CHECK_RESULT(tqkv_attend_partial(a, p->q, shape.oldest, (int)(middle - shape.oldest), out, max, sum), TQKV_OK);
    CHECK_RESULT(tqkv_attend_partial(a, p->q, middle, (int)(shape.end - middle), out2, max2, sum2), TQKV_OK);
    CHECK_RESULT(tqkv_attend_merge(a, out, max, sum, a, out2, max2, sum2), TQKV_OK);
    CHECK_RESULT(tqkv_attend_finish(a, out, max, sum), TQKV_OK);
    free(memory);
}

static void check_error(const problem *p, const tqkv_attention *a, const float *sliced)
{
    double *expected = (double *)test_alloc(p->n_out * sizeof *expected);
    reference_attend(a, p->q, expected);
    check_numbers(p, p->out, expected);
    check_numbers(p, sliced, expected);
    free(expected);
}

/* The same sequence in linear stores gives the same bits. Their rows, those that are seen, are the reference's. */
static void check_linear(const problem *p, const float *sliced)
{
    tqkv_store keys = p->keys, values = p->values, tail = p->tail;
    tqkv_attention a = p->attention;
    float *out = fuzz_new_floats((int)p->n_out, 1, 1);
    a.keys = &keys;
    a.values = p->attention.values == &p->keys ? &keys : &values;
    if (a.tail) a.tail = &tail;
    a.kv_len = (int)(a.end - reference_attention_shape(&p->attention).oldest);
    if (keys.pages) keys = without_pages(&p->attention, &p->keys);
    if (values.pages) values = without_pages(&p->attention, &p->values);
    if (tail.pages) tail = without_pages(&p->attention, &p->tail);
    if (a.end > 0) CHECK_RESULT(tqkv_attend(&a, p->q, out), TQKV_OK);
    if (a.end > 0) CHECK(is_same(out, p->out, p->n_out), "pages change the result");
    if (p->is_tame && a.end > 0) check_error(p, &a, sliced);
    if (keys.pages != p->keys.pages) test_store_free(&keys);
    if (values.pages != p->values.pages) test_store_free(&values);
    if (tail.pages != p->tail.pages) test_store_free(&tail);
    free(out);
}

static void check_result(problem *p, uint8_t cut)
{
    float *sliced = fuzz_new_floats((int)p->n_out, 1, 1);
    check_batch(p);
    check_same_again(p); /* overwrites what this sequence does not see */
    attend_in_slices(p, cut, sliced);
    if (p->keys.pages || p->values.pages)
        check_linear(p, sliced);
    else if (p->is_tame)
        check_error(p, &p->attention, sliced);
    free(sliced);
}

/* Typed queries give what their floats give; typed outputs are the rounded floats. */
static void check_types(fuzz_input *input, problem *p)
{
    tqkv_attention typed = p->attention;
    const uint8_t types = fuzz_byte(input);
    typed.query_type = test_no_type(types % 3);
    typed.output_type = test_no_type(types / 3 % 3);
    void *q = fuzz_typed(typed.query_type, p->q, p->n_rows * (size_t)p->key_dim);
    const size_t size = p->n_out * (typed.output_type == TQKV_TYPE_F32 ? sizeof(float) : sizeof(uint16_t));
    void *out = test_alloc_filled(size, 0xff);
    const tqkv_result result = tqkv_attend(&p->attention, p->q, p->out);
    CHECK_RESULT(tqkv_attend(&typed, q, out), result);
    if (result == TQKV_OK)
        CHECK(fuzz_is_rounded(typed.output_type, out, p->out, p->n_out), "not the rounded floats");
    else
        CHECK(fuzz_is_untouched(out, size), "%s, but written", tqkv_result_string(result));
    free(q);
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    test_failure_aborts = true;
    fuzz_input input = {bytes, size};
    problem p;
    fuzz_choose_isa(fuzz_byte(&input));
    uint8_t cut = fuzz_byte(&input);
    if (!set_up(&input, &p)) return 0;
    tqkv_result result = tqkv_attend(&p.attention, p.q, p.out);
    if (result == TQKV_OK)
        check_result(&p, cut);
    else
        CHECK(fuzz_is_untouched(p.out, p.n_out * sizeof *p.out), "%s, but written", tqkv_result_string(result));
    const bool refused = p.attention.tree && p.attention.n_queries > 64;
    if (refused) CHECK_RESULT(result, TQKV_INVALID_ARGUMENT);
    if (p.is_tame && p.attention.end >= 0 && !refused)
        CHECK(result == TQKV_OK || result == TQKV_OUT_OF_RANGE, "%s", tqkv_result_string(result));
    check_types(&input, &p);
    tear_down(&p);
    return 0;
}
