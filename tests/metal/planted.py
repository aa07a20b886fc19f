"""What the two bugs.py share: running commands, and one bug after the other."""
import subprocess
import sys


def shell(command):
    result = subprocess.run(command, shell=True, capture_output=True, text=True, errors="replace", check=False)
    return result.returncode, result.stdout + result.stderr


def edit(path, text, replacement):
    """Replaces the one place of text in a file. Returns what is wrong, or nothing."""
    with open(path, encoding="utf-8") as f:
        source = f.read()
    if source.count(text) != 1:
        return f"'{text}' is {source.count(text)} times in {path}: bugs.py is out of date"
    with open(path, "w", encoding="utf-8") as f:
        f.write(source.replace(text, replacement))
    return ""


def run_all(bugs, run_bug, describe):
    """Runs those named on the command line, or all. run_bug(bug, build): an empty string if it is caught, else why not."""
    build, filters = sys.argv[1], sys.argv[2:]
    passed = failed = 0
    for bug in bugs:
        if filters and not any(part in bug for part in filters):
            continue
        wrong = run_bug(bug, build)
        print(f"FAIL {bug}: {wrong}" if wrong else f"caught {bug}: {describe(bug)}", flush=True)
        failed += bool(wrong)
        passed += not wrong
    print(f"{passed} passed, {failed} failed")
    return failed != 0 or passed == 0
