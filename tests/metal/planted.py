"""What the bugs.py share: running commands, and the bugs, some at once."""
import concurrent.futures
import os
import pathlib
import re
import signal
import subprocess
import sys


def shell(command):
    result = subprocess.run(command, shell=True, capture_output=True, text=True, errors="replace", check=False)
    return result.returncode, result.stdout + result.stderr


def reports(command, expected):
    """Whether the output of a command has the expression; it is not run any further than that. Also its status and output."""
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", start_new_session=True) as process:
        output = ""
        for line in process.stdout:
            output += line
            if re.search(expected, line):
                os.killpg(process.pid, signal.SIGKILL)
                return True, 1, output
        return False, process.wait(), output


def edit(path, text, replacement):
    """Replaces the one place of text in a file. Returns what is wrong, or nothing."""
    source = pathlib.Path(path).read_text(encoding="utf-8")
    if source.count(text) != 1:
        return f"'{text}' is {source.count(text)} times in {path}: bugs.py is out of date"
    pathlib.Path(path).write_text(source.replace(text, replacement), encoding="utf-8")
    return ""


def plant_all(bugs, plant, folder):
    """Only looks for the places of the bugs. A change of a source must not leave a bug behind that nothing plants."""
    wrong = [f"FAIL {bug}: {text}" for bug in bugs if (text := plant(bug, folder))]
    print(*wrong, f"{len(bugs) - len(wrong)} passed, {len(wrong)} failed", sep="\n")
    return bool(wrong)


def run_all(bugs, plant, run_bug, describe, at_once=1):
    """Runs those named on the command line, or all. plant(bug, folder): an empty string, or why it does not fit the
    sources; run_bug(bug, build): an empty string if it is caught, else why not."""
    build, filters = sys.argv[1], sys.argv[2:]
    if filters == ["--plant"]:
        return plant_all(bugs, plant, f"{build}/planted")
    chosen = [bug for bug in bugs if not filters or any(part in bug for part in filters)]
    passed = failed = 0
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for bug, wrong in zip(chosen, pool.map(lambda bug: run_bug(bug, build), chosen)):
            print(f"FAIL {bug}: {wrong}" if wrong else f"caught {bug}: {describe(bug)}", flush=True)
            failed += bool(wrong)
            passed += not wrong
    print(f"{passed} passed, {failed} failed")
    return failed != 0 or passed == 0
