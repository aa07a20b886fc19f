/* Each option of attention with each head_dim. */
#include "attend_fixture.h"

void test_check_attend(const void *parameters);

typedef struct option {
    const char *name;
    void (*apply)(attend_row *row);
} option;

/* ---- Where positions lie ---- */

static void place(attend_row *row, bool ring, int capacity, int64_t end)
{
    row->key_ring = row->value_ring = ring;
    row->key_capacity = row->value_capacity = capacity;
    row->end = end;
    row->n_queries = 3;
}
static void linear_partly(attend_row *row) { place(row, false, 64, 37); }
static void linear_exactly(attend_row *row) { place(row, false, 64, 64); }
static void linear_nearly(attend_row *row) { place(row, false, 64, 63); }
static void ring_partly(attend_row *row) { place(row, true, 64, 37); }
static void ring_exactly(attend_row *row) { place(row, true, 64, 64); }
static void ring_wrapped(attend_row *row) { place(row, true, 48, 75); }
static void ring_by_one(attend_row *row) { place(row, true, 48, 49); }
static void ring_often(attend_row *row) { place(row, true, 33, 33 * 7 + 5); }
static void ring_far(attend_row *row) { place(row, true, 40, ((int64_t)1 << 40) + 5); }
static void ring_of_one(attend_row *row)
{
    place(row, true, 1, 12);
    row->n_queries = 2;
}
static void one_position(attend_row *row) { place(row, false, 5, 1); }
static void different_capacities(attend_row *row)
{
    place(row, true, 48, 75);
    row->value_capacity = 61;
    row->kv_len = 45;
}
static void smaller_values(attend_row *row)
{ /* kv_len 0: what both hold */
    place(row, true, 48, 75);
    row->value_capacity = 29;
}
static void ring_and_linear(attend_row *row)
{
    place(row, true, 48, 75);
    row->value_ring = false;
    row->value_capacity = 75;
}
static void kv_len_linear(attend_row *row)
{
    place(row, false, 64, 60);
    row->kv_len = 21;
}
static void kv_len_ring(attend_row *row)
{
    place(row, true, 40, 100);
    row->kv_len = 17;
}
static void kv_len_partly_filled_ring(attend_row *row)
{ /* a nonzero start in a ring that never wrapped */
    place(row, true, 64, 50);
    row->kv_len = 20;
}

static void ring_at_the_last_position(attend_row *row) { place(row, true, 40, INT64_MAX); }

/* ---- Contexts long enough to be cut into tasks ---- */

static void long_context(attend_row *row)
{
    int length = row->head_dim > 64 ? 2100 : 5000;
    place(row, false, length, length - 1);
    row->n_queries = row->head_dim > 256 ? 1 : 2;
    row->n_kv_heads = 1;
}
static void long_wrapped(attend_row *row)
{
    place(row, true, row->head_dim > 64 ? 2100 : 3500, 7001);
    row->n_queries = 2;
    row->n_kv_heads = 1;
    row->softcap = 3.0f;
    row->sinks = SINKS_SOME;
}
static void long_window(attend_row *row) /* whole tasks see nothing */
{
    long_context(row);
    row->window = 70;
}
static void long_in_slices(attend_row *row)
{
    long_context(row);
    row->way = WAY_SLICES;
}
static void long_in_parallel(attend_row *row)
{
    long_wrapped(row);
    row->way = WAY_PARALLEL;
}
static void many_rows(attend_row *row) /* 65 queries of 16 heads */
{
    row->n_queries = 65;
    row->group = 16;
    row->n_kv_heads = 1;
    row->end = row->head_dim > 128 ? 20 : 70;
    row->key_capacity = row->value_capacity = 70;
}
static void many_rows_in_parallel(attend_row *row)
{
    many_rows(row);
    row->way = WAY_PARALLEL;
    row->window = 9;
}

/* ---- Which queries see what ---- */

static void window_of_one(attend_row *row)
{
    row->window = 1;
    row->n_queries = 4;
}
static void window_small(attend_row *row)
{
    row->window = 7;
    row->n_queries = 11;
}
static void window_on_ring(attend_row *row)
{
    place(row, true, 48, 75);
    row->window = 13;
}
static void window_larger(attend_row *row)
{
    row->window = 1000;
    row->n_queries = 5;
}
static void window_and_kv_len(attend_row *row)
{ /* the first queries see nothing */
    row->kv_len = 6;
    row->window = 4;
    row->n_queries = 20;
}
static void queries_before_start(attend_row *row)
{ /* the first queries stand at negative positions */
    place(row, false, 8, 5);
    row->n_queries = 12;
}
static void queries_before_start_with_sinks(attend_row *row)
{
    queries_before_start(row);
    row->sinks = SINKS_SOME;
}
static void many_queries(attend_row *row)
{
    row->n_queries = 65;
    row->group = 1;
    row->end = 80;
    row->key_capacity = row->value_capacity = 80;
}

/* ---- NaN in positions that only some queries see ---- */

static void poison_newest(attend_row *row)
{
    row->n_queries = 6;
    row->poison = POISON_NEWEST;
}
static void poison_oldest(attend_row *row)
{
    row->n_queries = 6;
    row->window = 10;
    row->poison = POISON_OLDEST;
}
static void poison_newest_f16(attend_row *row)
{
    poison_newest(row);
    row->key_format = row->value_format = TQKV_F16;
}
static void poison_oldest_f16(attend_row *row)
{
    poison_oldest(row);
    row->key_format = row->value_format = TQKV_F16;
}
static void poison_newest_ring(attend_row *row)
{
    place(row, true, 33, 90);
    poison_newest(row);
}
static void poison_newest_slices(attend_row *row)
{
    poison_newest(row);
    row->way = WAY_SLICES;
}

/* ---- Scores ---- */

static void with_scale(attend_row *row) { row->scale = 0.03f; }
static void negative_scale(attend_row *row) { row->scale = -0.05f; }
static void large_scores(attend_row *row) { row->query_size = 12.0f; }
static void softcap(attend_row *row)
{
    row->softcap = 2.0f;
    row->query_size = 4.0f;
}
static void softcap_large(attend_row *row) { row->softcap = 50.0f; }
static void sinks(attend_row *row) { row->sinks = SINKS_SOME; }
static void sinks_dominating(attend_row *row) { row->sinks = SINKS_DOMINATING; }
static void sinks_minus_infinity(attend_row *row) { row->sinks = SINKS_MINUS_INFINITY; }
static void everything(attend_row *row)
{
    place(row, true, 48, 120);
    row->window = 31;
    row->softcap = 4.0f;
    row->sinks = SINKS_SOME;
    row->n_queries = 9;
    row->group = 3;
}

/* ---- Bases and variants of the codec ---- */

static void query_rotated(attend_row *row) { row->query_basis = TQKV_ROTATED; }
static void output_rotated(attend_row *row) { row->output_basis = TQKV_ROTATED; }
static void both_rotated(attend_row *row)
{
    row->query_basis = row->output_basis = TQKV_ROTATED;
    row->n_queries = 2;
}
static void rotated_f16(attend_row *row)
{ /* F16 is not rotated: the bases change nothing */
    both_rotated(row);
    row->key_format = row->value_format = TQKV_F16;
}
static void hybrid(attend_row *row)
{
    row->key_format = TQKV_F16;
    row->value_format = TQKV_TQ6_BYTES;
    row->values_unrotated = true;
}
static void unrotated_keys(attend_row *row)
{
    row->key_format = TQKV_TQ8;
    row->keys_unrotated = true;
    row->query_basis = row->output_basis = TQKV_ROTATED;
}
static void block_scale(attend_row *row)
{
    row->key_format = TQKV_TQ8;
    row->value_format = TQKV_TQ4;
    row->block_scale = 1.5f;
}

/* ---- Slices and threads ---- */

static void slices(attend_row *row)
{
    row->way = WAY_SLICES;
    row->n_queries = 3;
}
static void slices_of_everything(attend_row *row)
{
    everything(row);
    row->way = WAY_SLICES;
}
static void slices_with_dominating_sinks(attend_row *row)
{
    row->sinks = SINKS_DOMINATING;
    row->way = WAY_SLICES;
}
static void slices_rotated(attend_row *row)
{
    both_rotated(row);
    row->way = WAY_SLICES;
}
static void slices_of_few(attend_row *row)
{ /* fewer positions than slices, and queries that see nothing */
    queries_before_start(row);
    row->way = WAY_SLICES;
}
static void parallel(attend_row *row)
{
    row->way = WAY_PARALLEL;
    row->n_queries = 5;
    row->n_kv_heads = 3;
    row->end = 300;
    row->key_capacity = row->value_capacity = 310;
}
static void parallel_everything(attend_row *row)
{
    everything(row);
    row->way = WAY_PARALLEL;
}
static void reversed(attend_row *row)
{
    everything(row);
    row->way = WAY_REVERSED;
}

#define OPTION(function)                                                                                               \
    {                                                                                                                  \
#function, function                                                                                            \
    }
static const option options[] = {
    OPTION(linear_partly),
    OPTION(linear_exactly),
    OPTION(linear_nearly),
    OPTION(ring_partly),
    OPTION(ring_exactly),
    OPTION(ring_wrapped),
    OPTION(ring_by_one),
    OPTION(ring_often),
    OPTION(ring_far),
    OPTION(ring_of_one),
    OPTION(one_position),
    OPTION(different_capacities),
    OPTION(smaller_values),
    OPTION(ring_and_linear),
    OPTION(kv_len_linear),
    OPTION(kv_len_ring),
    OPTION(kv_len_partly_filled_ring),
    OPTION(ring_at_the_last_position),
    OPTION(long_context),
    OPTION(long_wrapped),
    OPTION(long_window),
    OPTION(long_in_slices),
    OPTION(long_in_parallel),
    OPTION(many_rows),
    OPTION(many_rows_in_parallel),
    OPTION(window_of_one),
    OPTION(window_small),
    OPTION(window_on_ring),
    OPTION(window_larger),
    OPTION(window_and_kv_len),
    OPTION(queries_before_start),
    OPTION(queries_before_start_with_sinks),
    OPTION(many_queries),
    OPTION(poison_newest),
    OPTION(poison_oldest),
    OPTION(poison_newest_f16),
    OPTION(poison_oldest_f16),
    OPTION(poison_newest_ring),
    OPTION(poison_newest_slices),
    OPTION(with_scale),
    OPTION(negative_scale),
    OPTION(large_scores),
    OPTION(softcap),
    OPTION(softcap_large),
    OPTION(sinks),
    OPTION(sinks_dominating),
    OPTION(sinks_minus_infinity),
    OPTION(everything),
    OPTION(query_rotated),
    OPTION(output_rotated),
    OPTION(both_rotated),
    OPTION(rotated_f16),
    OPTION(hybrid),
    OPTION(unrotated_keys),
    OPTION(block_scale),
    OPTION(slices),
    OPTION(slices_of_everything),
    OPTION(slices_with_dominating_sinks),
    OPTION(slices_rotated),
    OPTION(slices_of_few),
    OPTION(parallel),
    OPTION(parallel_everything),
    OPTION(reversed),
};

void test_attend_options_cases(void)
{
    int n_options = (int)(sizeof options / sizeof *options);
    for (int i = 0; i < n_options; i++)
        for (int d = 0; d < 6; d++) {
            int pair = 5 * i + 11 * d;
            attend_row row = attend_default_row(test_formats[pair % 8], test_formats[pair / 8 % 8], test_head_dims[d]);
            options[i].apply(&row);
            test_add(test_check_attend, &row, sizeof row, "attend/%s/%d", options[i].name, row.head_dim);
        }
}
