# Finds the innermost loops with multiply-adds of a function in clang's assembly for AArch64, writes each to a file and
# prints the paths: awk -v function_name=NAME -v prefix=PATH -f mca.awk FILE.s
$0 ~ "^" function_name ":" { inside = 1 }
/^\.Lfunc_end/ { inside = 0 }
!inside { next }
/^\.LBB[0-9_]+:/ { label = $1; sub(/:.*/, "", label); n = 0; fused = 0; next }
/^\t\./ { next }
/^\t/ {
    line[n++] = $0
    fused += $1 == "fmla"
    # A branch back to a label, with no other label between the two, ends an innermost loop.
    if ($1 ~ /^(b\..*|b|cbz|cbnz|tbz|tbnz)$/ && $NF == label && fused > 0) {
        path = prefix "_" fused ".s"
        while (path in written) { sub(/\.s$/, "x.s", path) }
        written[path] = 1
        for (i = 0; i < n; i++) print line[i] > path
        close(path)
        print path
    }
}
