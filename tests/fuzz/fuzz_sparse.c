/* make fuzz FUZZERS=sparse SECONDS=60; AFL++: make fuzz-afl FUZZERS=sparse. Scores of an index over arbitrary codes and
   norms, the choice over arbitrary scores. */
#include "fuzz.h"

enum { CAPACITY = 192, DIM = 32, HEADS = 2, MAX_QUERIES = 3, MAX_K = 50, MAX_SCORES = 256 };

typedef struct problem {
    tqkv_store keys;
    int32_t pages[8];
    float q[MAX_QUERIES * HEADS * DIM], weights[MAX_QUERIES * HEADS];
    tqkv_index index;
} problem;

/* tame: norms near 1, else the input's bit patterns. */
static tqkv_store read_store(fuzz_input *input, bool tame, int32_t *pages)
{
    const int place = fuzz_range(input, 0, 2);
    const tqkv_format format = test_formats[fuzz_range(input, 0, TEST_FORMATS - 1)];
    tqkv_store s = test_store(format, DIM, 1, CAPACITY, place == 1);
    data_random random = {fuzz_byte(input)};
    uint8_t *codes = (uint8_t *)s.codes;
    for (size_t i = 0; i < s.codes_size; i++) codes[i] = (uint8_t)data_bits(&random);
    for (size_t i = 1; tame && format == TQKV_F16 && i < s.codes_size; i += 2)
        codes[i] = (uint8_t)((codes[i] & 0x83) | 0x3c);
    const size_t n = s.norms_size / sizeof(float);
    for (size_t i = 0; i < n; i++)
        s.norms[i] = tame ? (format == TQKV_I8 ? 0.01f : 5.0f) : i < 8 ? fuzz_float(input) : 1.0f;
    for (int i = 0; i < 8; i++) pages[i] = fuzz_range(input, 0, 20) ? data_below(&random, CAPACITY / 64) : -1;
    if (place == 2) s.pages = pages;
    s.n_pages = place == 2 ? fuzz_range(input, 0, 8) : 0;
    s.page_size = 64;
    return s;
}

static int64_t read_end(fuzz_input *input)
{
    return fuzz_byte(input) % 16 ? fuzz_byte(input) : (int64_t)fuzz_bits(input, 8);
}

static void read_index(fuzz_input *input, problem *p, bool tame)
{
    tqkv_index *x = &p->index;
    const uint8_t flags = fuzz_byte(input);
    x->keys = &p->keys;
    x->n_heads = fuzz_range(input, -1, HEADS);
    x->n_queries = fuzz_range(input, 0, MAX_QUERIES);
    x->end = read_end(input);
    x->kv_len = flags & 1 ? fuzz_byte(input) : 0;
    x->ratio = fuzz_range(input, -1, 5);
    x->block = fuzz_range(input, -1, 130);
    x->first = fuzz_range(input, -1, 9);
    x->newest = fuzz_range(input, -1, 9);
    x->positions = flags & 2 ? read_end(input) : 0;
    x->relu = flags & 4;
    x->pool = flags & 8 ? TQKV_POOL_MEAN : TQKV_POOL_MAX;
    if (flags & 32) x->weights = p->weights;
    if (flags & 64) x->parallel.run = test_run_backwards;
    for (int i = 0; i < MAX_QUERIES * HEADS; i++) p->weights[i] = tame ? 0.5f : fuzz_float(input);
}

static void check_list(const int32_t *list, int k, int64_t n_blocks)
{
    for (int i = 0; i < k; i++) {
        CHECK(list[i] >= -1 && list[i] < n_blocks, "block %d", (int)list[i]);
        CHECK(i == 0 || list[i] == -1 || list[i] > list[i - 1], "not ascending");
        CHECK(i == 0 || list[i - 1] != -1 || list[i] == -1, "a block behind -1");
    }
}

static void check_index(fuzz_input *input, problem *p)
{
    const tqkv_index *x = &p->index;
    float scores[MAX_QUERIES * MAX_SCORES + 1];
    int32_t list[MAX_QUERIES * MAX_K + 1];
    const int size = x->block > 0 ? x->block : 1, n_queries = x->n_queries;
    const int64_t n_blocks = x->end > 0 ? (x->end - 1) / size + 1 : 0;
    const int k = fuzz_range(input, -1, MAX_K);
    if (n_blocks > MAX_SCORES) return; /* the scores would be larger than what is here */
    memset(scores, 0xff, sizeof scores);
    memset(list, 0xff, sizeof list);
    const size_t n = (size_t)(n_queries * n_blocks);
    const tqkv_result result = tqkv_index_scores(x, p->q, scores);
    CHECK(test_is_untouched(scores + (result == TQKV_OK ? n : 0), sizeof scores - (result == TQKV_OK ? n : 0) * 4),
          "%s, but written", tqkv_result_string(result));
    if (fuzz_byte(input) % 2)
        for (size_t i = 0; i < n; i++) scores[i] = i < 32 ? fuzz_float(input) : scores[i % 32];
    if (tqkv_index_choose(x, scores, k, list) == TQKV_OK)
        for (int i = 0; i < n_queries; i++) check_list(list + i * k, k, n_blocks);
    CHECK(test_is_untouched(list + (k > 0 ? n_queries * k : 0), sizeof *list), "written behind the list");
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static problem p;
    test_failure_aborts = true;
    fuzz_input input = {bytes, size};
    memset(&p, 0, sizeof p);
    fuzz_choose_isa(fuzz_byte(&input));
    const bool tame = fuzz_byte(&input) & 1;
    fuzz_data(fuzz_byte(&input), DATA_GAUSSIAN, p.q, MAX_QUERIES * HEADS, DIM);
    p.keys = read_store(&input, tame, p.pages);
    read_index(&input, &p, tame);
    check_index(&input, &p);
    test_store_free(&p.keys);
    return 0;
}
