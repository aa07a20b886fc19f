#!/usr/bin/env python3
"""Plants bugs in copies of tqkv_metal.m, one at a time, and checks that its tests catch each.

usage: bugs.py BUILD_FOLDER [part of a name]...

Takes from the environment, for each kind of build (ASAN, ARC, TSAN): the command that compiles (ASAN), the objects of
the runner without tqkv_metal.o (ASAN_OBJECTS), what links them (ASAN_LINK), and what runs the tests (ASAN_RUN).
"""
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from planted import reports, run_all, shell  # noqa: E402

LOCK = r"    pthread_mutex_(un)?lock\(&m->lock\);\n"

# name: (function, regular expression in its body, replacement, kind, cases to run, expression for what is reported)
BUGS = {
    "insert_without_lock": ("tqkv__keep", LOCK, "    (void)m;\n", "TSAN", "context/threads", "data race"),
    "look_up_without_lock": ("tqkv__get_kept", LOCK, "", "TSAN", "context/threads", "data race"),
    "error_without_lock": ("tqkv__fail", LOCK, "", "TSAN", "context/threads", "data race"),
    "lend_without_lock": ("tqkv__lend", LOCK, "", "TSAN", "context/threads", "data race"),
    "free_without_lock": ("tqkv__memory_free", LOCK, "", "TSAN", "context/threads", "data race"),
    "find_without_lock": ("tqkv_metal_find", LOCK, "", "TSAN", "context/threads", "data race"),
    "function_leaked": (
        "tqkv__build_from", r"    TQKV__RELEASE\(function\);\n", "", "ASAN", "rotate/d64", "leaked"),
    "values_leaked": ("tqkv__build_from", r"    TQKV__RELEASE\(values\);\n", "", "ASAN", "rotate/d64", "leaked"),
    "state_leaked_on_failure": (
        "tqkv__build_from", r"    TQKV__RELEASE\(state\);\n", "    state = nil;\n", "ASAN", "context/devices",
        "leaked"),
    "state_kept_under_arc": (
        "tqkv__free_kept", r"    TQKV__RELEASE\(k->object\);\n", "", "ARC", "rotate/d64", "leaked"),
    "block_kept_under_arc": (
        "tqkv__memory_free", r"    TQKV__RELEASE\(block->buffer\);\n", "", "ARC", "cache/one_memory", "leaked"),
    "pipeline_leaked_on_failure": (
        "tqkv__get_kept", r"    else\n        tqkv__free_kept\(made\);\n", "", "ASAN", "context/failures",
        "LeakSanitizer"),
    "library_not_retained": (
        "tqkv__load_library", r"TQKV__RETAIN\(library\)", "library", "ASAN", "context/libraries", "AddressSanitizer"),
    "block_leaked_on_failure": (
        "tqkv__lend", r"        TQKV__RELEASE\(block->buffer\);\n        free\(block\);\n", "", "ASAN",
        "context/failures", "LeakSanitizer"),
    "block_not_given_back": (
        "tqkv__attend_cache", r"    tqkv__give_back\(m, block\);\n", "", "ASAN", "context/given_back",
        "FAIL context/given_back"),
    "staging_shared_by_threads": (
        "tqkv__take_staging", r"    m->staging = NULL;\n", "", "TSAN", "context/threads/caches", "ThreadSanitizer"),
    "staging_too_small": (
        "tqkv__take_staging", r"block->size < size", "false", "ASAN", "cache/", "AddressSanitizer|FAIL cache"),
    "state_of_encoders_not_asked": (
        "tqkv__new_commands", r"    \[descriptor setErrorOptions.*\n", "", "ASAN", "context/failures",
        "FAIL context/failures"),
    "pipelines_without_descriptor": (
        "tqkv__new_state", r"    \[descriptor setMaxTotal.*\n", "    (void)kernel;\n", "ASAN", "context/threads_of_pipelines",
        "FAIL context/threads_of_pipelines"),
    "pipeline_descriptor_leaked": (
        "tqkv__new_state", r"    TQKV__RELEASE\(descriptor\);\n", "", "ASAN", "rotate/d64", "leaked"),
    "descriptor_leaked": (
        "tqkv__new_commands", r"    TQKV__RELEASE\(descriptor\);\n", "", "ASAN", "rotate/d64", "leaked"),
    "self_test_without_codes": (
        "tqkv__try_store", r"tqkv__trial_bytes\(t, names\[0\], gpu->codes.*?\)", "TQKV_OK", "ASAN", "context/self_test_fails",
        "FAIL context/self_test_fails"),
    "self_test_without_decoding": (
        "tqkv__try_store", r"tqkv__trial_bytes\(t, names\[1\].*?\)", "TQKV_OK", "ASAN",
        "context/self_test_fails", "FAIL context/self_test_fails"),
    "self_test_of_nothing": (
        "tqkv__trial_values", r"wrong <= limit", "wrong <= 1e9 || wrong <= limit", "ASAN", "context/self_test_fails",
        "FAIL context/self_test_fails"),
    "self_test_without_choice": (
        "tqkv__check_trial_index", r"tqkv__trial_bytes\(t, \"chosen.*?\)", "TQKV_OK", "ASAN", "context/self_test_fails",
        "FAIL context/self_test_fails"),
    "self_test_without_raw_rows": (
        "tqkv__try_raw", r"tqkv__try_attention\(t, TQKV__TRIAL_QUERIES\)", "TQKV_OK", "ASAN", "context/self_test_fails",
        "FAIL context/self_test_fails"),
    "self_test_without_scales": (
        "tqkv__trial_store", r"return r == TQKV_OK && s->channel_scale .*;", "return r;", "ASAN", "context/self_test",
        "FAIL context/self_test"),
    "source_compiled_whole": (
        "tqkv__compile", r"    \[options setPreprocessorMacros.*\n", "    (void)only;\n", "ASAN", "context/source/alone",
        "misuse"),
    "compiled_library_leaked": (
        "tqkv__free_kept", r"    TQKV__RELEASE\(k->object\);\n", "", "ASAN", "context/source/alone", "leaked"),
    "compiled_without_lock": ("tqkv__keep", LOCK, "    (void)m;\n", "TSAN", "context/threads/source", "data race"),
    "matrices_not_given_up": (
        "tqkv__lost_matrices", r"    m->matrices = false;\n", "", "ASAN", "context/without_matrices",
        "FAIL context/without_matrices"),
    "matrices_given_up_in_silence": (
        "tqkv__lost_matrices", r"    tqkv__fail\(m, TQKV_OK.*\n", "", "ASAN", "context/without_matrices",
        "FAIL context/without_matrices"),
    "size_unchecked": (
        "tqkv__check_binding", r"b->at\.offset > length \|\| b->size > length - b->at\.offset", "false", "ASAN",
        "encode/", "is no error, not an argument is invalid|misuse: offset"),
    "offset_unchecked": (
        "tqkv__check_binding", r"b->at\.offset % b->alignment", "false", "ASAN", "encode/",
        "is no error, not an argument is invalid|from 257 on of a buffer"),
    "matrices_in_another_order": (
        "tqkv__try_pipelines", r"tqkv__has_matrices\(m\)", "m", "ASAN", "attend/matrices",
        "FAIL attend/matrices/in_another_order"),
    "device_by_pointer_alone": (
        "tqkv__is_device", r"return \[one", "return false && [one", "ASAN", "context/wrapped_device",
        "FAIL context/wrapped_device"),
    "encoder_unchecked": (
        "tqkv__check_encoder", r"\[encoder respondsToSelector.*?\)\]", "true", "ASAN", "context/other_encoder",
        "NSInvalidArgumentException|FAIL"),
    "memory_stays_in_force": (
        "tqkv__record_dispatch", r"\[encoder setThreadgroupMemoryLength", "if (launch.memory[i] > 16) [encoder setThreadgroupMemoryLength",
        "ASAN", "context/memory_in_force", "misuse"),
    "overlap_unchecked": (
        "tqkv__check_bindings", r"if \(other\)", "if (false)", "ASAN", "encode/",
        "is no error, not an argument is invalid"),
    "device_unchecked": (
        "tqkv__check_binding", r"!tqkv__is_device\(m, \[buffer device\]\)", "false", "ASAN", "context/other_device",
        "FAIL context/other_device"),
    "recorded_before_the_second_pipeline": (
        "tqkv_metal_record", r"r = tqkv__get_pipelines\(m, plan, pipelines\);\n",
        "    for (int i = 0; i < plan->n; i++) { tqkv_metal_plan one = *plan; one.n = 1; one.d[0] = plan->d[i]; "
        "if ((r = tqkv__get_pipelines(m, &one, pipelines)) != TQKV_OK) return r; "
        "tqkv__record_dispatch(m, encoder, pipelines[0], &plan->d[i]); }\n    return r;\n", "ASAN",
        "context/half_recorded", "FAIL context/half_recorded"),
    "no_barrier": (
        "tqkv__record_dispatch", r"if \(d->barrier\)", "if (false)", "ASAN", "attend/divided", "relative error"),
    "absent_buffer_unbound": (
        "tqkv__bind_all", r"b->index == TQKV_METAL_ONLY_CHECKED", "b->index == TQKV_METAL_ONLY_CHECKED || !b->size", "ASAN",
        "attend/divided", "misuse"),
    "unused_buffer_too_short": (
        "tqkv__open_device", r"newBufferWithLength:sizeof\(tqkv__batch_item\)", "newBufferWithLength:16", "ASAN",
        "attend/divided", "misuse"),
    "pipeline_limit_ignored": (
        "tqkv__record_dispatch", r"p->max_threads, &launch", "1024, &launch", "ASAN", "context/devices", "misuse"),
    "stale_tables_accepted": (
        "tqkv__check_tables", r"if \(stale\)", "if (false)", "ASAN", "context/stale/signs", "FAIL context/stale/signs"),
    "compiled_with_fast_math": (
        "tqkv__compile", r"    \[options setFastMathEnabled:NO\];\n", "", "ASAN", "context/source/alone", "misuse"),
    "options_leaked": (
        "tqkv__compile", r"    TQKV__RELEASE\(options\);\n", "", "ASAN", "context/source/alone", "leaked"),
    "refused_library_kept": (
        "tqkv__open_library", r"    tqkv__drop_library\(m\);\n", "", "ASAN", "context/source/stale", "FAIL context/source/stale"),
    "fallback_not_said": (
        "tqkv__fell_back", r'return tqkv__fail\(m, r, "library refused: %s; compiled from source", library_text\)',
        "return r", "ASAN", "context/source/truncated", "FAIL context/source/truncated"),
    "fallback_from_a_wrong_argument": (
        "tqkv__open_library", r"\(r != TQKV_METAL_ERROR && r != TQKV_TABLE_MISMATCH\)", "r == TQKV_OK", "ASAN",
        "context/source/alone", "FAIL context/source/alone"),
    "no_fallback_from_stale_tables": (
        "tqkv__open_library", r"r != TQKV_METAL_ERROR && r != TQKV_TABLE_MISMATCH", "r != TQKV_METAL_ERROR", "ASAN",
        "context/source/stale", "FAIL context/source/stale"),
    "failure_of_the_gpu_ignored": (
        "tqkv__run_as", r"if \(\[commands status\] == MTLCommandBufferStatusCompleted\)", "if (true)", "ASAN",
        "context/failures", "FAIL context/failures"),
    "encoder_left_open": (
        "tqkv__run_as", r"        \[encoder endEncoding\];\n", "", "ASAN", "rotate/d64", "misuse"),
    "append_that_failed_counts": (
        "tqkv_metal_cache_append", r"if \(\(r = (.*)\) == TQKV_OK\) tqkv_metal_cache_appended",
        r"r = \1; tqkv_metal_cache_appended", "ASAN", "refusals/cache", "FAIL refusals/cache"),
}


def plant(bug, folder):
    """Writes the copy; empty string, or why the bug no longer fits the file."""
    function, pattern, replacement = BUGS[bug][:3]
    with open("tqkv_metal.m", encoding="utf-8") as f:
        source = f.read()
    body = re.search(r"^[\w <>]+[ *]%s\([^;{]*\)\n{\n.*?^}\n" % function, source, re.M | re.S)
    if not body:
        return f"there is no {function}: bugs.py is out of date"
    changed, n = re.subn(pattern, replacement, body.group(0))
    if not n:
        return f"'{pattern}' is not in {function}: bugs.py is out of date"
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/tqkv_metal.m", "w", encoding="utf-8") as f:
        f.write(source[:body.start()] + changed + source[body.end():])
    return ""


def run_bug(bug, build):
    """Empty string if the bug is caught, else what happened instead."""
    kind, cases, expected = BUGS[bug][3:]
    folder = f"{build}/bugs/{bug}"
    wrong = plant(bug, folder)
    if wrong:
        return wrong
    compiler, objects, link, run = (os.environ[kind + part] for part in ("", "_OBJECTS", "_LINK", "_RUN"))
    status, output = shell(f"{compiler} -c {folder}/tqkv_metal.m -o {folder}/tqkv_metal.o && "
                           f"clang++ {folder}/tqkv_metal.o {objects} -o {folder}/runner {link}")
    if status:
        return output
    reported, status, output = reports(run.replace("RUNNER", f"{folder}/runner") + " " + cases, expected)
    if status == 0:
        return "nothing was reported"
    return "" if reported else f"'{expected}' was not reported, but:\n{output[:2000]}"


if __name__ == "__main__":
    sys.exit(run_all(BUGS, plant, run_bug, lambda bug: f"{BUGS[bug][5]} ({BUGS[bug][3]})", os.cpu_count()))
