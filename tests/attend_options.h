/* The options of test_attend_options.c, one a line: its name and what it sets in the row. Included once for the
   functions and once for the table. The number of a line decides which formats an option is tested with: add lines at
   the end. */

/* ---- Where positions lie ---- */

OPTION(linear_partly, place(row, false, 64, 37))
OPTION(linear_exactly, place(row, false, 64, 64))
OPTION(linear_nearly, place(row, false, 64, 63))
OPTION(ring_partly, place(row, true, 64, 37))
OPTION(ring_exactly, place(row, true, 64, 64))
OPTION(ring_wrapped, place(row, true, 48, 75))
OPTION(ring_by_one, place(row, true, 48, 49))
OPTION(ring_often, place(row, true, 33, 33 * 7 + 5))
OPTION(ring_far, place(row, true, 40, ((int64_t)1 << 40) + 5))
OPTION(ring_of_one, place(row, true, 1, 12); row->n_queries = 2)
OPTION(one_position, place(row, false, 5, 1))
OPTION(different_capacities, place(row, true, 48, 75); row->value_capacity = 61; row->kv_len = 45)
OPTION(smaller_values, place(row, true, 48, 75); row->value_capacity = 29) /* kv_len 0: the positions that both hold */
OPTION(ring_and_linear, place(row, true, 48, 75); row->value_ring = false; row->value_capacity = 75)
OPTION(kv_len_linear, place(row, false, 64, 60); row->kv_len = 21)
OPTION(kv_len_ring, place(row, true, 40, 100); row->kv_len = 17)
/* The first resident position is not 0, in a ring that never wrapped. */
OPTION(kv_len_partly_filled_ring, place(row, true, 64, 50); row->kv_len = 20)
OPTION(ring_at_the_last_position, place(row, true, 40, INT64_MAX))

/* ---- Contexts long enough to be cut into tasks ---- */

OPTION(long_context, int length = row->head_dim > 64 ? 2100 : 5000; place(row, false, length, length - 1);
       row->n_queries = row->head_dim > 256 ? 1 : 2; row->n_kv_heads = 1)
OPTION(long_wrapped, place(row, true, row->head_dim > 64 ? 2100 : 3500, 7001); row->n_queries = 2; row->n_kv_heads = 1;
       row->softcap = 3.0f; row->sinks = SINKS_SOME)
OPTION(long_window, long_context(row); row->window = 70) /* some tasks see nothing */
OPTION(long_in_slices, long_context(row); row->way = WAY_SLICES)
OPTION(long_in_parallel, long_wrapped(row); row->way = WAY_PARALLEL)
OPTION(many_rows, row->n_queries = 65; row->group = 16; row->n_kv_heads = 1; row->end = row->head_dim > 128 ? 20 : 70;
       row->key_capacity = row->value_capacity = 70)
OPTION(many_rows_in_parallel, many_rows(row); row->way = WAY_PARALLEL; row->window = 9)

/* ---- Windows, and queries before position 0 ---- */

OPTION(window_of_one, row->window = 1; row->n_queries = 4)
OPTION(window_small, row->window = 7; row->n_queries = 11)
OPTION(window_on_ring, place(row, true, 48, 75); row->window = 13)
OPTION(window_larger, row->window = 1000; row->n_queries = 5)
OPTION(window_and_kv_len, row->kv_len = 6; row->window = 4; row->n_queries = 20) /* the first queries see nothing */
/* The first queries stand at negative positions. */
OPTION(queries_before_start, place(row, false, 8, 5); row->n_queries = 12)
OPTION(queries_before_start_with_sinks, queries_before_start(row); row->sinks = SINKS_SOME)
OPTION(many_queries, row->n_queries = 65; row->group = 1; row->end = 80; row->key_capacity = row->value_capacity = 80)

/* ---- NaN in positions that only some queries see ---- */

OPTION(poison_newest, row->n_queries = 6; row->poison = POISON_NEWEST)
OPTION(poison_oldest, row->n_queries = 6; row->window = 10; row->poison = POISON_OLDEST)
OPTION(poison_newest_f16, poison_newest(row); row->key_format = row->value_format = TQKV_F16)
OPTION(poison_oldest_f16, poison_oldest(row); row->key_format = row->value_format = TQKV_F16)
OPTION(poison_newest_ring, place(row, true, 33, 90); poison_newest(row))
OPTION(poison_newest_slices, poison_newest(row); row->way = WAY_SLICES)

/* ---- Scores ---- */

OPTION(with_scale, row->scale = 0.03f)
OPTION(negative_scale, row->scale = -0.05f)
OPTION(large_scores, row->query_size = 12.0f)
OPTION(softcap, row->softcap = 2.0f; row->query_size = 4.0f)
OPTION(softcap_large, row->softcap = 50.0f)
OPTION(sinks, row->sinks = SINKS_SOME)
OPTION(sinks_dominating, row->sinks = SINKS_DOMINATING)
OPTION(sinks_minus_infinity, row->sinks = SINKS_MINUS_INFINITY)
OPTION(everything, place(row, true, 48, 120); row->window = 31; row->softcap = 4.0f; row->sinks = SINKS_SOME;
       row->n_queries = 9; row->group = 3)

/* ---- Bases and variants of the codec ---- */

OPTION(query_rotated, row->query_basis = TQKV_ROTATED)
OPTION(output_rotated, row->output_basis = TQKV_ROTATED)
OPTION(both_rotated, row->query_basis = row->output_basis = TQKV_ROTATED; row->n_queries = 2)
/* F16 is not rotated: the bases change nothing. */
OPTION(rotated_f16, both_rotated(row); row->key_format = row->value_format = TQKV_F16)
OPTION(hybrid, row->key_format = TQKV_F16; row->value_format = TQKV_TQ6_BYTES; row->values_unrotated = true)
OPTION(unrotated_keys, row->key_format = TQKV_TQ8; row->keys_unrotated = true;
       row->query_basis = row->output_basis = TQKV_ROTATED)
OPTION(block_scale, row->key_format = TQKV_TQ8; row->value_format = TQKV_TQ4; row->block_scale = 1.5f)

/* ---- Slices and threads ---- */

OPTION(slices, row->way = WAY_SLICES; row->n_queries = 3)
OPTION(slices_of_everything, everything(row); row->way = WAY_SLICES)
OPTION(slices_with_dominating_sinks, row->sinks = SINKS_DOMINATING; row->way = WAY_SLICES)
OPTION(slices_rotated, both_rotated(row); row->way = WAY_SLICES)
/* Fewer positions than slices, and queries that see nothing. */
OPTION(slices_of_few, queries_before_start(row); row->way = WAY_SLICES)
OPTION(parallel, row->way = WAY_PARALLEL; row->n_queries = 5; row->n_kv_heads = 3; row->end = 300;
       row->key_capacity = row->value_capacity = 310)
OPTION(parallel_everything, everything(row); row->way = WAY_PARALLEL)
OPTION(reversed, everything(row); row->way = WAY_REVERSED)

/* ---- Centres ---- */

OPTION(centers, row->key_center = row->value_center = 3.0f; row->n_queries = 2)
OPTION(centers_of_keys, row->key_center = 1000.0f; row->n_queries = 2)
OPTION(centers_of_values, row->value_center = 1000.0f; row->sinks = SINKS_DOMINATING)
OPTION(centers_with_sinks, centers(row); row->key_center = 0.5f; row->sinks = SINKS_SOME)
OPTION(centers_under_softcap, centers(row); row->softcap = 4.0f)
OPTION(centers_in_slices, row->key_center = row->value_center = 1000.0f; row->way = WAY_SLICES)
OPTION(centers_rotated, both_rotated(row); centers_with_sinks(row); row->way = WAY_SLICES)
OPTION(centers_rotated_softcap, both_rotated(row); centers_under_softcap(row))
OPTION(centers_of_f16, centers_with_sinks(row); row->key_format = row->value_format = TQKV_F16; row->way = WAY_SLICES)
OPTION(centers_of_everything, everything(row); row->key_center = row->value_center = 2.0f; row->way = WAY_PARALLEL)

/* ---- Trees ---- */

OPTION(tree, row->n_queries = 9; row->tree = true)
OPTION(tree_of_64, row->n_queries = 64; row->group = 1; row->tree = true; row->end = 100;
       row->key_capacity = row->value_capacity = 100)
OPTION(tree_on_ring, place(row, true, 48, 75); row->n_queries = 20; row->tree = true)
OPTION(tree_in_window, place(row, true, 48, 120); row->window = 6; row->n_queries = 30; row->tree = true)
OPTION(tree_before_start, queries_before_start(row); row->tree = true)
OPTION(tree_of_everything, everything(row); row->tree = true; row->way = WAY_PARALLEL)
OPTION(tree_in_slices, everything(row); row->tree = true; row->way = WAY_SLICES)
OPTION(tree_with_poison, tree(row); row->poison = POISON_BRANCH)
OPTION(tree_with_poison_f16, tree_with_poison(row); row->key_format = row->value_format = TQKV_F16)

/* ---- Queries that see what is behind them ---- */

OPTION(non_causal, row->n_queries = 6; row->non_causal = true)
OPTION(non_causal_window, non_causal(row); row->n_queries = 20; row->window = 5)
OPTION(non_causal_ring, place(row, true, 48, 120); non_causal_window(row))
OPTION(non_causal_far, place(row, true, 40, INT64_MAX); non_causal_window(row))
OPTION(non_causal_cross, place(row, false, 8, 5); row->n_queries = 12; row->non_causal = true)
OPTION(non_causal_everything, everything(row); row->non_causal = true; row->way = WAY_PARALLEL)
OPTION(non_causal_slices, everything(row); row->non_causal = true; row->way = WAY_SLICES)
OPTION(non_causal_long, long_context(row); row->non_causal = true; row->window = 2070)

/* ---- Positions as halves ---- */

OPTION(ends, row->exact_first = 3; row->exact_last = 9)
OPTION(ends_first, place(row, false, 130, 127); row->exact_first = 67)
OPTION(ends_last, place(row, true, 148, 275); row->exact_last = 70)
OPTION(ends_of_all, row->exact_first = 30; row->exact_last = 27; row->n_queries = 4)
OPTION(ends_only, row->exact_first = 64; row->exact_last = 64; row->n_queries = 4)
OPTION(ends_of_keys, place(row, false, 200, 190); row->exact_first = 9; row->exact_last = 65; row->codes_of_ends = 2)
OPTION(ends_of_values, place(row, false, 200, 190); row->exact_first = 90; row->exact_last = 128;
       row->codes_of_ends = 1)
OPTION(ends_long, long_context(row); row->exact_first = 4; row->exact_last = 128)
OPTION(ends_long_parallel, long_wrapped(row); row->exact_last = 65; row->way = WAY_PARALLEL)
OPTION(ends_in_slices, place(row, false, 300, 290); row->exact_first = 5; row->exact_last = 64; row->way = WAY_SLICES)
OPTION(ends_in_window, place(row, true, 48, 75); row->window = 13; row->exact_last = 7)
OPTION(ends_beyond_window, place(row, true, 48, 75); row->window = 13; row->exact_first = 4; row->exact_last = 30)
OPTION(ends_of_everything, everything(row); row->exact_first = 4; row->exact_last = 17; row->key_center = 2.0f;
       row->value_center = 2.0f)
OPTION(ends_many_rows, many_rows(row); row->exact_first = 2; row->exact_last = 11)
OPTION(ends_in_tree, tree(row); row->exact_last = 5)
OPTION(ends_rotated, both_rotated(row); centers_with_sinks(row); row->exact_first = 4; row->exact_last = 12;
       row->way = WAY_SLICES)
OPTION(ends_unrotated, row->key_format = TQKV_TQ6; row->keys_unrotated = true; row->exact_last = 10)
OPTION(ends_of_f16, row->key_format = TQKV_F16; row->exact_first = 4; row->exact_last = 10)
OPTION(ends_poison_newest, poison_newest(row); row->exact_last = 8)
OPTION(ends_poison_oldest, poison_oldest(row); row->exact_first = 40)
OPTION(ends_before_start, queries_before_start(row); row->exact_first = 3; row->exact_last = 3)
OPTION(ends_with_tail, place(row, true, 148, 275); row->tail_dim = 64; row->tail_format = TQKV_I8; row->exact_last = 70)
OPTION(ends_shared, row->shared = true; row->exact_first = 4; row->exact_last = 7)

/* ---- Scales of channels: to 2^10 between them ---- */

OPTION(scaled_keys, row->key_spread = 10.0f; row->n_queries = 3)
OPTION(scaled_values, row->value_spread = 10.0f; row->n_queries = 3)
OPTION(scaled, row->key_spread = row->value_spread = 10.0f; row->n_queries = 2)
OPTION(scaled_centers, scaled(row); row->key_center = 10.0f; row->value_center = 3.0f)
OPTION(scaled_centers_and_sinks, scaled_centers(row); row->sinks = SINKS_SOME)
OPTION(scaled_centers_softcap, scaled_centers(row); row->softcap = 5.0f)
OPTION(scaled_slices, scaled_centers_and_sinks(row); row->way = WAY_SLICES)
OPTION(scaled_slices_rotated, scaled_slices(row); row->query_basis = row->output_basis = TQKV_ROTATED)
OPTION(scaled_rotated_query, scaled_centers_and_sinks(row); row->query_basis = TQKV_ROTATED)
OPTION(scaled_rotated_output, scaled_centers_and_sinks(row); row->output_basis = TQKV_ROTATED)
OPTION(scaled_rotated_f16, scaled_slices_rotated(row); row->key_format = row->value_format = TQKV_F16)
OPTION(scaled_unrotated, row->key_format = TQKV_TQ6; row->value_format = TQKV_TQ8; scaled_centers(row);
       row->keys_unrotated = row->values_unrotated = true)
OPTION(scaled_unrotated_bases, scaled_unrotated(row); row->query_basis = row->output_basis = TQKV_ROTATED)
OPTION(scaled_block_scale, scaled_centers(row); row->block_scale = 1.625f)
OPTION(scaled_ring, place(row, true, 48, 75); scaled_centers(row); row->window = 31)
OPTION(scaled_tail, scaled_centers(row); row->tail_dim = 64; row->tail_format = TQKV_TQ6; row->tail_spread = 10.0f;
       row->tail_center = 3.0f; row->sinks = SINKS_SOME)
OPTION(scaled_shared, row->shared = true; row->key_spread = 6.0f; row->key_center = 2.0f; row->n_queries = 3)
OPTION(scaled_shared_tail, scaled_shared(row); row->tail_dim = 64; row->tail_format = TQKV_F16; row->tail_spread = 4.0f)
OPTION(scaled_ends, scaled_centers(row); row->exact_first = 4; row->exact_last = 9)
OPTION(scaled_ends_rotated, scaled_ends(row); row->query_basis = row->output_basis = TQKV_ROTATED)
OPTION(scaled_list, scaled_centers(row); row->list_block = 4; row->list_share = 0.5f; row->list_newest = 5)
OPTION(scaled_long, long_wrapped(row); scaled_centers(row); row->way = WAY_PARALLEL)
OPTION(scaled_poison, poison_newest(row); row->key_spread = row->value_spread = 8.0f)
