#!/bin/sh
# README's commands on a machine without a compiler, as stand-ins show it: cc and the others are there when apt-get has run.
# order.sh FOLDER, from the top folder and relative to it; prints 'N passed, N failed'.
folder=$1
. tests/build/report.sh

bin=$folder/bin
rm -rf "$folder"
mkdir -p "$bin"

# stand_in NAME...: a script from standard input
stand_in() {
    script=$(cat)
    for name in "$@"; do
        printf "#!/bin/sh\nstate=%s\n%s\n" "$PWD/$folder" "$script" >"$bin/$name"
        chmod +x "$bin/$name"
    done
}
# A compiler writes a program that says so.
stand_in cc gcc c++ g++ clang clang++ <<'END'
[ -e $state/installed ] || { echo "$0: not found" >&2; exit 127; }
while [ $# -gt 1 ]; do
    if [ "$1" = -o ]; then printf '#!/bin/sh\necho ran\n' >"$2" && chmod +x "$2"; fi
    shift
done
END
stand_in dpkg <<'END'
[ -e $state/installed ]
END
# One at a time, as dpkg's lock has it. --assume-no only asks.
stand_in apt-get <<'END'
case " $* " in *" --assume-no "*) echo "Need to get 1 MB of archives."; exit 1 ;; esac
mkdir $state/lock || { echo "the lock is held"; exit 100; }
sleep 0.3
rmdir $state/lock
[ ! -e $state/offline ] || exit 100
case " $* " in *" install "*) touch $state/installed ;; esac
END
stand_in sudo <<'END'
exec "$@"
END
stand_in python3 <<'END'
[ "$2" = venv ] && mkdir -p "$3/bin" && printf '#!/bin/sh\n' >"$3/bin/pip" && chmod +x "$3/bin/pip"
exit 0
END

# without_compiler COMMAND...: on a machine where nothing is installed, what this make passes on left out
without_compiler() {
    rm -rf "$folder/installed" "$folder/lock" "$folder/build"
    env -u MAKEFLAGS -u MAKELEVEL -u MFLAGS PATH="$PWD/$bin:$PATH" "$@" BUILD="$folder/build" >"$folder/output" 2>&1
}
built() {
    rm -f "$folder/offline"
    if without_compiler "$@" && grep -q '^ran$' "$folder/output"; then return 0; fi
    cat "$folder/output"
    return 1
}

readme=$(sed -n 's/^.*`\(make [^`]*deps demo\)`.*$/\1/p; s/^    \(make [^#]*deps demo\)\( .*\)\{0,1\}$/\1/p' README.md | head -1)
accepts order/readme test -n "$readme"
accepts "order/$readme" built $readme
for goals in "deps demo" "demo deps" "-j4 demo deps" "-j2 deps-test deps demo" "-j2 deps deps-lint demo"; do
    accepts "order/make $goals" built make $goals
done

# Without a network nothing is compiled, and the last line says which goal failed.
touch "$folder/offline"
offline() {
    ! without_compiler make -j2 deps demo && ! grep -q 'not found' "$folder/output" && tail -1 "$folder/output" | grep -q ': deps\]' &&
        grep -q '^make deps could not install gcc ' "$folder/output"
}
accepts order/offline offline

finish
