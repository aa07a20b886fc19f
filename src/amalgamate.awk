# Writes src/tqkv.h with each #include of a file of src/ replaced by that file. A set's #include "tqkv.h" stays: the joined
# file includes itself. usage: awk -f src/amalgamate.awk src/tqkv.h
/^#include "/ {
    file = $2
    gsub(/"/, "", file)
    if (file != "tqkv.h" && (getline line < ("src/" file)) > 0) {
        do print line; while ((getline line < ("src/" file)) > 0)
        close("src/" file)
        next
    }
}
{ print }
