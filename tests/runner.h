/* The test runner: cases are rows of one table, named "group/what/parameters". */
#ifndef TQKV_TESTS_RUNNER_H
#define TQKV_TESTS_RUNNER_H

#include "data.h"
#include "shape.h"
#include "tqkv.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* For an implementation compiled as C++ among tests in C. */
#ifdef __cplusplus
extern "C" {
#endif

enum { TEST_NAME_SIZE = 96, TEST_ROW_SIZE = 512 };

typedef struct test_case {
    char name[TEST_NAME_SIZE];
    void (*run)(const void *row);
    union {
        unsigned char bytes[TEST_ROW_SIZE];
        double aligned;
        int64_t whole;
    } row;
} test_case;

#if defined(__GNUC__)
#define TEST_PRINTF(format_index, first_index) __attribute__((format(printf, format_index, first_index)))
#else
#define TEST_PRINTF(format_index, first_index)
#endif

/* The parameter of a case without a row. */
#define NO_ROW const void *no_row __attribute__((unused))

/* Adds one case. Copies the row, its parameters; NULL and 0: no row. */
void test_add(void (*run)(const void *row), const void *row, size_t row_size, const char *name, ...) TEST_PRINTF(4, 5);

/* Marks the running case as failed and prints where and why. */
void test_fail(const char *file, int line, const char *condition, const char *format, ...) TEST_PRINTF(4, 5);

/* Failed checks of the running case. */
int test_failures(void);

/* If true, a failed check aborts the program: for the fuzzers. */
extern bool test_failure_aborts;

/* Called behind each case, if it is not NULL. */
extern void (*test_behind)(const char *name);

/* The runner's TQKV_EXPLAIN: keeps the last text of this thread in test_explained. */
extern __thread const char *test_explained;
void test_explain(const char *text);

/* Faults that tests have injected: failed allocations, reads and writes, full disks, killed processes. Printed at the
 * end. */
extern int test_faults;

#define CHECK(condition, ...) \
    do { \
        if (!(condition)) test_fail(__FILE__, __LINE__, #condition, __VA_ARGS__); \
    } while (0)

/* As CHECK. On failure it also returns from the calling function, which must be void. */
#define REQUIRE(condition, ...) \
    do { \
        if (!(condition)) { \
            test_fail(__FILE__, __LINE__, #condition, __VA_ARGS__); \
            return; \
        } \
    } while (0)

/* The call must give the expected tqkv_result. */
#define CHECK_RESULT(call, expected) \
    do { \
        tqkv_result check_result_ = (call); \
        if (check_result_ != (expected)) \
            test_fail(__FILE__, __LINE__, #call, "is %s, not %s", tqkv_result_string(check_result_), \
                      tqkv_result_string(expected)); \
    } while (0)

/* Runs or lists the cases whose names contain one of the filters, or all cases without filters. Prints 'N passed, N
 * failed', frees the table and returns the exit status. */
int test_run_selected(bool list, int n_filters, char **filters);

/* Each file of tests adds its cases in test_STEM_cases, which main.c calls. TEST_STEMS,
 * of rules.mk: X(STEM) for each. */
#ifndef TEST_STEMS
#define TEST_STEMS X(tables)
#endif
#define X(stem) void test_##stem##_cases(void);
TEST_STEMS
#undef X

/* The codec's tables for the independent reference, defined in test_tables.c. */
#ifdef TQKV_METAL
/* Gives a planned attend or attend_matrix this kernel and so many columns a threadgroup,
 * at most as many as it takes. */
void test_plan_columns(tqkv_metal_dispatch *d, bool matrix, int columns);
#endif
char test_set_products(char products);  /* tqkv__products; returns what it was. 0: not asked yet */
const float *test_codebook(int bits);   /* [1 << bits] */
const float *test_boundaries(int bits); /* [(1 << bits) - 1] */
const uint8_t *test_signs(void);        /* [64] */
const uint8_t *test_hadamard(int m);    /* [m][(m + 7) / 8], of order 12, 20, 28 or 36 */

/* malloc that ends the program instead of returning NULL; the second fills the memory with a byte. */
void *test_alloc(size_t bytes);
void *test_alloc_filled(size_t bytes, int byte);

/* Whether all bytes are 0xff, as test_alloc_filled may have left them: none was written. */
bool test_is_untouched(const void *bytes, size_t n);

/* A hook that runs tasks in another order; user: counts the calls, or NULL. */
void test_run_backwards(void *user, int count, tqkv_task task, void *context);

/* New [n_rows][head_dim] with the values of data_rows. */
float *test_rows(uint64_t seed, data_kind kind, int n_rows, int head_dim);

/* Scales of channels, log2 of the largest by the smallest of which is about `spread`, and whose mean square is about 1:
 * sums of products are as large as without them. [n_heads][head_dim] */
float *test_scales(uint64_t seed, int n_heads, int head_dim, double spread);

/* A store with buffers of the exact size, filled with 0xff: norms and halves are NaN. */
tqkv_store test_store(tqkv_format format, int head_dim, int n_kv_heads, int capacity, bool ring);
void test_store_free(tqkv_store *store);

/* Values that no enumerator has. C++ refuses them as constants. */
tqkv_format test_no_format(int number);
tqkv_basis test_no_basis(int number);
tqkv_type test_no_type(int number);
tqkv_result test_no_result(int number);
tqkv_pairs test_no_pairs(int number);

enum { TEST_FORMATS = 10 };
extern const tqkv_format test_formats[TEST_FORMATS];
extern const int test_head_dims[6]; /* powers of two */
enum { TEST_ALL_HEAD_DIMS = 22 };
extern const int test_all_head_dims[TEST_ALL_HEAD_DIMS];

#ifdef __cplusplus
}
#endif

#endif
