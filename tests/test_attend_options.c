/* Each option of attention with each head_dim. */
#include "attend_option_list.h"

void test_check_attend(const void *parameters);

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
