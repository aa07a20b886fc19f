#!/bin/sh
# Runs what BENCHMARKS.md is made from, and writes it to FILE under lines `# key: value` that say where and when.
#
# Usage: measure.sh FILE cpu    each instruction set of build/bench, with the peers in build/; then the build options
#        measure.sh FILE gpu    `make bench-gpu`, on a machine with an NVIDIA GPU
#        measure.sh FILE presets  presets alone, for docs/quality.md
#
# COMMIT=... names the commit where there is no git. PEERS=... are shared objects, FLAGS=... options of build/bench for a
# short run, THREADS=... a number of threads for the whole machine.
set -e
file=$1
kind=$2
mkdir -p "$(dirname "$file")"

measured="src shaders" # documents and tests change no speed
commit() {
    if [ -n "$COMMIT" ]; then echo "$COMMIT" && return; fi
    # shellcheck disable=SC2086
    git log -1 --date=short --format='%h of %cd' -- $measured
    # shellcheck disable=SC2086
    git diff --quiet HEAD -- $measured || echo "with changes that are not committed"
}

processor() {
    if [ -r /proc/cpuinfo ]; then
        awk -F ': *' '/^model name/ { name = $2 } /^cpu family/ { family = $2 } /^model\t/ { model = $2 }
            /^processor/ { n++ } END { printf "%s, family %s model %s, %d cores", name, family, model, n }' /proc/cpuinfo
    else
        sysctl -n machdep.cpu.brand_string
    fi
}

load() { uptime | sed 's/.*average[s]*: *//; s/[, ].*//'; }

machine() {
    if [ "$kind" = gpu ]; then
        nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1 | sed 's/, /, driver /'
    else
        processor
    fi
}

run_bench() {
    for isa in avx512 avx2 neon; do
        peers=
        # shellcheck disable=SC2153
        for peer in $PEERS; do
            case $isa/$peer in
            avx2/*-avx2.so | avx512/*-ggml.so | neon/*-ggml.so) peers="$peers --ggml $peer" ;;
            avx512/*-ik.so | neon/*-ik.so) peers="$peers --ik $peer" ;;
            esac
        done
        build/bench --isa $isa --help >/dev/null 2>&1 || continue # not one of this processor
        decode="--only decode --group 2"
        for shape in "--only encode" \
            "$decode --queries 1 --context 4096" \
            "$decode --queries 1 --context 32768 --head-dim 128" \
            "$decode --queries 8 --context 4096 --head-dim 128" \
            "$decode --queries 128 --context 4096 --head-dim 128" \
            "--only decode --group 8 --queries 1 --context 4096 --head-dim 64" \
            "--only decode --group 6 --queries 1 --context 4096 --head-dim 256" \
            "--only decode --group 64 --queries 1 --context 4096 --head-dim 512" \
            "--only latent" "--only sparse" "--only pages" "--only threads"; do
            # shellcheck disable=SC2086
            build/bench --isa $isa $peers $shape $FLAGS
        done
        # shellcheck disable=SC2086
        if [ -n "$THREADS" ]; then build/bench --isa $isa --threads "$THREADS" $FLAGS; fi
    done
    bench/build.sh build/options
}

{
    echo "# kind: $kind"
    echo "# machine: $(machine)"
    echo "# commit: $(commit | paste -s -d , - | sed 's/,/, /g')"
    echo "# date: $(date -u +%Y-%m-%d)"
    echo "# system: $(uname -s) $(uname -r | sed 's/-.*//')"
    echo "# compiler: $(${CC:-cc} --version | head -1)"
    echo "# load before: $(load)"
    begin=$(date +%s)
    case $kind in
    gpu) make --no-print-directory bench-gpu ;;
    presets) build/bench --only presets ;;
    *) run_bench ;;
    esac
    echo "# load after: $(load)"
    echo "# seconds: $(($(date +%s) - begin))"
} >"$file.part"
# Medians that bench/page.py reads: no ratio that follows from two times, no errors, nothing of each way of each peer.
sed -E -e '/^(cut|error) /d' -e '/^ratio .*(ggml_|_gb_per_s|_memcpy|_limit|\/(copy|f16|plain) )/d' \
    -e '/^ratio (attend|batch|list|torch).*\/torch /d' -e '/^ratio decode_.*_f16(_[a-z0-9]+)? /{/_peers_best_/!d;}' \
    -e '/^ratio decode_.*_fma(_[a-z0-9]+)? /d' "$file.part" >"$file"
rm "$file.part"
