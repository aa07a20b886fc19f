/* make fuzz FUZZERS=attend SECONDS=60; AFL++: make fuzz-afl FUZZERS=attend. Attention with stores and options that the
   input chooses: against double precision, and the same bits in every way to ask for it. Of some inputs codes, norms,
   queries and numbers are any bits: then a call may be refused, which writes nothing. */
#include "fuzz.h"
#include "tests/attend_checks.h"
#include <stdarg.h>

enum { MOST_PRODUCTS = 2000000 }; /* of a query's row and a key's, in double precision */

/* One of n floats. */
static float choose(fuzz_input *input, int n, ...)
{
    va_list values;
    float chosen = 0.0f;
    va_start(values, n);
    for (int left = fuzz_byte(input) % n; left >= 0; left--) chosen = (float)va_arg(values, double);
    va_end(values);
    return chosen;
}

#define COUNT_OF(a, b, c, d, e, n, ...) n
#define CHOOSE(input, ...)              choose(input, COUNT_OF(__VA_ARGS__, 5, 4, 3, 2, 1, 0), __VA_ARGS__)

/* One of the bytes' values in 256 / n inputs, else 0. */
static bool one_in(fuzz_input *input, int n) { return fuzz_byte(input) % n == n - 1; }

static void read_shape(fuzz_input *input, attend_row *row)
{
    static const int queries[16] = {1, 1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 9, 17, 33, 64, 70};
    static const int groups[16] = {1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 64};
    row->key_format = test_formats[fuzz_byte(input) % TEST_FORMATS];
    row->value_format = test_formats[fuzz_byte(input) % TEST_FORMATS];
    row->head_dim = fuzz_head_dim(input);
    row->value_dim = one_in(input, 3) ? fuzz_head_dim(input) : 0;
    row->n_kv_heads = fuzz_range(input, 1, 3);
    row->n_queries = queries[fuzz_byte(input) % 16];
    row->group = groups[fuzz_byte(input) % 16];
    row->query_size = CHOOSE(input, 1.5f, 1.5f, 0.5f, 4.0f);
}

/* Linear stores and rings, partly filled, wrapped, and far away; of sizes that differ. */
static void read_place(fuzz_input *input, attend_row *row)
{
    const int place = fuzz_range(input, 0, 9), more = fuzz_range(input, 0, 2), size = 1 + fuzz_byte(input);
    int capacity = size > 190 ? 1 + size % 7 : size > 128 ? size + 60 : size;
    if (one_in(input, 24) && row->head_dim <= 64) capacity = 2048 + 8 * size; /* two stretches */
    if (row->head_dim > 256 && capacity > 150) capacity = 64 + size % 64;
    row->key_capacity = row->value_capacity = capacity + more;
    row->end = capacity;
    if (place < 4) return;
    row->key_ring = row->value_ring = true;
    if (place == 5) row->end = row->key_capacity;
    if (place == 6) row->end = row->key_capacity + 1 + fuzz_byte(input);
    if (place == 7) row->end = (int64_t)row->key_capacity * 7 + fuzz_byte(input);
    if (place == 8) row->end = ((int64_t)1 << (31 + size % 32)) + fuzz_byte(input);
    if (place == 9) row->end = INT64_MAX;
    if (one_in(input, 4)) row->value_capacity += fuzz_range(input, 0, 20);
    if (place == 6 && one_in(input, 4)) { /* the values keep all */
        row->value_ring = false;
        row->value_capacity = (int)row->end;
    }
}

static void read_mask(fuzz_input *input, attend_row *row)
{
    const int64_t held = row->end < row->key_capacity ? row->end : row->key_capacity;
    const int kind = fuzz_range(input, 0, 9), of_window = fuzz_byte(input), of_kv_len = fuzz_byte(input);
    if (of_window < 80) row->window = of_window < 10 ? 1 : of_window < 20 ? 1000 : of_window;
    if (of_kv_len < 40) row->kv_len = 1 + (int)(of_kv_len * held / 40);
    if (row->kv_len > held) row->kv_len = (int)held;
    row->tree = kind < 2 && row->n_queries <= 64;
    if (row->tree && row->window) row->window = 1 + row->window % 8; /* that cuts branches */
    row->non_causal = kind == 2 || kind == 3;
    if (kind == 4) row->poison = POISON_NEWEST;
    if (kind == 5 && row->window) row->poison = POISON_OLDEST;
    if (row->tree && of_kv_len % 2) row->poison = POISON_BRANCH;
    if (!one_in(input, 4)) return;
    static const int blocks[5] = {1, 4, 16, 64, 128};
    row->list_block = blocks[fuzz_byte(input) % 5];
    row->list_share = CHOOSE(input, 0.1f, 0.5f, 0.9f, 0.0f, 1.0f);
    row->list_newest = fuzz_range(input, 0, 3) * 11;
    row->list_by_head = one_in(input, 2);
}

static void read_scores(fuzz_input *input, attend_row *row)
{
    if (one_in(input, 5)) row->scale = CHOOSE(input, 0.03f, -0.05f, 0.3f);
    if (one_in(input, 4)) row->softcap = CHOOSE(input, 2.0f, 5.0f, 50.0f);
    row->sinks = (attend_sinks)(one_in(input, 2) ? fuzz_byte(input) % 4 : 0);
    row->query_basis = one_in(input, 4) ? TQKV_ROTATED : TQKV_ORIGINAL;
    row->output_basis = one_in(input, 4) ? TQKV_ROTATED : TQKV_ORIGINAL;
}

static void read_streams(fuzz_input *input, attend_row *row)
{
    static const int tail_dims[5] = {64, 32, 48, 128, 80};
    const uint8_t kinds = fuzz_byte(input);
    row->shared = kinds % 4 == 3;
    if (kinds / 4 % 4 == 3) row->tail_dim = tail_dims[fuzz_byte(input) % 5];
    row->tail_format = test_formats[fuzz_byte(input) % TEST_FORMATS];
    row->keys_turned = kinds & 16 && (row->key_format == TQKV_F16 || reference_can_be_unrotated(row->key_format));
    row->values_turned = kinds & 32 && (row->value_format == TQKV_F16 || reference_can_be_unrotated(row->value_format));
    if (one_in(input, 4)) row->block_scale = CHOOSE(input, 1.5f, 0.75f, 1.625f);
    if (one_in(input, 3)) row->key_center = CHOOSE(input, 0.5f, 3.0f, 10.0f);
    if (one_in(input, 3)) row->value_center = CHOOSE(input, 0.5f, 3.0f, 1000.0f);
    if (row->tail_dim && one_in(input, 3)) row->tail_center = CHOOSE(input, 0.5f, 3.0f);
    if (one_in(input, 4)) row->key_spread = CHOOSE(input, 4.0f, 10.0f);
    if (one_in(input, 4)) row->value_spread = CHOOSE(input, 4.0f, 10.0f);
    if (one_in(input, 4)) row->tail_spread = CHOOSE(input, 4.0f, 10.0f);
    if (!one_in(input, 3)) return;
    row->exact_first = one_in(input, 2) ? fuzz_range(input, 0, 90) : 0;
    row->exact_last = one_in(input, 2) ? fuzz_range(input, 0, 140) : fuzz_range(input, 0, 9);
    row->codes_of_ends = one_in(input, 4) ? fuzz_range(input, 1, 2) : 0;
    if (row->shared) row->codes_of_ends = 0;
    if (row->end > 8192) row->exact_first = 0; /* double precision has an array of all positions between */
    const bool halves = row->key_format == TQKV_F16 || row->value_format == TQKV_F16;
    if (halves && row->key_ring && row->end <= row->key_capacity) row->exact_first = 0; /* must be those of the ring */
}

/* Fewer queries where double precision would take long. */
static void limit(attend_row *row)
{
    const int64_t held = row->end < row->key_capacity ? row->end : row->key_capacity;
    const int64_t each = held * (2 * row->head_dim + row->tail_dim + row->value_dim);
    if (row->group * row->n_kv_heads * each > MOST_PRODUCTS) row->group = 1 + row->group % 2;
    if (row->group * row->n_kv_heads * each > MOST_PRODUCTS || held > 2000) row->n_kv_heads = 1;
    while (row->n_queries > 1 && row->n_queries * row->group * row->n_kv_heads * each > MOST_PRODUCTS)
        row->n_queries = (row->n_queries + 1) / 2;
    /* What is poisoned must be resident, and some query must not see it. */
    const int64_t values = row->value_capacity < held ? row->value_capacity : held,
                  resident = row->kv_len ? row->kv_len : values;
    if (row->n_queries == 1 || (row->poison == POISON_BRANCH && row->n_queries > resident)) row->poison = POISON_NONE;
    if (row->poison == POISON_OLDEST && row->n_queries + row->window - 1 > resident) row->poison = POISON_NONE;
}

/* ---- Any bits ---- */

static void fill_wildly(fuzz_input *input, tqkv_store *s)
{
    data_random random = {fuzz_bits(input, 2)};
    const size_t n = s->norms_size / sizeof(float), period = (size_t)fuzz_range(input, 1, 16);
    for (size_t i = 0; i < s->codes_size; i++) ((uint8_t *)s->codes)[i] = (uint8_t)data_bits(&random);
    for (size_t i = 0; i < n; i++) s->norms[i] = i < period ? fuzz_float(input) : s->norms[i - period];
}

/* Rows of a list that are shorter, of blocks of another size, and of any numbers. */
static void make_list_wild(fuzz_input *input, attend_problem *p)
{
    tqkv_list *list = &p->attention.list;
    const int rows = p->attention.n_queries * (list->heads ? list->heads : 1), n = rows * list->length;
    const uint8_t flags = fuzz_byte(input);
    for (int i = 0; i < n && flags & 1; i++) p->list[i] = i < 8 ? fuzz_int(input) : p->list[i - 8];
    if (flags & 2) list->length = fuzz_range(input, -1, list->length);
    if (flags & 4) list->block = fuzz_range(input, -1, 130);
    if (flags & 8) list->newest = fuzz_range(input, -1, 70);
    if (flags & 16) list->heads = list->heads ? fuzz_range(input, -1, list->heads) : 0;
}

static void make_wild(fuzz_input *input, attend_problem *p)
{
    tqkv_attention *a = &p->attention;
    tqkv_store *const stores[7] = {&p->keys,       &p->values,     &p->tail,      &p->ends[0][0],
                                   &p->ends[0][1], &p->ends[1][0], &p->ends[1][1]};
    const uint8_t flags = fuzz_byte(input);
    for (int i = 0; i < 7; i++)
        if (stores[i]->codes) fill_wildly(input, stores[i]);
    if (flags & 1) fuzz_rows(input, p->q, (int)p->n_rows, (int)p->head_dim);
    if (flags & 2) a->scale = fuzz_float(input);
    if (flags & 4) a->softcap = fuzz_float(input);
    for (int i = 0; i < a->n_heads && p->sinks && flags & 8; i++) p->sinks[i] = fuzz_float(input);
    if (flags & 16) a->end = (int64_t)fuzz_bits(input, 8);
    if (flags & 32) a->kv_len = fuzz_range(input, 0, 200);
    if (flags & 64) a->window = fuzz_range(input, 0, 200);
    if (flags & 128 && p->list) make_list_wild(input, p);
}

static void check_wild(fuzz_input *input, attend_problem *p, uint64_t seed)
{
    make_wild(input, p);
    p->poisoned = 0; /* numbers may be NaN */
    const tqkv_result result = tqkv_attend(&p->attention, p->q, p->out);
    if (result == TQKV_OK) {
        attend_check_ways(p, seed, true);
        return;
    }
    CHECK(test_is_untouched(p->out, attend_out_bytes(p)), "%s, but written", tqkv_result_string(result));
    CHECK(result != TQKV_OUT_OF_MEMORY && result != TQKV_UNSUPPORTED, "%s", tqkv_result_string(result));
}

/* Typed queries give what their floats give, as a slice, too; typed outputs are the rounded floats. */
static void check_types(fuzz_input *input, attend_problem *p)
{
    tqkv_attention typed = p->attention;
    const uint8_t types = fuzz_byte(input);
    typed.query_type = test_no_type(types % 3);
    typed.output_type = test_no_type(types / 3 % 3);
    void *q = fuzz_typed(typed.query_type, p->q, p->n_rows * p->head_dim);
    const size_t n = p->n_rows * p->value_dim;
    const size_t size = n * (typed.output_type == TQKV_TYPE_F32 ? sizeof(float) : sizeof(uint16_t));
    void *out = test_alloc_filled(size, 0xff);
    const tqkv_result result = tqkv_attend(&p->attention, p->q, p->out);
    CHECK_RESULT(tqkv_attend(&typed, q, out), result);
    if (result == TQKV_OK)
        CHECK(fuzz_is_rounded(typed.output_type, out, p->out, n), "not the rounded floats");
    else
        CHECK(test_is_untouched(out, size), "%s, but written", tqkv_result_string(result));
    free(q);
    free(out);
}

/* Without queries no array is looked at. */
static void check_no_queries(const attend_problem *p)
{
    tqkv_attention a = p->attention;
    a.n_queries = 0;
    const tqkv_result r = tqkv_attend(&a, NULL, NULL);
    if (r == TQKV_OK) CHECK_RESULT(tqkv_attend_finish(&a, NULL, NULL, NULL), TQKV_OK);
}

/* Sinks far above all scores leave next to nothing, beside what rounding leaves of a centre that is added back; and
   scales of values make single channels, of which each has the error of all, most of a row. */
static double allow_more(const attend_problem *p, size_t row)
{
    const tqkv_store *v = p->attention.values;
    const int head = (int)(row % (size_t)p->attention.n_heads), kv_head = head * v->n_kv_heads / p->attention.n_heads;
    const float *center = reference_center(v, kv_head);
    double squares = 0.0, of_center = 0.0;
    for (size_t i = 0; i < p->value_dim; i++) {
        squares += pow(p->expected[row * p->value_dim + i], 2.0);
        of_center += center ? pow((double)center[i], 2.0) : 0.0;
    }
    return (1e-12 + 2e-7 * sqrt(of_center)) / sqrt(squares) + (v->channel_scale ? 2.0 : 0.0) * p->tolerance;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    test_failure_aborts = true;
    fuzz_input input = {bytes, size};
    attend_row row;
    attend_problem p;
    memset(&row, 0, sizeof row);
    const uint8_t isa = fuzz_byte(&input); /* seldom plain C, which is slow: its bits are compared anyway */
    fuzz_choose_isa(isa % 16 ? (uint8_t)(1 + isa % 3) : 0);
    const uint8_t kind = fuzz_byte(&input), seed = fuzz_byte(&input);
    read_shape(&input, &row);
    read_place(&input, &row);
    read_mask(&input, &row);
    read_scores(&input, &row);
    read_streams(&input, &row);
    if (kind / 4 % 4 == 3) row.exact_held = row.exact_last / 2;
    limit(&row);
    row.bits_alone = kind % 4 == 3;
    attend_set_up(&p, &row);
    p.allowed = allow_more;
    if (row.bits_alone)
        check_wild(&input, &p, seed);
    else
        attend_check_ways(&p, seed, false);
    check_types(&input, &p);
    check_no_queries(&p);
    attend_tear_down(&p);
    return 0;
}
