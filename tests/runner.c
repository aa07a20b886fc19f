/* The table of cases, and the loop that runs the selected ones. */
#include "runner.h"

#include <stdarg.h>

const tqkv_format test_formats[TEST_FORMATS] = {TQKV_F16,       TQKV_TQ4,       TQKV_TQ5, TQKV_TQ6, TQKV_TQ8,
                                                TQKV_TQ5_BYTES, TQKV_TQ6_BYTES, TQKV_I8,  TQKV_TQ3, TQKV_TQ2};
const int test_head_dims[6] = {32, 64, 128, 256, 512, 1024};
const int test_all_head_dims[TEST_ALL_HEAD_DIMS] = {32,  48,  64,  80,  96,  112, 128, 144, 160, 192, 224,
                                                    256, 288, 320, 384, 448, 512, 576, 640, 768, 896, 1024};

enum { MAX_FAILURES_PRINTED = 5 };

bool test_failure_aborts = false;
int test_faults = 0;
void (*test_behind)(const char *name);
__thread const char *test_explained;

void test_explain(const char *text) { test_explained = text; }

static struct {
    test_case *cases;
    size_t count, room;
    const test_case *running;
    int failures;
} table;

int test_failures(void) { return table.failures; }

void *test_alloc(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : sizeof(double)); /* aligned under Electric Fence, too */
    if (!memory) {
        fprintf(stderr, "tests: out of memory\n");
        exit(2);
    }
    return memory;
}

void *test_alloc_filled(size_t bytes, int byte)
{
    void *memory = test_alloc(bytes);
    memset(memory, byte, bytes);
    return memory;
}

bool test_is_untouched(const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (((const unsigned char *)bytes)[i] != 0xff) return false;
    return true;
}

void test_run_backwards(void *user, int count, tqkv_task task, void *context)
{
    if (user) ++*(int *)user;
    while (count-- > 0) task(context, count);
}

float *test_rows(uint64_t seed, data_kind kind, int n_rows, int head_dim)
{
    float *rows = (float *)test_alloc(sizeof(float) * (size_t)n_rows * (size_t)head_dim);
    data_rows(seed, kind, rows, n_rows, head_dim);
    return rows;
}

void test_add(void (*run)(const void *row), const void *row, size_t row_size, const char *name, ...)
{
    if (table.count == table.room) {
        table.room = table.room ? 2 * table.room : 1024;
        table.cases = (test_case *)realloc(table.cases, table.room * sizeof *table.cases);
    }
    if (!table.cases || row_size > TEST_ROW_SIZE) {
        fprintf(stderr, "tests: no room for the case %s\n", name);
        exit(2);
    }
    test_case *added = &table.cases[table.count++];
    memset(added, 0, sizeof *added);
    added->run = run;
    if (row_size) memcpy(added->row.bytes, row, row_size);
    va_list arguments;
    va_start(arguments, name);
    int length = vsnprintf(added->name, sizeof added->name, name, arguments);
    va_end(arguments);
    if (length < 0 || length >= TEST_NAME_SIZE) {
        fprintf(stderr, "tests: the name %s is too long\n", added->name);
        exit(2);
    }
}

void test_fail(const char *file, int line, const char *condition, const char *format, ...)
{
    if (++table.failures > MAX_FAILURES_PRINTED) return;
    printf("FAIL %s\n  %s:%d: %s: ", table.running ? table.running->name : "(no case)", file, line, condition);
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    fflush(stdout);
    if (test_failure_aborts) abort();
}

float *test_scales(uint64_t seed, int n_heads, int head_dim, double spread)
{
    const int n = n_heads * head_dim;
    data_random random = {seed};
    double squares = 0.0;
    float *scales = (float *)test_alloc(sizeof(float) * (size_t)n);
    for (int i = 0; i < n; i++) {
        scales[i] = (float)exp2(spread * (data_below(&random, 1001) / 1000.0 - 0.5));
        squares += (double)scales[i] * (double)scales[i];
    }
    for (int i = 0; i < n; i++) scales[i] /= (float)sqrt(squares / n);
    return scales;
}

tqkv_store test_store(tqkv_format format, int head_dim, int n_kv_heads, int capacity, bool ring)
{
    tqkv_store store;
    memset(&store, 0, sizeof store);
    store.format = format;
    store.head_dim = head_dim;
    store.n_kv_heads = n_kv_heads;
    store.capacity = capacity;
    store.ring = ring;
    store.codes_size = tqkv_codes_size(&store);
    store.norms_size = tqkv_norms_size(&store);
    store.codes = test_alloc_filled(store.codes_size, 0xff);
    if (store.norms_size) store.norms = (float *)test_alloc_filled(store.norms_size, 0xff);
    return store;
}

void test_store_free(tqkv_store *store)
{
    free(store->codes);
    free(store->norms);
    memset(store, 0, sizeof *store);
}

tqkv_format test_no_format(int number) { return (tqkv_format)number; }

tqkv_basis test_no_basis(int number) { return (tqkv_basis)number; }

tqkv_type test_no_type(int number) { return (tqkv_type)number; }

tqkv_result test_no_result(int number) { return (tqkv_result)number; }

tqkv_pairs test_no_pairs(int number) { return (tqkv_pairs)number; }

/* A filter with a minus leaves out what it names. */
static bool is_selected(const char *name, int n_filters, char **filters)
{
    bool selected = false, all = true;
    for (int i = 0; i < n_filters; i++) {
        const bool out = filters[i][0] == '-';
        const bool found = strstr(name, filters[i] + out) != NULL;
        if (out && found) return false;
        selected = selected || found;
        all = all && out;
    }
    return selected || all;
}

int test_run_selected(bool list, int n_filters, char **filters)
{
    int passed = 0, failed = 0;
    for (size_t i = 0; i < table.count; i++) {
        if (!is_selected(table.cases[i].name, n_filters, filters)) continue;
        if (list) {
            printf("%s\n", table.cases[i].name);
            continue;
        }
        table.running = &table.cases[i];
        table.failures = 0;
        table.running->run(table.running->row.bytes);
        if (test_behind) test_behind(table.running->name);
        if (table.failures > MAX_FAILURES_PRINTED)
            printf("  and %d more in this case\n", table.failures - MAX_FAILURES_PRINTED);
        if (table.failures)
            failed++;
        else
            passed++;
    }
    free(table.cases);
    memset(&table, 0, sizeof table);
    if (list) return 0;
    if (passed + failed == 0) failed = 1; /* a filter that selects nothing must not look like success */
    if (test_faults) printf("%d faults injected\n", test_faults);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
