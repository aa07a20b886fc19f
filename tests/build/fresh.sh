#!/bin/sh
# README's commands word for word on a fresh Debian: fresh.sh FOLDER [COMMAND...]. Needs debootstrap, root and the network; each
# command gets a root of its own, with git, make and certificates. Prints the time, the bytes on disk, and 'N passed, N failed'.
folder=$1
shift
. tests/build/report.sh

base=$folder/base
suite=${SUITE:-bookworm}
mkdir -p "$folder"
if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
    echo "skipped: needs root and debootstrap"
    exit 0
fi

# This machine's way to the network goes along: names, proxies, authorities.
network=$(env | grep -iE '^(https?_proxy|no_proxy|PIP_CERT)=')
make_base() {
    rm -rf "$base"
    debootstrap --variant=minbase "$suite" "$base" || return 1
    cp /etc/resolv.conf "$base/etc"
    chroot "$base" sh -c 'apt-get update && apt-get install -y --no-install-recommends git make ca-certificates' || return 1
    cp -r /usr/local/share/ca-certificates "$base/usr/local/share"
    chroot "$base" update-ca-certificates && touch "$base/ready"
}
if [ ! -e "$base/ready" ] && ! make_base >"$folder/log" 2>&1; then
    report root 1
    finish
    exit 1
fi

kilobytes() { du -skx "$1" | cut -f1; }

# run COMMAND: in a new root, with the sources that git knows as they are here
run() {
    root=$folder/root
    rm -rf --one-file-system "$root"
    cp -a "$base" "$root"
    mkdir "$root/tqkv"
    git ls-files -z | tar -c --null --ignore-failed-read -T - | tar -x -C "$root/tqkv"
    before=$(kilobytes "$root")
    start=$(date +%s)
    unshare --mount sh -c 'mount --bind /proc "$1/proc" && exec chroot "$1" env -i $3 PATH="$PATH" HOME=/root sh -c "cd /tqkv && $2"' \
        sh "$root" "$1" "$network" >"$folder/log" 2>&1
    status=$?
    cp "$folder/log" "$folder/$(echo "$1" | tr ' /' '__').log"
    echo "$1: ended with $status after $(($(date +%s) - start)) s, $((($(kilobytes "$root") - before) / 1024)) MB more on disk"
    grep -E '^(Need to get|After this)' "$folder/log"
    tail -1 "$folder/log"
    report "$1" $status
}

if [ $# -gt 0 ]; then
    for command in "$@"; do run "$command"; done
else
    grep -oE 'make -j2 deps[a-z-]* [a-z-]+' README.md | sort -u >"$folder/commands"
    while read -r command; do
        run "$command"
    done <"$folder/commands"
    run "make deps demo"
fi
finish
