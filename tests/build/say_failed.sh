#!/bin/sh
# Runs make, and where it fails says last which targets did: with -j, others print on after a failure.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
exec 8>&1
status=$({ { "$@" 2>&1 >&8 8>&- 9>&-; echo $? >&9; } | tee "$log" >&2; } 9>&1)
[ "$status" = 0 ] && exit 0
echo "failed: $(sed -n 's/^.*\*\*\* \[\([^]]*: \)\{0,1\}\([^]:]*\)\].*/\2/p' "$log" | sort -u | paste -s -d ' ' -)" >&2
exit "$status"
