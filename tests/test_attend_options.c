/* Each option of attention with two head_dims, in every way. */
#include "attend_checks.h"
#include "attend_option_list.h"

static void check_option(const void *parameters)
{
    const attend_row *row = (const attend_row *)parameters;
    attend_problem problem;
    attend_set_up(&problem, row);
    attend_check_ways(&problem, (uint64_t)row->head_dim, false);
    attend_tear_down(&problem);
}

void test_attend_options_cases(void)
{
    const int n_options = (int)(sizeof options / sizeof *options);
    for (int i = 0; i < 2 * n_options; i++) {
        const int d = (i + 3 * (i / n_options)) % 6, pair = 5 * (i % n_options) + 11 * d;
        attend_row row = attend_default_row(test_formats[pair % TEST_FORMATS],
                                            test_formats[pair / TEST_FORMATS % TEST_FORMATS], test_head_dims[d]);
        options[i % n_options].apply(&row);
        test_add(check_option, &row, sizeof row, "attend/%s/%d", options[i % n_options].name, row.head_dim);
    }
}
