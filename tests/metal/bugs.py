#!/usr/bin/env python3
"""Plants known bugs in copies of the shipped shaders, one at a time, and checks that the tests catch each.

usage: bugs.py BUILD_FOLDER [--plant | part of a name]...    --plant: only sees that each bug still fits the sources

Takes the compilers and flags of each variant of the runner, and its prefix, from the environment: PLAIN, ASAN, TSAN
(compile a shader), PLAIN_LINK .. (link), TSAN_RUN (run), TYPE_CHECK, IMPLEMENTATION (the object with that of tqkv.h).
Only the edited kernel is compiled anew; the rest of the runner comes from BUILD_FOLDER/<variant>.
"""
import glob
import os
import re
import shutil
import sys

from planted import edit, reports, run_all, shell

# name: (file, text, replacement, kernel, head_dims kept, variant, cases to run, what the report must say)
BUGS = {
    # What the runner must see by itself.
    "missing_barrier": (
        "shaders/encode.metal", "        threadgroup_barrier(mem_flags::mem_threadgroup); \\\n", "", "encode", (128,),
        "tsan", "encode/tq4/d128", "data race"),
    "missing_barrier_by_lane_order": (
        "shaders/decode.metal", "        threadgroup_barrier(mem_flags::mem_threadgroup); \\\n", "", "decode", (64,),
        "plain", "encode/tq4/d64", "differs under schedule"),
    "codebook_without_barrier": (
        "shaders/decode.metal", "        threadgroup_barrier(mem_flags::mem_threadgroup); \\\n", "", "decode", (64,),
        "tsan", "encode/tq4/d64", "data race"),
    "barrier_without_memory": (
        "shaders/encode.metal", "threadgroup_barrier(mem_flags::mem_threadgroup)",
        "threadgroup_barrier(mem_flags::mem_none)", "encode", (128,), "tsan", "encode/tq4/d128", "data race"),
    "divergent_simd_operation": (
        "shaders/rotate.h", "simd_shuffle_xor(x[i], ushort(distance))",
        "lane < 16 ? simd_shuffle_xor(x[i], ushort(distance)) : 0.0f", "rotate", (64,), "plain", "rotate/d64",
        "divergent"),
    "divergent_barrier": (
        "shaders/encode.metal", "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "if (lane < 16) threadgroup_barrier(mem_flags::mem_threadgroup);", "encode", (128,), "plain",
        "encode/tq4/d128", "divergent"),
    "out_of_bounds_write": (
        "shaders/types.h", "row[at] = x[i];", "row[at + 1u] = x[i];", "decode", (64,),
        "asan", "encode/tq4/d64", "heap-buffer-overflow"),
    "out_of_bounds_threadgroup_write": (
        "shaders/codec.h", "*cell_at(cells, c) = cell;", "*cell_at(cells, c + 16u) = cell;", "encode", (128,), "asan",
        "encode/tq8/d128", "heap-buffer-overflow"),
    "uninitialised_threadgroup_memory": (
        "shaders/codec.h", "i = thread_index; i <= n;", "i = thread_index; i < n - 6u;", "encode", (128,), "plain", "encode/tq5/d128", "differs under schedule"),
    "ring_not_wrapped": (
        "shaders/tiles.h", "    slot = slot < capacity ? slot : slot - capacity;\n", "", "attend", (64,), "plain",
        "defect/windows_behind_the_end", "relative error"),
    "misaligned_load": (
        "shaders/codec.h", "n % 4 == 0 && alignment % 16u == 0", "n % 4 == 0", "attend", (32,), "asan",
        "attend/divided/d32", "misaligned address"),
    "race_between_threadgroups": (
        "shaders/columns.h", "row_offset(partial_of_section(args, task.split),", "row_offset(0u * partial_of_section(args, task.split),",
        "attend", (128,), "tsan", "attend/divided/d128", "data race"),
    "wrong_address_space": (
        "shaders/codec.h", "inline void load_codebook(uint format, threadgroup float *table,",
        "inline void load_codebook(uint format, device float *table,", "encode", (128,), "type", "",
        "no matching function for call to 'load_codebook'"),
    "write_to_constant": (
        "shaders/encode.metal", "load_cells(", "args.n_tokens = 1; load_cells(", "encode", (128,), "type", "",
        "const-qualified"),
    "rows_in_transit_without_barrier": (
        "shaders/encode.h", "    simdgroup_barrier(mem_flags::mem_threadgroup);\n", "", "encode", (96,), "plain",
        "encode/tq4/d96", "differs under schedule"),
    "matrix_sum_in_another_order": (
        "shaders/rotate.h", "for (int i = 1; i < M; i++)", "for (int i = M - 1; i > 0; i--)", "encode",
        (80,), "plain", "encode/tq8/d80", "differ"),
    "half_of_a_tie_rounded_up": (
        "shaders/types.h", "0x7fffu + ((word >> 16) & 1u)", "0x8000u", "decode", (64,), "plain", "encode/f16/d64",
        "decoded values differ"),
    "stale_table": (
        "src/base/tables.h", "-2.0690172f", "-2.0690173f", "tables", (), "plain", "tables", "stale: table codebook_4"),
    "norms_not_corrected": (
        "shaders/encode.h", "norms[b] = corrected_norm<D>(block_scale, squares[b], norms[b]);", "", "encode", (64,), "plain",
        "encode/tq4/d64", "norms differ"),
    "guess_too_low": (
        "shaders/codec.h", "bits == 3 ? 1.875f : 3.375f", "bits == 3 ? 1.875f : 3.0f", "encode", (64,), "plain",
        "encode/tq4/d64", "codes differ"),
    "neighbours_codes_swapped": (
        "shaders/encode.h", "words[j] = odd ?", "words[j] = !odd ?", "encode", (64,), "plain", "encode/tq4/d64",
        "codes differ"),
    "fifth_bits_of_other_values": (
        "shaders/codec.h", "odd ? 0x00208208u : 0x00410410u", "odd ? 0x00410410u : 0x00410410u", "attend", (64,), "plain",
        "attend/divided/d64", "relative error"),
    "first_factor_always": (
        "shaders/encode.h", "(!began || share > most)", "!began", "encode", (64,), "plain", "encode/tq5/d64",
        "codes differ"),
    "best_by_rough_sums": (
        "shaders/encode.h", "several ? possible : 0u", "0u", "encode", (64,), "plain",
        "ties/tq4/d64", "codes differ"),
    "crossings_towards_zero": (
        "shaders/codec.h", "(v > 0.0f ? 1.0f : 0.0f)", "(v > 0.0f ? 0.0f : 1.0f)", "encode", (64,), "plain",
        "encode/tq4/d64", "codes differ"),
    "norms_of_rough_codes": (
        "shaders/encode.h", "squares[b] = sum_of_squares", "squares[b] += sum_of_squares", "encode", (64,), "plain",
        "ties/tq4/d64", "norms differ"),
    "codes_left_strided": (
        "shaders/encode.h", "        place_values<D>(lane,", "        if (lane > 31u) place_values<D>(lane,", "encode", (128,), "plain",
        "encode/tq4/d128", "codes differ"),
    "sums_of_two_lanes": (
        "shaders/encode.h", "trade_last<D>(x, part);", "trade_last<D>(x, 0u * part);", "encode", (1024,), "plain", "encode/tq6/d1024", "differ"),
    "factors_without_signs": (
        "shaders/encode.h", "if (source.rotated) flip_signs<N>(channels", "if (false) flip_signs<N>(channels", "encode", (64,), "plain",
        "ties/tq4/d64", "codes differ"),
    "halves_of_the_last_query": (
        "shaders/common.h", "max(newest - args.exact_last + 1, args.exact_from)",
        "max(max(newest, args.first_newest + args.n_queries - 1) - args.exact_last + 1, args.exact_from)", "attend", (64, 128, 512), "plain",
        "attend/divided/d64 attend/divided/d512 attend/slices/d64", "relative error"),
    "scales_of_rows_not_of_pairs": (
        "shaders/learn_scales.metal", "if (args.pairs != 0)", "if (args.pairs == 1)", "learn_scales", (), "plain", "calibrate/",
        "scales differ"),
    "center_not_subtracted": (
        "shaders/encode.h", "x[i] - channels.center[i];", "x[i] - 0.0f * channels.center[i];", "encode", (64,), "plain",
        "encode/tq2/d64", "codes differ"),
    "center_of_a_cleared_row": (
        "shaders/encode.h", "x[i] = cleared ? x[i] : x[i] - channels", "x[i] = x[i] - channels", "encode", (64,), "plain",
        "encode/tq4/d64 encode/tq2/d64 encode/i8/d64 encode/tq6/d64", "codes differ"),
    "center_without_sinks": (
        "shaders/merge.h", "n_sections > 0u) row.maximum += ", "n_sections > 0u) row.maximum += 0.0f * ",
        "attend_merge", (64, 128), "plain", "attend/divided/d64", "relative error"),
    "center_of_values_beside_sinks": (
        "shaders/merge.h", "return sum == 0.0f ? 0.0f : both.kept * row.sum / sum", "return 1.0f", "attend_merge", (64, 128), "plain",
        "attend/divided/d64", "relative error"),
    "center_under_softcap": (
        "shaders/attend.h", "has_shifts() ? fma(dot, factor, shift) : dot * factor", "dot * factor + 0.0f * shift", "attend",
        (64, 128), "plain", "attend/divided/d64", "relative error"),
    # Defects of earlier systems.
    "norms_of_both_blocks": (
        "shaders/encode.h", "block_length<D>(sum_of_squares<D>(b, x))",
        "block_length<D>(sum_of_squares<D>(0, x) + sum_of_squares<D>(B - 1, x))", "encode", (512, 1024), "plain",
        "encode/tq5/d512", "differ"),
    "no_barrier_before_values": (
        "shaders/attend.h",
        "        simdgroup_barrier(mem_flags::mem_threadgroup);\n        add_any_values", "        add_any_values", "attend",
        (64,),
        "tsan", "defect/barrier_before_next_tile", "data race"),
    "no_barrier_before_next_tile": (
        "shaders/attend.h", "        simdgroup_barrier(mem_flags::mem_threadgroup); // before", "        // before",
        "attend", (64,), "tsan", "defect/barrier_before_next_tile", "data race"),
    "merge_without_barrier": (
        "shaders/merge.h", "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    for", "    for", "attend_merge",
        (32,), "tsan", "attend/sections/share2", "data race"),
    "merge_without_second_barrier": (
        "shaders/merge.h", "    threadgroup_barrier(mem_flags::mem_threadgroup); // before the next", "    // before the next",
        "attend_merge", (32,), "plain", "attend/sections/share2", "relative error"),
    "weights_over_sums": (
        "shaders/attend.h", "    threadgroup_barrier(mem_flags::mem_threadgroup); // before the next sums", "    // before the next sums",
        "attend", (128,), "tsan",
        "attend/shape/group4_queries9", "data race"),
    "maxima_raised_together": (
        "shaders/attend.h",
        "raised_maximum(state.maximum[c], rint(simd_max(score[c])));",
        "max(simd_max(score[c]), state.maximum[c]);", "attend", (32, 64, 128), "plain", "attend/company/d64 attend/company/d32",
        "strands have other bits"),
    "tiles_counted_from_the_first_seen": (
        "shaders/tiles.h", "return tile + (simdgroup + n_simdgroups - tile % n_simdgroups) % n_simdgroups;",
        "return tile + simdgroup % n_simdgroups;", "attend", (32, 64, 128), "plain", "attend/company/d64 attend/company/d32", "other bits alone"),
    "section_forgotten": (
        "shaders/tiles.h", "stretch / TQKV__SECTION == own.begin / TQKV__SECTION", "stretch >= own.begin", "attend", (32,),
        "plain", "attend/sections", "relative error"),
    "section_of_another": (
        "shaders/tiles.h", "return args.sections_each > 1 ? 1u : split;",
        "return split + 0u * uint(args.sections_each);", "attend", (32,), "plain", "attend/sections", "relative error"),
    "state_overwritten": (
        "shaders/attend.h", "task.states + task.simdgroup * uint(2 * C);", "task.states + 0u * task.simdgroup * uint(2 * C);",
        "attend", (64,), "tsan", "defect/state_of_four_simdgroups", "data race"),
    "states_added_before_they_are_stored": (
        "shaders/attend.h", "        threadgroup_barrier(mem_flags::mem_threadgroup);\n        if (task.simdgroup == 0",
        "        if (task.simdgroup == 0", "attend", (64,), "tsan", "defect/state_of_four_simdgroups", "data race"),
    "factors_used_before_they_are_stored": (
        "shaders/attend.h", "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    for (uint at = thread_index",
        "    for (uint at = thread_index", "attend", (128,), "tsan",
        "attend/shape/group4_queries9", "data race"),
    "lanes_not_added": (
        "shaders/attend.h", "(upper ? high : low) + simd_shuffle_xor(", "(upper ? high : low) + 0.0f * simd_shuffle_xor(", "attend", (64,),
        "plain", "attend/divided/d64", "relative error"),
    "softcap_not_applied": (
        "shaders/attend.h", "if (!softcap) return", "return", "attend", (64,), "plain", "attend/divided/d64",
        "relative error"),
    "only_the_first_query": (
        "shaders/tiles.h", "many_queries ? int(row / uint(args.group)) : 0", "0", "attend", (64,), "plain",
        "attend/divided/d64", "relative error"),
    "ring_without_wrap": (
        "shaders/tiles.h", "return position < 0 ? position + args.key_capacity : position;", "return position;",
        "attend",
        (64,), "plain", "attend/divided/d64", "relative error"),
    "finite_mask": (
        "shaders/attend.h", "state.shift[c]) : -INFINITY", "state.shift[c]) : -9.0f", "attend", (64,),
        "plain", "attend/divided/d64", "relative error"),
    "weight_zero_times_nan": (
        "shaders/attend_values.h", "if ((W == 16 || !one_norm<D>(value_format)) && weight[c] == 0.0f) continue;", "",
        "attend", (256,), "plain", "attend/poison", "relative error"),
    "offset_of_32_bits": (
        "shaders/tiles.h", "(value_slot(args, pages, base, row)) * ulong(bytes);\n    return codes + ulong(base) * ulong(bytes)",
        "(value_slot(args, pages, base, row)) * ulong(bytes);\n    return codes + base * bytes", "attend", (1024,), "plain", "defect/offsets_beyond_4_gib",
        "relative error"),
    # Products of matrices.
    "wrong_element_layout": (
        "src/gpu/sizes.h", "(((lane) >> 4 << 2) | ((lane) >> 1 & 3))", "((lane) >> 2)", "attend_matrix", (64,), "plain",
        "attend/divided/d64", "by matrices"),
    "wrong_element_layout_reported": (
        "src/gpu/sizes.h", "(((lane) >> 4 << 2) | ((lane) >> 1 & 3))", "((lane) >> 2)", "tables", (), "plain",
        "machine/matrix_places", "the check says they do not"),
    "sums_added_before_they_are_stored": (
        "shaders/matrix_columns.h", "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    for (uint at = thread_index",
        "    for (uint at = thread_index", "attend_matrix", (64,), "plain", "attend/divided/d64", "FAIL attend/divided/d64"),
    "sums_overwritten_by_the_next_pass": (
        "shaders/matrix_columns.h", "how, own);\n    }\n    threadgroup_barrier(mem_flags::mem_threadgroup);\n", "how, own);\n    }\n",
        "attend_matrix", (64,), "plain", "attend/divided/d64", "by matrices"),
    "totals_without_barrier": (
        "shaders/matrix_columns.h", "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    if (task.simdgroup == 0 && task.lane",
        "    if (task.simdgroup == 0 && task.lane", "attend_matrix", (64,), "tsan", "attend/divided/d64", "data race"),
    "queries_arranged_without_barrier": (
        "shaders/attend_matrix.h", "        threadgroup_barrier(mem_flags::mem_threadgroup);\n        arrange_queries",
        "        arrange_queries", "attend_matrix", (64,), "tsan", "attend/divided/d64", "data race"),
    "mask_of_matrices_off_by_one": (
        "shaders/attend_matrix.h", "position <= newest &&", "position < newest &&", "attend_matrix", (64,), "plain",
        "attend/divided/d64", "by matrices"),
    "whole_tile_off_by_one": (
        "shaders/attend_matrix.h", "last <= min(newest.least, args.slice_end - 1) &&",
        "last <= min(newest.least, args.slice_end - 1) + 2 &&", "attend_matrix", (64,), "plain", "attend/divided/d64 attend/slices/d64 attend/strides/d64 attend/lists/d64", "relative error"),
    "sums_of_the_first_simdgroup": (
        "shaders/columns.h", "task.states[(s * memory.n + own.column) * 2u];", "task.states[own.column * 2u];", "attend_matrix",
        (64,), "plain", "attend/divided/d64", "by matrices"),
    "queries_of_a_pass_overwritten": (
        "shaders/attend_matrix.h", "if (first != 0) threadgroup_barrier(mem_flags::mem_threadgroup);", "", "attend_matrix", (128,), "tsan",
        "attend/shape/group2_queries45", "data race"),
    "rows_of_the_first_query": (
        "shaders/attend_matrix.h", "memory.rows[c] = partial_row(args, row, head);", "memory.rows[c] = head;", "attend_matrix",
        (128,), "plain", "attend/shape/group2_queries40", "by matrices"),
    "unscaled_merge_of_matrices": (
        "shaders/columns.h", "float share = share_of(states.maxima[i], largest);",
        "float share = 1.0f;", "attend_matrix", (64,), "plain", "attend/divided/d64", "by matrices"),
    "masked_norm_kept": (
        "shaders/attend_matrix.h", "norms.values[p] = finite ? norms.values[p] : 0.0f;", "norms.values[p] += 0.0f;", "attend_matrix",
        (64, 128, 256), "plain", "attend/divided/d64", "by matrices"),
    "halves_not_cleared": (
        "shaders/attend_matrix.h", "clear_not_finite<W, N>(values[h].raw);", "values[h].raw[0].main[0] += 0u;", "attend_matrix", (256,), "plain",
        "attend/poison", "by matrices"),
    "queries_of_matrices_as_halves": (
        "shaders/attend.h", "load_typed_row<D>(row_type,", "load_typed_row<D>(uint(TQKV_TYPE_F16),", "attend_matrix", (64,),
        "plain", "attend/strides/d64", "relative error"),
    "matrix_maxima_raised_together": (
        "shaders/attend_matrix.h",
        "rint(max_of_column(largest));\n            before[f][i] = state.maximum[f][i];\n"
        "            began = began || before[f][i] != NOTHING_SEEN;\n"
        "            state.maximum[f][i] = largest > before[f][i] + 11.0f ? largest : before[f][i];",
        "max_of_column(largest);\n            before[f][i] = state.maximum[f][i];\n"
        "            began = began || before[f][i] != NOTHING_SEEN;\n"
        "            state.maximum[f][i] = max(largest, before[f][i]);",
        "attend_matrix", (64,), "plain", "attend/bits_of_slices/1", "other bits than the whole"),
    # Keys of two parts.
    "tail_ignored": (
        "shaders/attend.h", "score[c] = fma(own, scale, score[c] * key_scale);", "score[c] = fma(0.0f * own, scale, score[c] * key_scale);",
        "attend", (512,), "plain", "attend/divided/d512", "relative error"),
    "tail_of_another_row": (
        "shaders/attend.h", "same ? tail[c] : simd_shuffle(", "same || row < 32u ? tail[c] : simd_shuffle(",
        "attend", (512,), "plain", "attend/divided/d512", "relative error"),
    "tail_without_center": (
        "shaders/attend.h", "keys.first == 0 ? shift : memory.shifts[column] + shift;", "keys.first == 0 ? shift : memory.shifts[column];",
        "attend", (512,), "plain", "attend/divided/d512", "relative error"),
    "tail_ignored_by_matrices": (
        "shaders/attend_long.h", "float factor = memory.tails[c];", "float factor = 0.0f * memory.tails[c];", "attend_matrix",
        (512,), "plain", "attend/divided/d512", "relative error"),
    "sizes_of_the_parts_mixed_up": (
        "shaders/attend_matrix.h", "memory.tails[c] = size / memory.factors[c];", "memory.tails[c] = 1.0f;", "attend_matrix",
        (512,), "plain", "attend/divided/d512", "relative error"),
    "weights_read_before_they_are_stored": (
        "shaders/attend_long.h", "    store_tile_weights<F>(task, task.weights, score);\n        threadgroup_barrier(mem_flags::mem_threadgroup);\n",
        "    store_tile_weights<F>(task, task.weights, score);\n", "attend_matrix", (512,), "tsan", "attend/divided/d512", "data race"),
    "weights_of_the_round_before_overwritten": (
        "shaders/attend_long.h", "        threadgroup_barrier(mem_flags::mem_threadgroup); // and weights and slots of the round before are used\n", "",
        "attend_matrix", (512,), "tsan", "attend/rounds", "data race"),
    "maxima_of_the_own_tile": (
        "shaders/attend_long.h", "largest = max(largest, maxima[s * 8 * F]);", "largest = max(largest, maxima[task.simdgroup * uint(8 * F)]);",
        "attend_matrix", (512,), "plain", "attend/rounds", "relative error"),
    "norms_of_the_first_block": (
        "shaders/attend_long.h", "return simdgroup * uint(TQKV__LONG_VALUES) / norm_block<D>(value_format);", "return 0u * simdgroup;", "attend_matrix", (512,), "plain",
        "attend/divided/d512", "relative error"),
    "tile_of_another_stretch": (
        "shaders/attend_long.h", "return tile >= rounds.begin && tile < rounds.end &&", "return tile >= rounds.begin &&", "attend_matrix",
        (512,), "plain", "attend/rounds", "relative error"),
    "one_stream_without_center_of_values": (
        "shaders/merge.h", "    if (task.centered)\n", "    if (task.centered && D != 512)\n", "attend_merge", (512,), "plain",
        "attend/divided/d512", "relative error"),
    "tail_of_the_first_item": (
        "shaders/attend_task.h", "    task.tail.codes += row_offset(item.tail_codes, TQKV__CODES_UNIT);\n", "", "attend", (512,), "plain",
        "batch/d512", "other bits alone"),
    "wrong_last_tile": (
        "shaders/tiles.h", "first + row >= number * 32u &&", "", "attend", (64,), "plain", "attend/divided/d64",
        "relative error"),
    # Strides, and queries that look ahead.
    "gaps_of_a_source_ignored": (
        "shaders/common.h", "row_offset(token, args.token_stride) + row_offset(head, args.head_stride)",
        "row_offset(token * uint(args.n_kv_heads) + head, args.head_stride)", "encode", (64,), "plain", "encode/f16/d64", "codes differ"),
    "query_strides_ignored": (
        "shaders/attend.h", "row_offset(query, args.query_token_stride) + row_offset(head, args.query_head_stride)",
        "row_offset(query * uint(args.n_kv_heads) * uint(args.group) + head, uint(D))", "attend", (64,), "plain",
        "attend/strides/d64", " to "),
    "output_strides_ignored": (
        "shaders/merge.h", "return row_offset(row / n_heads, args.out_token_stride) + row_offset(row % n_heads, args.out_head_stride);",
        "return row_offset(row, args.out_token_stride < args.out_head_stride ? args.out_token_stride : args.out_head_stride) + 0u * n_heads;",
        "attend_merge", (64,), "plain", "attend/strides/d64", " to "),
    "causal_all_the_same": (
        "shaders/tiles.h", "return args.first_newest + query;", "return min(args.first_newest, args.kv_len - args.n_queries) + query;",
        "attend", (64,), "plain", "attend/divided/d64", "relative error"),
    # Slices.
    "seen_beyond_a_slice": (
        "shaders/tiles.h", " && position < args.slice_end", "", "attend", (64,), "plain", "attend/slices/d64", "a slot beyond was read"),
    "whole_tile_beyond_a_slice": (
        "shaders/attend_matrix.h", "last <= min(newest.least, args.slice_end - 1) &&", "last <= newest.least &&",
        "attend_matrix", (64,), "plain", "attend/slices/d64",
        "slices: query 0"),
    "maximum_left_as_it_was_rounded": (
        "shaders/softmax.h", "? whole : maximum", "? maximum : maximum", "attend_merge", (64,), "plain", "attend/bits_of_slices/0",
        "other bits than the whole"),
    "maximum_not_whole": (
        "shaders/attend.h", "rint(simd_max(score[c]))", "simd_max(score[c])", "attend", (64,), "plain", "attend/company/d64",
        "strands have other bits"),
    "maximum_of_matrices_not_whole": (
        "shaders/attend_matrix.h", "rint(max_of_column(largest));\n            before", "max_of_column(largest);\n            before", "attend_matrix", (64,), "plain",
        "attend/bits_of_slices/1", "other bits than the whole"),
    "slice_in_another_basis": (
        "shaders/merge.h", "if (task.rotate && row.sum != 0.0f) rotate_row<D>(row.x, part);", "", "attend_merge", (64,),
        "plain", "attend/slices/d64", "relative error"),
    "slice_overwritten_while_read": (
        "shaders/merge.h", "    simdgroup_barrier(mem_flags::mem_device); //", "    //", "attend_merge", (48,), "tsan",
        "attend/slices/d48", "data race"),
    "ends_in_the_place_of_others": (
        "shaders/merge.h", "if (!last && args.n_last > 0) range.part++;", "", "attend_merge", (32, 64), "plain", "attend/slices/d64 attend/slices/d32",
        "relative error"),
    # Page tables and trees.
    "values_through_the_table_of_keys": (
        "shaders/tiles.h", "slot_in_pages(pages.values,", "slot_in_pages(pages.keys,", "attend", (64,), "plain",
        "attend/pages/d64", "not the bits of a linear store"),
    "small_pages_by_tiles": (
        "shaders/tiles.h", "    if (small_pages && !has_list) slot += existing_row(args, pages.lane);\n", "",
        "attend", (64,), "plain", "attend/pages/d64", "not the bits of a linear store"),
    "one_memory_for_slots_of_two_tiles": (
        "shaders/tiles.h", "first = (pages.simdgroup * 2u + parity) *", "first = (pages.simdgroup * 2u + 0u * parity) *", "attend", (64,), "plain",
        "attend/pages/d64", "not the bits of a linear store"),
    "slots_read_before_they_are_stored": (
        "shaders/tiles.h", "    simdgroup_barrier(mem_flags::mem_threadgroup);\n    return result;", "    return result;",
        "attend", (64,), "tsan", "attend/pages/d64", "ThreadSanitizer"),
    "strand_with_the_first_maximum": (
        "shaders/strand.h", "maximum = i < n ? raised : maximum;", "maximum = i < 1u + 0u * n ? raised : maximum;", "attend", (32,), "plain", "attend/strands/0",
        "other bits alone"),
    "strand_of_the_wrong_rows": (
        "shaders/strand.h", "tiles.first + i * uint(TQKV__STRANDS)", "tiles.first + i", "attend_matrix", (64,), "plain",
        "attend/strands/1", "other bits alone"),
    "strand_weights_without_barrier": (
        "shaders/attend_strand.h",
        "    weigh_strand_tile(task, at.row, value_scale, score, seen, state);\n    threadgroup_barrier(mem_flags::mem_threadgroup);\n",
        "    weigh_strand_tile(task, at.row, value_scale, score, seen, state);\n", "attend", (32,), "tsan",
        "attend/strands/0", "data race"),
    "first_positions_before_strands": (
        "shaders/merge.h", "if (args.strands == 1 || args.n_first == 0) return turn;", "if (args.strands >= 1) return turn;",
        "attend_merge", (32,), "plain", "attend/strands/2", "other bits alone"),
    "slots_of_the_first_tile_of_a_round": (
        "shaders/attend_long.h", "shared_slots(min(number, uint(TQKV__LONG_SIMDGROUPS) - 1u), parity);",
        "shared_slots(0u * number, parity);", "attend_matrix", (512,), "plain", "attend/lists/d512",
        "by matrices"),
    "next_page_not_checked": (
        "shaders/tiles.h", "min(uint(pages[at]), uint(last_page))", "uint(pages[at]) + 0u * uint(last_page)",
        "attend_matrix", (64,), "asan", "attend/pages/d64", "AddressSanitizer"),
    "bad_page_written": (
        "shaders/common.h", "page < uint(args.n_pages) ?", "page != 0u - 1u ?", "encode", (64,), "plain", "encode/bad_entries",
        "a bad entry was followed"),
    "left_out_token_stored": (
        "shaders/encode.h", "(!target.paged || slot < uint(args.capacity))", "true", "encode", (64,), "asan",
        "encode/bad_entries", "AddressSanitizer"),
    "item_before": (
        "shaders/common.h", "    return low;\n", "    return low > 0u ? low - 1u : low;\n", "attend_merge", (64,), "plain",
        "batch/d64", "other bits alone"),
    "sums_of_the_first_item": (
        "shaders/attend_task.h", "    task.partial_out += item.partial_out;\n", "", "attend", (64,), "plain", "batch/d64",
        "other bits alone"),
    "list_of_another_item": (
        "shaders/attend_task.h", "(device const int *)scratch + item.list_rows;", "(device const int *)scratch;",
        "attend", (64,), "plain", "batch/d64", "other bits alone"),
    "entries_of_the_first_item": (
        "shaders/attend_list.metal", "        list += items[item].list;\n", "", "attend_list", (), "plain", "batch/",
        "other bits alone"),
    # The index.
    "tie_to_the_higher_block": (
        "shaders/index_choice.h", "(is_equal && equal < made.wanted)", "(is_equal && equal >= (sums.all >> 16) - made.wanted)",
        "index_choice", (), "plain", "index/choose/100_of_700", "entry"),
    "digits_counted_without_barrier": (
        "shaders/index_choice.h", "bins[i] = 0u;\n    threadgroup_barrier(mem_flags::mem_threadgroup);", "bins[i] = 0u;",
        "index_choice", (), "tsan", "index/choose/40_of_300", "data race"),
    "entry_followed_out_of_the_store": (
        "shaders/attend_list.metal", " && block <= range.last && block < range.recent;", ";", "attend_list", (), "asan",
        "attend/lists/d64", "AddressSanitizer"),
    "entry_followed_out_of_the_slice": (
        "shaders/attend_list.metal", "block <= range.last && ", "", "attend_list", (), "plain", "attend/slices",
        "relative error"),
    "block_seen_twice": (
        "shaders/attend_list.metal", "order > max(largest, before.before)", "order >= max(largest, before.before)", "attend_list",
        (), "plain", "attend/lists/d64", "bad entries change bits"),
    "entries_behind_the_first_minus_one": (
        "shaders/attend_list.metal", "entry == -1 ? 0x80000000u :", "", "attend_list", (), "plain", "attend/divided/d64 attend/lists/d64",
        "bad entries change bits"),
    "newest_without_its_first_block": (
        "shaders/attend_list.metal", "row[3] = has_recent ? 0 : range.newest;", "row[3] = range.newest;", "attend_list", (),
        "plain", "attend/divided/d64 attend/lists/d64", "relative error"),
    "rows_of_a_list_by_the_first_head": (
        "shaders/tiles.h", "head = heads > 1u ? kv_head : 0u;", "head = 0u * kv_head;", "attend", (64,), "plain", "attend/divided/d64 attend/lists/d64",
        "relative error"),
    "weights_of_the_first_heads": (
        "shaders/index_scores.h", "index.weights[head + c]", "index.weights[c]", "index_scores", (64,), "plain",
        "index/scores/d64", "block"),
    "queries_of_the_next_pass_too_early": (
        "shaders/index_scores.h", "        threadgroup_barrier(mem_flags::mem_threadgroup); // before the queries",
        "        // before the queries", "index_scores", (64,), "tsan", "index/scores/d64", "data race"),
    "gathered_behind_its_own_chunk": (
        "shaders/index_choice.h", "task.at.n_simdgroups < task.chunk ?", "task.at.n_simdgroups <= task.chunk ?",
        "index_choice", (), "plain", "index/choose/700_of_17000", "entry"),
    "zeros_of_two_signs_differ": (
        "shaders/index_choice.h", "if (bits == 0x80000000u) bits = 0u;", "", "index_choice", (), "plain",
        "index/choose/90_of_200", "entry"),
    "tail_in_the_slots_of_the_keys": (
        "shaders/tiles.h", "if (!tail_elsewhere) return result;", "return result;", "attend", (512,), "plain",
        "attend/rounds/share4", "relative error"),
    "tree_by_lanes": (
        "shaders/tiles.h", "tree[query * 2u + bit / 32u]", "tree[query * 2u]", "attend", (64,), "plain", "attend/tree",
        "relative error"),
    "tree_ignored_by_matrices": (
        "shaders/attend_matrix.h", "if (has_tree && last >= args.first_of_tree) return false;", "", "attend_matrix", (64,),
        "plain", "attend/tree", "by matrices"),
}


def plant(bug, folder):
    """Copies shaders and header, applies the edit, and keeps the head_dims that the cases need."""
    file, text, replacement, kernel, head_dims = BUGS[bug][:5]
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("shaders", "src"):
        shutil.copytree(part, f"{folder}/{part}")
    wrong = edit(f"{folder}/{file}", text, replacement)
    path = f"{folder}/shaders/{kernel}.metal"
    with open(path, encoding="utf-8") as f:
        source = f.read()
    with open(path, "w", encoding="utf-8") as f:
        f.write(re.sub(r"(?m)^[A-Z_]+\((\d+)(?:, \d+, \d+)?\)$",
                       lambda m: m.group(0) if int(m.group(1)) in head_dims else "", source))
    return wrong


def run_bug(bug, build):
    """Empty string if the bug is caught, else what happened instead."""
    kernel, head_dims, variant, cases, expected = BUGS[bug][3:]
    folder = f"{build}/bugs/{bug}"
    wrong = plant(bug, folder)
    if wrong:
        return wrong
    mode = "clang" if variant == "type" else "cpu"
    status, output = shell(f"python3 tests/metal/prep.py {mode} {folder}/source {folder}/shaders/*")
    if status:
        return output
    source = f"-I{folder}/shaders {folder}/source/{kernel}.metal.cpp"
    if variant == "type":
        status, output = shell(f"{os.environ['TYPE_CHECK']} {source}")
    else:
        others = [o for o in glob.glob(f"{build}/{variant}/*.o") if os.path.basename(o) != f"{kernel}.metal.o"]
        compiler, link, run = (os.environ.get(variant.upper() + part, "") for part in ("", "_LINK", "_RUN"))
        objects = " ".join([f"{folder}/kernel.o", *others, os.environ["IMPLEMENTATION"]])
        status, output = shell(f"{compiler} {source} -c -o {folder}/kernel.o && {link} {objects} -o {folder}/driver -lm")
        if status:
            return output
        one = "" if variant == "plain" else "--one-schedule"
        reported, status, output = reports(f"{run} {folder}/driver {one} {cases}", re.escape(expected))
        if "no such kernel" in output:
            return f"{cases} need more kernels than {kernel} of {head_dims}"
        if reported:
            return ""
    if status == 0:
        return "nothing was reported"
    return "" if expected in output else f"'{expected}' was not reported, but:\n{output[:2000]}"


if __name__ == "__main__":
    sys.exit(run_all(BUGS, plant, run_bug, lambda bug: f"{BUGS[bug][7]} ({BUGS[bug][5]})"))
