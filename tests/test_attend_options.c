/* Each option of attention with each head_dim. */
#include "attend_fixture.h"

void test_check_attend(const void *parameters);

static void place(attend_row *row, bool ring, int capacity, int64_t end)
{
    row->key_ring = row->value_ring = ring;
    row->key_capacity = row->value_capacity = capacity;
    row->end = end;
    row->n_queries = 3;
}

typedef struct option {
    const char *name;
    void (*apply)(attend_row *row);
} option;

#define OPTION(name, statement)                                                                                        \
    static void name(attend_row *row) { statement; }
#include "attend_options.h"
#undef OPTION

#define OPTION(name, statement) {#name, name},
static const option options[] = {
#include "attend_options.h"
};
#undef OPTION

void test_attend_options_cases(void)
{
    int n_options = (int)(sizeof options / sizeof *options);
    for (int i = 0; i < n_options; i++)
        for (int d = 0; d < 6; d++) {
            int pair = 5 * i + 11 * d;
            attend_row row = attend_default_row(test_formats[pair % TEST_FORMATS],
                                                test_formats[pair / TEST_FORMATS % TEST_FORMATS], test_head_dims[d]);
            options[i].apply(&row);
            test_add(test_check_attend, &row, sizeof row, "attend/%s/%d", options[i].name, row.head_dim);
        }
}
