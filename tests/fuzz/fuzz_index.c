/* make fuzz FUZZERS=index SECONDS=60; AFL++: make fuzz-afl FUZZERS=index. Scores of an index against double precision,
   their bits alone and with each instruction set, and the choice of blocks against a sort. Of some inputs codes, norms
   and numbers are any bits, and options any values: then a call may be refused, which writes nothing. */
#include "fuzz.h"
#include "tests/counting.h"
#include "tests/index_fixture.h"

enum { MOST_BLOCKS = 8192 };

/* ---- What the input chooses ---- */

/* Codes of any bits, and the first norms and weights; the others are tame. */
static void make_wild(fuzz_input *input, index_problem *p)
{
    const tqkv_store *s = &p->keys;
    data_random random = {fuzz_byte(input)};
    for (size_t i = 0; i < s->codes_size; i++) ((uint8_t *)s->codes)[i] = (uint8_t)data_bits(&random);
    for (size_t i = 0; i < s->norms_size / sizeof(float); i++) s->norms[i] = i < 8 ? fuzz_float(input) : 1.0f;
    for (int i = 0; p->weights && i < p->n_rows && i < 8; i++) p->weights[i] = fuzz_float(input);
}

/* Gives an option a value that it may not have; of heads, queries and pages, fewer than there is memory for. */
static void change_option(fuzz_input *input, index_problem *p)
{
    tqkv_index *x = &p->index;
    int *const options[6] = {&x->n_heads, &x->n_queries, &p->keys.n_pages, &x->kv_len, &x->ratio, &x->block};
    int64_t *const positions[2] = {&x->end, &x->positions};
    const int which = fuzz_range(input, 0, 8), value = fuzz_range(input, -1, 130);
    if (which > 7)
        p->pages[value & 7] = value > 100 ? value : -1;
    else if (which > 5)
        *positions[which - 6] = value % 4 ? value : (int64_t)fuzz_bits(input, 8);
    else if (which > 2 || value < *options[which])
        *options[which] = value;
}

/* Room for the scores that the options ask for; false: too many. */
static bool make_room(index_problem *p)
{
    const tqkv_index *x = &p->index;
    const int size = x->block > 0 ? x->block : 1;
    p->n_blocks = x->end > 0 ? (x->end - 1) / size + 1 : 0;
    p->first = x->end - (x->kv_len ? x->kv_len : x->end < p->keys.capacity ? x->end : p->keys.capacity);
    if (p->n_blocks > MOST_BLOCKS) return false;
    free(p->scores);
    p->scores = (float *)test_alloc_filled(index_bytes(p), 0xff);
    return true;
}

/* ---- Scores ---- */

/* Of some queries: the others have their bits alone. */
static void check_error(const index_problem *p)
{
    double *keys = reference_decode_all(&p->keys, 0, p->first, p->index.end, REFERENCE_INTEGERS);
    double *expected = (double *)test_alloc(2 * (size_t)p->n_blocks * sizeof *expected),
           *allowed = expected + p->n_blocks;
    for (int i = 0; i < p->index.n_queries; i += 1 + p->index.n_queries / 2) {
        reference_index_scores(REFERENCE_INTEGERS, &p->index, i, p->q, keys, p->first, expected, allowed);
        for (int64_t b = 0; b < p->n_blocks; b++) {
            const double got = (double)p->scores[i * p->n_blocks + b];
            CHECK(got == expected[b] || fabs(got - expected[b]) <= allowed[b], "query %d block %d: %g, not %g", i,
                  (int)b, got, expected[b]);
        }
    }
    free(keys);
    free(expected);
}

/* Each query alone has the bits that it has among others, with and without the hook. other: [n_queries][n_blocks] */
static void check_alone(const index_problem *p, float *other)
{
    tqkv_index one = p->index;
    const int n_queries = p->index.n_queries, d = p->keys.head_dim;
    one.n_queries = 1;
    one.query_type = TQKV_TYPE_F32;
    one.parallel.run = p->index.parallel.run ? NULL : test_run_backwards;
    for (int i = 0; i < n_queries; i++) {
        const int row = i * p->index.n_heads;
        one.weights = p->weights ? p->weights + row : NULL;
        one.positions =
            (p->index.positions ? p->index.positions : p->index.end * (p->index.ratio ? p->index.ratio : 1)) -
            n_queries + 1 + i;
        if (one.positions <= 0) continue;
        CHECK_RESULT(tqkv_index_scores(&one, p->q + row * d, other), TQKV_OK);
        CHECK(!memcmp(other, p->scores + i * p->n_blocks, (size_t)p->n_blocks * sizeof *other), "query %d differs", i);
    }
}

static void check_sets(const index_problem *p, float *other)
{
    static const char *const sets[4] = {"scalar", "avx2", "avx512", "neon"};
    const char *in_use = tqkv_isa_name();
    for (int i = 0; i < 4; i++) {
        if (getenv("TQKV_ISA") || tqkv_isa_force(sets[i]) != TQKV_OK) continue;
        CHECK_RESULT(tqkv_index_scores(&p->index, index_queries(p), other), TQKV_OK);
        CHECK(!memcmp(other, p->scores, index_bytes(p)), "%s gives other bits", sets[i]);
    }
    CHECK_RESULT(tqkv_isa_force(in_use), TQKV_OK);
}

/* Scores whose first allocation fails, or not; then those that are checked. sure: the problem is a valid one */
static void check_scores(index_problem *p, bool fails, bool sure)
{
    counting counter = {0, fails, 0, 0, 0};
    const tqkv_allocator none = p->index.allocator;
    float *other = (float *)test_alloc_filled(index_bytes(p), 0xff);
    p->index.allocator = counting_allocator(&counter);
    tqkv_result r = tqkv_index_scores(&p->index, index_queries(p), p->scores);
    CHECK(r == TQKV_OK || !memcmp(other, p->scores, index_bytes(p)), "%s, but written", tqkv_result_string(r));
    CHECK(r != TQKV_OUT_OF_MEMORY || counter.calls == counter.fail_at, "no allocation failed");
    if (r == TQKV_OUT_OF_MEMORY) r = tqkv_index_scores(&p->index, index_queries(p), p->scores);
    CHECK_NO_LEAK(&counter);
    p->index.allocator = none;
    CHECK(r == TQKV_OK || !sure, "%s", tqkv_result_string(r));
    if (r == TQKV_OK && sure) {
        check_error(p);
        check_alone(p, other);
        check_sets(p, other);
    }
    free(other);
}

/* ---- The choice ---- */

static const float *sorted_scores;

static int by_score(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    if (sorted_scores[x] != sorted_scores[y]) return sorted_scores[x] > sorted_scores[y] ? -1 : 1;
    return x < y ? -1 : x > y;
}

static int by_number(const void *a, const void *b) { return *(const int32_t *)a < *(const int32_t *)b ? -1 : 1; }

/* The k blocks of one query by a sort; changes scores. Whether no score that it sees is NaN. list: [n_blocks + k] */
static bool expect_choice(const index_problem *p, int query, float *scores, int k, int32_t *list)
{
    const tqkv_index *x = &p->index;
    const int size = x->block ? x->block : 1;
    const int64_t end = reference_index_end(x, query), seen = end > p->first ? (end - 1) / size + 1 : 0;
    int n = 0;
    for (int64_t b = p->first / size; b < seen; b++) {
        if (scores[b] != scores[b]) return false;
        if (scores[b] == -(float)INFINITY) continue;
        list[n++] = (int32_t)b;
        if (b < x->first || b >= seen - x->newest) scores[b] = (float)INFINITY;
    }
    sorted_scores = scores;
    qsort(list, (size_t)n, sizeof *list, by_score);
    if (n > k) n = k;
    qsort(list, (size_t)n, sizeof *list, by_number);
    while (n < k) list[n++] = -1;
    return true;
}

/* Any bits, or scores with many ties, both zeros, and invisible blocks. */
static void make_scores(fuzz_input *input, float *scores, int64_t n)
{
    const int kind = fuzz_range(input, 0, 4);
    data_random random = {fuzz_byte(input)};
    for (int64_t i = 0; i < n; i++) {
        scores[i] = data_student(&random) * (kind == 0 ? 1e-30f : 100.0f);
        if (kind == 1) scores[i] = (float)data_below(&random, 5) - 2.0f;
        if (kind == 2) scores[i] = data_below(&random, 2) ? 0.0f : -0.0f;
        if (kind == 3 && data_below(&random, 3) == 0) scores[i] = -(float)INFINITY;
        if (kind == 4 && i < 8) scores[i] = fuzz_float(input);
    }
}

static void check_choice(fuzz_input *input, index_problem *p, bool sure)
{
    tqkv_index *x = &p->index;
    tqkv_store shape = p->keys; /* of which nothing else is read */
    const int few = fuzz_range(input, 0, 40), share = fuzz_byte(input), n_blocks = (int)p->n_blocks;
    const int k = share < 128 ? few - 1 : n_blocks * share / 128;
    const size_t n = (size_t)x->n_queries * (size_t)(k > 0 ? k : 0), room = (size_t)(n_blocks + (k > 0 ? k : 0));
    int32_t *list = (int32_t *)test_alloc_filled((n + 1) * sizeof *list, 0xff);
    int32_t *expected = (int32_t *)test_alloc(room * sizeof *expected);
    shape.codes = NULL;
    x->keys = &shape;
    x->first = fuzz_range(input, 0, 5) - (sure ? 0 : 1);
    x->newest = fuzz_range(input, 0, 5) - (sure ? 0 : 1);
    if (fuzz_byte(input) % 2) make_scores(input, p->scores, x->n_queries * n_blocks);
    const tqkv_result r = tqkv_index_choose(x, p->scores, k, list);
    CHECK(r != TQKV_OK || k >= 0, "a list of %d blocks", k);
    CHECK(test_is_untouched(list + (r == TQKV_OK ? n : 0), ((r == TQKV_OK ? 0 : n) + 1) * sizeof *list), "%s, written",
          tqkv_result_string(r));
    bool numbers = true;
    for (int i = 0; k >= 0 && (sure || r == TQKV_OK) && i < x->n_queries && numbers; i++) {
        numbers = expect_choice(p, i, p->scores + i * n_blocks, k, expected);
        CHECK(r != TQKV_OK || (numbers && !memcmp(expected, list + i * k, (size_t)k * sizeof *list)),
              "query %d: other blocks, %d of %d", i, k, n_blocks);
    }
    CHECK(!sure || k < 0 || r == (numbers ? TQKV_OK : TQKV_NOT_FINITE), "%s", tqkv_result_string(r));
    free(list);
    free(expected);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    index_problem p;
    test_failure_aborts = true;
    fuzz_input input = {bytes, size};
    fuzz_choose_isa(fuzz_byte(&input));
    const uint8_t flags = fuzz_byte(&input);
    const bool wild = flags % 8 == 1, fails = flags / 8 % 4 == 1, changed = flags >= 192;
    index_set_up(&p, (int)fuzz_bits(&input, 2), 0);
    if (wild) make_wild(&input, &p);
    for (int i = flags & 3; changed && i >= 0; i--) change_option(&input, &p);
    if (make_room(&p)) {
        check_scores(&p, fails, !wild && !changed);
        check_choice(&input, &p, !changed);
    }
    index_tear_down(&p);
    return 0;
}
