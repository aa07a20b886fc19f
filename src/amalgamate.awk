# Writes a joined file: FILE with each #include of a file of src/ replaced by that file, but for #include "tqkv.h". A set's
# #include "loops.h" becomes #include "tqkv.h": the joined header includes itself. A blank line comes between two files.
# usage: awk -f src/amalgamate.awk FILE
function join(path,    folder, line, name, joined)
{
    folder = path
    sub(/[^\/]*$/, "", folder)
    while ((getline line < path) > 0) {
        name = line
        if (joined && line != "")
            print ""
        joined = 0
        if (line == "#include \"loops.h\"" || line == "#include \"tqkv.h\"")
            print "#include \"tqkv.h\""
        else if (gsub(/^#include "|"$/, "", name) == 2 && (getline line_of < (folder name)) >= 0) {
            close(folder name)
            join(folder name)
            joined = 1
        } else
            print line
    }
    close(path)
}
BEGIN { join(ARGV[1]) }
