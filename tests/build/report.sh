# shellcheck shell=sh
# Counts the cases of a script that sources it. Their output goes to $folder/log.
folder=${folder:?}
passed=0
failed=0

# report NAME STATUS: counts one case; shows the log of one that failed
report() {
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $(basename "$0" .sh)/$1"
        cat "$folder/log"
    fi
}

# accepts NAME COMMAND...: the command must succeed
accepts() {
    name=$1
    shift
    "$@" >"$folder/log" 2>&1
    report "$name" $?
}

# refuses NAME TEXT COMMAND...: the command must fail with the text
refuses() {
    name=$1
    text=$2
    shift 2
    "$@" >"$folder/log" 2>&1
    status=$?
    test $status -ne 0 && unfold <"$folder/log" | grep -q -e "$text"
    report "$name" $?
}

# What `refuses` looks for texts in; for output with lines that were broken, a script defines another.
unfold() { cat; }

# The closing line, and the status of the script
finish() {
    echo "$passed passed, $failed failed"
    test "$failed" -eq 0
}
