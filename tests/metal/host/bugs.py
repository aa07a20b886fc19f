#!/usr/bin/env python3
"""Plants bugs in copies of tqkv_metal.m, one at a time, and checks that its tests catch each.

usage: bugs.py BUILD_FOLDER [part of a name]...

Takes from the environment, for each kind of build (ASAN, ARC, TSAN): the command that compiles (ASAN), the objects of
the runner without tqkv_metal.o (ASAN_OBJECTS), what links them (ASAN_LINK), and what runs the tests (ASAN_RUN).
"""
import os
import pathlib
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from planted import reports, run_all, shell  # noqa: E402

LOCK = r"    pthread_mutex_(un)?lock\(&m->lock\);\n"


def change(function, pattern, replacement, cases, expected="", kind="ASAN"):
    """function: in its body the regular expression is replaced. cases: to run. expected: an expression for what is reported,
    their failure if it is empty."""
    return function, pattern, replacement, kind, cases, expected or f"FAIL {cases}"


def race(function, replacement="", cases="context/threads"):
    return change(function, LOCK, replacement, cases, "data race", "TSAN")


def unreleased(function, what, cases="rotate/d64", kind="ASAN"):
    return change(function, rf"    TQKV__RELEASE\({what}\);\n", "", cases, "leaked", kind)


BUGS = {
    "insert_without_lock": race("tqkv__keep", "    (void)m;\n"),
    "look_up_without_lock": race("tqkv__get_kept"),
    "error_without_lock": race("tqkv__fail"),
    "lend_without_lock": race("tqkv__lend"),
    "free_without_lock": race("tqkv__memory_free"),
    "find_without_lock": race("tqkv_metal_find"),
    "function_leaked": unreleased("tqkv__build_from", "function"),
    "values_leaked": unreleased("tqkv__build_from", "values"),
    "state_leaked_on_failure": change(
        "tqkv__build_from", r"    TQKV__RELEASE\(state\);\n", "    state = nil;\n", "context/devices", "leaked"),
    "state_kept_under_arc": unreleased("tqkv__free_kept", "k->object", kind="ARC"),
    "block_kept_under_arc": unreleased("tqkv__memory_free", "block->buffer", "cache/one_memory", kind="ARC"),
    "pipeline_leaked_on_failure": change(
        "tqkv__get_kept", r"    else\n        tqkv__free_kept\(made\);\n", "", "context/failures", "LeakSanitizer"),
    "library_not_retained": change(
        "tqkv__load_library", r"TQKV__RETAIN\(library\)", "library", "context/libraries", "AddressSanitizer"),
    "block_leaked_on_failure": change(
        "tqkv__lend", r"        TQKV__RELEASE\(block->buffer\);\n        free\(block\);\n", "", "context/failures",
        "LeakSanitizer"),
    "block_not_given_back": change("tqkv__attend_cache", r"    tqkv__give_back\(m, block\);\n", "", "context/again"),
    "staging_shared_by_threads": change(
        "tqkv__take_staging", r"    m->staging = NULL;\n", "", "context/threads/caches", "ThreadSanitizer", kind="TSAN"),
    "staging_too_small": change("tqkv__take_staging", r"block->size < size", "false", "cache/", "AddressSanitizer|FAIL cache"),
    "state_of_encoders_not_asked": change("tqkv__new_commands", r"    \[descriptor setErrorOptions.*\n", "", "context/failures"),
    "pipelines_without_descriptor": change(
        "tqkv__new_state", r"    \[descriptor setMaxTotal.*\n", "    (void)kernel;\n", "rotate/d64",
        "pipelines without a limit"),
    "pipeline_descriptor_leaked": unreleased("tqkv__new_state", "descriptor"),
    "descriptor_leaked": unreleased("tqkv__new_commands", "descriptor"),
    "self_test_without_codes": change(
        "tqkv__try_store", r"tqkv__trial_bytes\(t, names\[0\], gpu->codes.*?\)", "TQKV_OK", "context/self_test_fails"),
    "self_test_without_decoding": change(
        "tqkv__try_store", r"tqkv__trial_bytes\(t, names\[1\].*?\)", "TQKV_OK", "context/self_test_fails"),
    "self_test_of_nothing": change(
        "tqkv__trial_values", r"wrong <= limit", "wrong <= 1e9 || wrong <= limit", "context/self_test_fails"),
    "self_test_without_choice": change(
        "tqkv__check_trial_index", r"tqkv__trial_bytes\(t, \"chosen.*?\)", "TQKV_OK", "context/self_test_fails"),
    "self_test_without_raw_rows": change(
        "tqkv__try_raw", r"tqkv__try_attention\(t, TQKV__TRIAL_QUERIES\)", "TQKV_OK", "context/self_test_fails"),
    "self_test_without_scales": change(
        "tqkv__trial_store", r"return r == TQKV_OK && s->channel_scale .*;", "return r;", "context/self_test"),
    "source_compiled_whole": change(
        "tqkv__compile", r"    \[options setPreprocessorMacros.*\n", "    (void)only;\n", "context/source/alone", "misuse"),
    "compiled_library_leaked": unreleased("tqkv__free_kept", "k->object", "context/source/alone"),
    "compiled_without_lock": race("tqkv__keep", "    (void)m;\n", cases="context/threads/source"),
    "matrices_not_given_up": change("tqkv__lost_matrices", r"    m->matrices = false;\n", "", "context/without_matrices"),
    "matrices_given_up_in_silence": change(
        "tqkv__lost_matrices", r"    tqkv__fail\(m, TQKV_OK.*\n", "", "context/without_matrices"),
    "size_unchecked": change(
        "tqkv__check_binding", r"b->at\.offset > length \|\| b->size > length - b->at\.offset", "false", "encode/",
        "is no error, not an argument is invalid|misuse: offset"),
    "offset_unchecked": change(
        "tqkv__check_binding", r"b->at\.offset % b->alignment", "false", "encode/",
        "is no error, not an argument is invalid|from 257 on of a buffer"),
    "matrices_in_another_order": change(
        "tqkv__try_pipelines", r"tqkv__has_matrices\(m\)", "m", "attend/matrices", "FAIL attend/matrices/in_another_order"),
    "device_by_pointer_alone": change("tqkv__is_device", r"return \[one", "return false && [one", "context/wrapped_device"),
    "encoder_unchecked": change(
        "tqkv__check_encoder", r"\[encoder respondsToSelector.*?\)\]", "true", "context/other_encoder",
        "NSInvalidArgumentException|FAIL"),
    "memory_stays_in_force": change(
        "tqkv__record_dispatch", r"\[encoder setThreadgroupMemoryLength",
        "if (launch.memory[i] > 16) [encoder setThreadgroupMemoryLength", "context/memory_in_force", "misuse"),
    "overlap_unchecked": change(
        "tqkv__check_bindings", r"if \(other\)", "if (false)", "encode/", "is no error, not an argument is invalid"),
    "device_unchecked": change(
        "tqkv__check_binding", r"!tqkv__is_device\(m, \[buffer device\]\)", "false", "context/other_device"),
    "recorded_before_the_second_pipeline": change(
        "tqkv_metal_record", r"r = tqkv__get_pipelines\(m, plan, pipelines\);\n",
        "    for (int i = 0; i < plan->n; i++) { tqkv_metal_plan one = *plan; one.n = 1; one.d[0] = plan->d[i]; "
        "if ((r = tqkv__get_pipelines(m, &one, pipelines)) != TQKV_OK) return r; "
        "tqkv__record_dispatch(m, encoder, pipelines[0], &plan->d[i]); }\n    return r;\n",
        "context/half_recorded"),
    "no_barrier": change("tqkv__record_dispatch", r"if \(d->barrier\)", "if (false)", "attend/divided", "relative error"),
    "absent_buffer_unbound": change(
        "tqkv__bind_all", r"b->index == TQKV_METAL_ONLY_CHECKED", "b->index == TQKV_METAL_ONLY_CHECKED || !b->size",
        "attend/divided", "misuse"),
    "unused_buffer_too_short": change(
        "tqkv__open_device", r"newBufferWithLength:sizeof\(tqkv__batch_item\)", "newBufferWithLength:16", "attend/divided",
        "misuse"),
    "pipeline_limit_ignored": change(
        "tqkv__record_dispatch", r"p->max_threads, &launch", "1024, &launch", "context/devices", "misuse"),
    "stale_tables_accepted": change("tqkv__check_tables", r"if \(stale\)", "if (false)", "context/stale/signs"),
    "compiled_with_fast_math": change(
        "tqkv__compile", r"    \[options setFastMathEnabled:NO\];\n", "", "context/source/alone", "misuse"),
    "options_leaked": unreleased("tqkv__compile", "options", "context/source/alone"),
    "refused_library_kept": change("tqkv__open_library", r"    tqkv__drop_library\(m\);\n", "", "context/stale/signs"),
    "fallback_not_said": change(
        "tqkv__fell_back", r'return tqkv__fail\(m, r, "library refused: %s; compiled from source", library_text\)', "return r",
        "context/source/truncated"),
    "fallback_from_a_wrong_argument": change(
        "tqkv__open_library", r"\(r != TQKV_METAL_ERROR && r != TQKV_TABLE_MISMATCH\)", "r == TQKV_OK", "context/source/alone"),
    "no_fallback_from_stale_tables": change(
        "tqkv__open_library", r"r != TQKV_METAL_ERROR && r != TQKV_TABLE_MISMATCH", "r != TQKV_METAL_ERROR",
        "context/stale/signs"),
    "failure_of_the_gpu_ignored": change(
        "tqkv__run_as", r"if \(\[commands status\] == MTLCommandBufferStatusCompleted\)", "if (true)", "context/failures"),
    "encoder_left_open": change("tqkv__run_as", r"        \[encoder endEncoding\];\n", "", "rotate/d64", "misuse"),
    # The stand-in reports what Metal's validation does, and what it is stricter in.
    "pipeline_not_set": change(
        "tqkv__record_dispatch", r"    \[encoder setComputePipelineState:.*\n", "", "rotate/d64",
        "misuse: a dispatch without pipeline"),
    "bindings_of_before": change(
        "tqkv__record_dispatch", r"    tqkv__bind_all\(m", "    if (!d->barrier) tqkv__bind_all(m", "attend/divided",
        "misuse: .*is not bound"),
    "half_a_simdgroup": change(
        "tqkv__record_dispatch", r"MTLSizeMake\(launch\.threads,", "MTLSizeMake(launch.threads - 16,", "rotate/d64",
        "misuse: 16 threads are no multiple"),
    "empty_grid": change("tqkv_metal_record", r" \|\| !plan->d\[0\]\.grid\[0\]", "", "refusals/calls", "misuse: a grid of"),
    "many_bytes": change("tqkv__bind_all", r"length:d->arguments\[i\]\.size", "length:5000", "rotate/d64", "misuse: setBytes of"),
    "offset_beyond": change(
        "tqkv__bind_all", r"offset:b->size \? b->at\.offset", "offset:b->size ? b->at.offset + 1000000", "rotate/d64",
        "misuse: offset"),
    "odd_memory": change(
        "tqkv__record_dispatch", r"launch\.memory\[i\] atIndex", "launch.memory[i] + 4 atIndex", "rotate/d64",
        "misuse: .*bytes of threadgroup memory"),
    "waits_before_commit": change(
        "tqkv__run_as", r"        \[commands commit\];\n", "", "rotate/d64", "misuse: wait before commit"),
    "committed_twice": change(
        "tqkv__run_as", r"        \[commands commit\];\n", r"\g<0>\g<0>", "rotate/d64", "misuse: .*committed twice"),
    "used_after_its_end": change(
        "tqkv__run_as", r"const tqkv_result r = record", r"[encoder endEncoding]; \g<0>", "rotate/d64",
        "misuse: .*after endEncoding"),
    "append_that_failed_counts": change(
        "tqkv_metal_cache_append", r"if \(\(r = (.*)\) == TQKV_OK\) tqkv_metal_cache_appended",
        r"r = \1; tqkv_metal_cache_appended", "refusals/cache"),
}


def plant(bug, folder):
    """Writes the copy; empty string, or why the bug no longer fits the file."""
    function, pattern, replacement = BUGS[bug][:3]
    source = pathlib.Path("tqkv_metal.m").read_text(encoding="utf-8")
    body = re.search(r"^[\w <>]+[ *]%s\([^;{]*\)\n{\n.*?^}\n" % function, source, re.M | re.S)
    if not body:
        return f"there is no {function}: bugs.py is out of date"
    changed, n = re.subn(pattern, replacement, body.group(0))
    if not n:
        return f"'{pattern}' is not in {function}: bugs.py is out of date"
    os.makedirs(folder, exist_ok=True)
    pathlib.Path(folder, "tqkv_metal.m").write_text(source[:body.start()] + changed + source[body.end():], encoding="utf-8")
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
