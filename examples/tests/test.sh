#!/bin/sh
# Runs tinylm_test, prompt_cache_test and the examples as programs. Usage: test.sh FOLDER-OF-PROGRAMS, from the top folder.
bin=$1
work=$bin/examples
data=examples/data
passed=0
failed=0
mkdir -p "$work"

# check NAME COMMAND...: passes when the command succeeds
check() {
    name=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $name"
    fi
}

# refused NAME WORDS COMMAND...: passes when the command fails, says WORDS, and prints nothing else
refused() {
    name=$1
    words=$2
    shift 2
    "$@" >"$work/out" 2>"$work/err"
    status=$?
    check "$name" test "$status" -eq 1 -a ! -s "$work/out"
    check "$name: says why" grep -Eq "$words" "$work/err"
}

# damage FROM TO OFFSET: copies a file and changes the byte at OFFSET
damage() {
    cp "$1" "$2"
    old=$(od -An -tu1 -j "$3" -N 1 "$1" | tr -d ' ')
    # shellcheck disable=SC2059
    printf "\\$(printf %o $((old ^ 16)))" | dd of="$2" bs=1 seek="$3" conv=notrunc 2>/dev/null
}

# printed PAGE PROGRAM: each line of the page's block "```printed PROGRAM" is one that it has printed to $work/PROGRAM, numbers
# to a tenth. They differ by instruction set in their last digits.
printed() {
    check "printed/$2" awk -v begin="\`\`\`printed $2" '
        function near(a, b) { return a == b || (a ~ /^[0-9]/ && b ~ /^[0-9]/ && a + 0 < 1.1 * b + 2e-6 && b + 0 < 1.1 * a + 2e-6) }
        function matches(line, other,    n, i, a, b) {
            n = split(line, a, " ")
            if (n != split(other, b, " ")) return 0
            for (i = 1; i <= n && near(a[i], b[i]);) i++
            return i > n
        }
        FNR == NR { lines[FNR] = $0; n_lines = FNR; next }
        /^```/ { inside = $0 == begin; n += inside; next }
        inside {
            for (i = 1; i <= n_lines && !matches($0, lines[i]);) i++
            if (i > n_lines) { print FILENAME ":" FNR ": not printed: " $0; bad = 1 }
        }
        END { exit bad || n != 1 }' "$work/$2" "$1"
    n_printed=$((n_printed + 1))
}
n_printed=0

"$bin/tinylm_test" >"$work/inside"
check "tinylm_test ran to its end" grep -q "score/tq8" "$work/inside"
grep "^FAIL" "$work/inside"
passed=$((passed + $(grep -c "^pass" "$work/inside")))
failed=$((failed + $(grep -c "^FAIL" "$work/inside")))

# Save and resume gives the same text as one process without a file. The long prompt fills both rings.
short="And the LORD said unto Moses, Speak unto the children of Israel, saying,"
long=$(head -c 900 $data/heldout.txt)
resume() {
    "$bin/tinylm" generate "$3" --keys "$1" --values "$2" >"$work/straight"
    "$bin/tinylm" save "$work/prompt" "$3" --keys "$1" --values "$2" >"$work/out"
    "$bin/tinylm" resume "$work/prompt" >"$work/resumed"
    check "resume/$1/$2" cmp "$work/straight" "$work/resumed"
}
resume i8 i8 "$short"
resume tq6 tq5 "$short"
resume safe safe "$long"
resume f16 tq8 "$long"
resume i8 tq4 "$long"
size=$(wc -c <"$work/prompt")
for offset in 3 9 13 20 100 $((size / 2)) $((size - 1)); do
    damage "$work/prompt" "$work/damaged" "$offset"
    refused "resume/damaged at $offset" "damaged|no file of" "$bin/tinylm" resume "$work/damaged"
done
head -c $((size - 1)) "$work/prompt" >"$work/damaged"
refused "resume/short" "damaged" "$bin/tinylm" resume "$work/damaged"
(cat "$work/prompt" && echo) >"$work/damaged"
refused "resume/long" "bytes after its end" "$bin/tinylm" resume "$work/damaged"
damage $data/tinylm.bin "$work/other_model" 4000000
refused "resume/another model" "invalid" "$bin/tinylm" resume "$work/prompt" --model "$work/other_model"
refused "resume/missing" "No such file" "$bin/tinylm" resume "$work/nothing-here"

"$bin/tinylm" speculate "$short" --tree --bytes 40 >"$work/tree"
check "speculate/tree" grep -q "the same bytes as greedy decoding" "$work/tree"
refused "speculate/tree of floats" "only tqkv caches" "$bin/tinylm" speculate x --tree --keys f32 --values f32

head -c 4000000 $data/tinylm.bin >"$work/short"
refused "model/short" "damaged" "$bin/tinylm" generate x --model "$work/short"
damage $data/tinylm.bin "$work/damaged" 12
refused "model/layers" "damaged" "$bin/tinylm" generate x --model "$work/damaged"
refused "formats/preset" "is no preset" "$bin/tinylm" generate x --preset tq4
refused "formats/half a preset" "a preset has both" "$bin/tinylm" generate x --keys small --values tq4
refused "formats/unknown" "no format" "$bin/tinylm" generate x --keys tq7
refused "formats/mixed" "do not pair" "$bin/tinylm" generate x --keys f32 --values tq4
refused "prompt/empty" "empty" "$bin/tinylm" generate ""

for threads in threads_pthread threads_openmp; do
    "$bin/$threads" >"$work/$threads"
    check "$threads" grep -q "the same bits" "$work/$threads"
done

"$bin/snapshot_file" "$work/file" "$work/half" >"$work/snapshot_file"
check "snapshot_file: half a file" grep -q "being written: the snapshot is damaged" "$work/snapshot_file"
check "snapshot_file: the old file" grep -q "before it: no error, 5 positions" "$work/snapshot_file"
check "snapshot_file: the new file" grep -q "again: no error, 8 positions" "$work/snapshot_file"

# One bit of a half is 5e-4 of a value; TQ4 has an error of 0.1 of a value, I8 of 0.006.
"$bin/latent" >"$work/latent"
check "latent" test "$(grep -c 'as expected$' "$work/latent")" -eq 6 -a "$(grep -c 'NOT' "$work/latent")" -eq 0
"$bin/pages" >"$work/pages"
check "pages" grep -q "the bits of a cache: as expected" "$work/pages"
"$bin/sparse" >"$work/sparse"
check "sparse" test "$(grep -c 'as expected$' "$work/sparse")" -eq 1
"$bin/engine" 20 >"$work/engine"
check "engine" awk '
    $2 == "f16" { n++; bad += $10 + 0 > 1e-3 || $11 != 1769472 }
    $2 == "i8" && $4 == "i8" { n++; bad += $10 + 0 < 1e-3 || $10 + 0 > 2e-2 || $11 != 958464 }
    $4 == "tq4" { n++; bad += $10 + 0 < 2e-2 || $10 + 0 > 2e-1 || $11 != 737280 }
    END { exit bad > 0 || n != 3 }' "$work/engine"
refused "engine/positions" "outside" "$bin/engine" 257

"$bin/encode_attend" >"$work/encode_attend"
check "encode_attend" grep -q "as expected" "$work/encode_attend"
printed docs/examples.md encode_attend
"$bin/real_kv" >"$work/real_kv"
# Values lose what Gaussian rows of their length do: tq2 1.1e-1, tq3 2.8e-2 to 3.1e-2, tq4 6.7e-3 to 7.8e-3, i8 3.1e-5 to 3.9e-5,
# tq8 2.8e-5 to 3.2e-5; of plain keys the same share, most of which is the constant part. Centre and scale take 63% or more of that
# away, and 70% of what tq4 does to the output. The first layers' values are far from Gaussian without the rotation.
check "real_kv" awk '
    /^layer/ { layer = $2 + 0 }
    $3 == "plain" { n++; bad += $7 < 6e-3 || $7 > 7e-3 || keys > 0.37 * $7 || output > 0.31 * $9 || $8 != values }
    $1 == "tq4" && $2 == "tq4" && NF == 10 { n++; bad += $7 < 6.5e-3 || $7 > 9e-3 || $8 > 4e-2; keys = $6; values = $7; output = $8 }
    $1 == "tq3" { n++; bad += $7 < 2.7e-2 || $7 > 3.4e-2 || $8 > 0.15 }
    $1 == "tq2" { n++; bad += $7 < 0.1 || $7 > 0.125 || $8 > 0.4 }
    $1 == "i8" && $2 == "i8" { n++; bad += $7 < 3e-5 || $7 > 5e-5 || $8 > 2e-4 }
    $1 == "tq8" { n++; bad += $7 < 2.7e-5 || $7 > 3.8e-5 || $8 > 2e-4; values8 = $7 }
    $3 == "unrotated" { n++; bad += $8 < (layer % 2 ? 1.5 : 100) * values8 }
    $1 == "f16" && $2 == "f16" { n++; bad += $6 > 3e-8 || $7 != 0 || $8 > 1e-6 }
    END { exit bad > 0 || n != 32 }' "$work/real_kv"
printed docs/examples.md real_kv
head -c 1000000 $data/pretrained_kv.bin >"$work/short"
refused "real_kv/short" "damaged" "$bin/real_kv" "$work/short"
damage $data/pretrained_kv.bin "$work/damaged" 13
refused "real_kv/layers" "damaged" "$bin/real_kv" "$work/damaged"

# All four layers have keys with a constant part: three because of a bias of the projection.
verdicts() {
    awk '/^ keys/ { stream = "keys" } /^ values/ { stream = "values" } /^ tail/ { stream = "tail" } /^  verdict/ {
        sub(/.*verdict: /, ""); sub(/:.*/, ""); print stream ": " $0 }' "$1" | sort | uniq -c | sed 's/^ *//' | paste -s -d, -
}
advice() {
    name=$1
    wanted=$2
    shift 2
    "$bin/advise" "$@" >"$work/advise"
    verdicts "$work/advise" >"$work/verdicts"
    check "advise/$name: $(cat "$work/verdicts")" test "$(cat "$work/verdicts")" = "$wanted"
}
advice no_center "1 keys: keep F16,3 keys: keys need I8,4 values: fine" --no-center --bits 2
check "advise/no pair" grep -q "no pair takes 2 bits" "$work/advise"
advice captured "4 keys: use a centre and a scale,4 values: fine"
check "advise/later" awk '/a centre of the first 256/ { n++; bad += !($(NF) < $(NF - 2)) } END { exit n != 8 || bad > 0 }' "$work/advise"
check "advise/pair" grep -q "for 5 bits a value: keys tq5, values tq4 (4.91 bits" "$work/advise"
# Around their centre rows lose what Gaussian ones do. Without it the error grows as its share of what differs shrinks.
check "advise/error" awk '/of the squared length/ { differs = 1 - $2 / 100 }
    $1 == "tq4" && NF == 7 { n++; bad += $4 < 6.5e-3 || $4 > 9e-3
        bad += differs > 0.01 ? $3 * differs < 0.85 * $4 || $3 * differs > 1.05 * $4 : $3 < 100 * $4 }
    END { exit bad > 0 || n != 8 }' "$work/advise"
# Centre and scale take the noise of the logits away, and with them four bits are enough.
check "advise/logits" awk '$1 == "logits" { table = 1; next } !NF || /verdict/ { table = 0 }
    table && $1 == "tq4" { n++; bad += !($4 < 0.75 && $4 < 1.1 * $3 && $3 < $2 && $5 <= $4 && $6 < 1) }
    END { exit bad > 0 || n != 4 }' "$work/advise"
check "advise/preset" grep -q "^preset: TQKV_SMALL" "$work/advise"
printed docs/examples.md advise
# The errors of one stream as keys and as values add up.
"$bin/advise" --shared >"$work/advise"
check "advise/shared" grep -q "for 5 bits a value: tq4 (4.41 bits" "$work/advise"
check "advise/both" awk '$1 == "tq4" && NF == 5 { n++; bad += $5 < 0.9 * ($3 + $4) || $5 > 1.1 * ($3 + $4) }
    END { exit bad > 0 || n != 4 }' "$work/advise"
# A layer of 64 dimensions has no tail of 64.
advice "tail of 64" "4 keys: use a centre and a scale,1 tail: use a centre and a scale,4 values: fine" --tail 64
advice tail "1 keys: fine,3 keys: use a centre and a scale,4 tail: use a centre and a scale,4 values: fine" --tail 32
check "advise/tail's output" awk '/^ [kvt]/ { stream = $1 } $1 == "tq4" && NF == 7 && stream == "tail:" { n++; bad += !($6 > 1e-5 && $6 < 0.2 * $5) }
    END { exit bad > 0 || n != 4 }' "$work/advise"
"$bin/advise" --shared --tail 32 >"$work/advise"
check "advise/shared and a tail" grep -q "for 5 bits a value: tq4, tail tq4 (4.82 bits" "$work/advise"
refused "advise/tail's size" "not supported" "$bin/advise" --tail 10
refused "advise/short" "damaged" "$bin/advise" "$work/short"
refused "advise/bits" "needs a number" "$bin/advise" --bits none
# Formats by layer for a number of bytes.
"$bin/advise" --bytes 20M --context 32768 >"$work/advise"
check "advise/plan" awk '/^for 20971520 bytes and 32768 positions/ { plan = 1 } plan && /^  layer/ { n++ }
    plan && /bytes, mean error/ { bytes = $1; error = $NF } END { exit !(n == 4 && bytes > 19e6 && bytes <= 20971520 && error < 0.05) }' \
    "$work/advise"
refused "advise/plan, too few bytes" "not even tq2 fits: 4 layers take" "$bin/advise" --bytes 3M --context 32768
refused "advise/plan without a context" "needs --context" "$bin/advise" --bytes 3M
refused "advise/bytes" "2G or 512M" "$bin/advise" --bytes 2P --context 99

# The presets lose in their order, and less than formats of as many bits without one.
"$bin/tinylm" >"$work/demo"
check "make demo is short" test "$(cat "$work/demo" "$work/engine" "$work/encode_attend" | wc -l)" -le 55
check "tinylm/demo ends" grep -q "the same bytes as greedy" "$work/demo"
check "tinylm/presets" awk '$1 ~ /^(safe|small|tiny)$/ || ($1 == "tq4" && $2 == "tq4") { kl[$1] = $7; n++ }
    END { exit !(n == 4 && kl["safe"] < 2e-5 && kl["safe"] < kl["small"] && kl["small"] < kl["tiny"] && kl["tiny"] < kl["tq4"] / 5) }' "$work/demo"

# What a profile learned takes a planted constant part away.
"$bin/tinylm" learn "$work/profile" --windows 1 --bias 20
"$bin/tinylm" score --windows 1 --bias 20 --keys tq4 --values tq4 --profile "$work/profile" >"$work/learned"
"$bin/tinylm" score --windows 1 --bias 20 --keys tq4 --values tq4 >"$work/plain"
kl() { awk '$1 == "tq4" { print $7 }' "$1"; }
check "tinylm/profile" awk -v learned="$(kl "$work/learned")" -v plain="$(kl "$work/plain")" \
    'BEGIN { exit !(learned > 1e-4 && learned < 0.01 && plain > 0.5) }'
damage "$work/profile" "$work/damaged" 500
refused "tinylm/profile, damaged" "corrupt|damaged" "$bin/tinylm" generate x --profile "$work/damaged"
# A plan of as many bits loses less than a third of what the preset loses.
"$bin/tinylm" learn "$work/plan" --windows 2 --bits 4.19
"$bin/tinylm" score --windows 2 --preset small --profile "$work/plan" >"$work/planned"
"$bin/tinylm" score --windows 2 --preset small >"$work/plain"
check "tinylm/plan" awk '$1 == "small" { bits[++n] = $3; kl[n] = $7 } END { exit !(n == 2 && bits[1] <= bits[2] && kl[1] < kl[2] / 3) }' \
    "$work/planned" "$work/plain"
refused "tinylm/plan, too few bits" "not even tq2 fits" "$bin/tinylm" learn "$work/plan" --windows 1 --bits 2
refused "tinylm/profile, none" "corrupt|damaged" "$bin/tinylm" generate x --profile $data/heldout.txt

# With 4 first and 64 newest positions as halves less than an eighth of the divergence is left.
"$bin/tinylm" score --windows 1 --keys tq4 --values tq4 --batch 8 --first 4 --last 64 >"$work/ends"
check "tinylm/ends" awk '$1 == "tq4" { n++; bad += $7 > 6e-4 || $7 < 1e-5 } END { exit bad > 0 || n != 1 }' "$work/ends"

# What was converted is within a tenth, or 2e-4, of a cache that had its formats from the start, or better.
"$bin/pressure" >"$work/pressure"
check "pressure" awk '$3 + 0 > 0 { n++; bad += $4 > 1.1 * $5 + 2e-4 || (n > 1 && $3 >= kib); kib = $3 }
    END { exit bad > 0 || n != 4 }' "$work/pressure"
rm -rf "$work/prompts" && mkdir -p "$work/prompts/small" "$work/prompts/tinylm"
"$bin/prompt_cache_test" "$work/prompts/small" >"$work/prompt_cache_test"
check "prompt_cache_test ran to its end" grep -q "processes/limit" "$work/prompt_cache_test"
grep "^FAIL" "$work/prompt_cache_test"
passed=$((passed + $(grep -c "^pass" "$work/prompt_cache_test")))
failed=$((failed + $(grep -c "^FAIL" "$work/prompt_cache_test")))
"$bin/prompt_cache" >"$work/prompt_cache" 2>"$work/err"
check "prompt_cache" test "$(grep -c 'the same logits' "$work/prompt_cache")" -eq 8
# A program and the next one: the same text, of which the second computes little; another format is another model.
for loaded in 0 896; do
    "$bin/tinylm" generate "$long" --bytes 40 --cache "$work/prompts/tinylm" >"$work/kept" 2>"$work/err"
    "$bin/tinylm" generate "$long" --bytes 40 >"$work/straight"
    check "tinylm/cache of $loaded" cmp "$work/kept" "$work/straight"
    check "tinylm/cache of $loaded: says so" grep -q "^tinylm: $loaded of 899 bytes" "$work/err"
done
"$bin/tinylm" generate "$long" --bytes 1 --keys tq5 --cache "$work/prompts/tinylm" >"$work/out" 2>"$work/err"
check "tinylm/cache of other formats" grep -q "^tinylm: 0 of 899 bytes" "$work/err"
refused "tinylm/cache of floats" "takes tqkv's formats" "$bin/tinylm" generate x --keys f32 --values f32 --cache "$work/prompts"
"$bin/checkpoints" >"$work/checkpoints"
check "checkpoints" test "$(grep -c 'the same logits' "$work/checkpoints")" -eq 4

# However many shifts: attention with turned queries is that over turned keys, on the same codes and, but for noise, on codes
# of recomputed keys. A key's error stays that of one encoding; encoded again it adds one a shift until the key is dropped. Halves
# lose more than that: they round away the small turns of slow channels, shift after shift.
"$bin/context_shift" >"$work/context_shift"
check "context_shift" awk '
    $1 == "f16" { once = 3e-8; path = 2e-5 }
    $1 == "i8" { once = 2e-5; path = 5e-4 }
    $1 == "tq4" { once = 4e-3; path = 4e-2 }
    NF == 9 && $3 > 0 {
        n++
        bad += $3 != ($2 == "middle" ? 3 : $2 > 0 ? 2 : 1) || $4 > path || $5 > once || $8 > 2 * $7
        bad += $2 == 0 ? $6 != $5 || $9 != $8 : $6 < 1.5 * $5
        bad += $2 != "middle" && $6 > ($1 == "f16" ? 3 : 1.5) * ($2 + 1) * $5
        bad += $2 == 32 && ($6 < 8 * $5 || $9 < 3 * $8)
    }
    END { exit bad > 0 || n != 24 }' "$work/context_shift"
printed docs/slices.md context_shift
# Keys with a bias, of another rotary embedding: their centre takes it away as far as it does not turn.
"$bin/context_shift" 1 >"$work/context_shift"
check "context_shift/a bias" awk '$1 == "tq4" && NF == 9 { n++; bad += $4 > 4e-2 || $5 > 2e-3 || $8 > 2 * $7 || ($2 == 32 && $9 < 3 * $8) }
    END { exit bad > 0 || n != 8 }' "$work/context_shift"
refused "context_shift/layer" "outside" "$bin/context_shift" 4

# Whichever client comes first, the pool fills: orders of arrival at random gave 3 to 6 preemptions.
# A sequence of a full pool writes what it writes alone, also after a preemption, which computes nothing again. All pages
# come back.
"$bin/server" >"$work/server"
check "server" awk '
    NF == 7 && $6 == "the" && $7 == "same" { n[$4]++; n["preempted"] += $5; bad += $3 < 1 }
    /DIFFERENT/ { bad++ }
    /saved by sharing/ { pool = $4 == $11 && $(NF - 3) + 0 > 50 }
    /^preemption saved/ { saved = $3 > 0 && $6 > 1000 * $3 && $NF == 0 }
    /at the end: 0$/ { empty = 1 }
    END { exit bad > 0 || n["finished"] != 15 || n["cancelled"] != 1 || n["preempted"] < 2 || !pool || !saved || !empty }' "$work/server"

# Where MPI is: four ranks give one rank's output, and stop with the error of one that fails or dies.
if [ -n "$MPI_RUN" ]; then
    $MPI_RUN -n 4 "$bin/mpi_context" 1024 >"$work/mpi_context"
    check "mpi_context" awk '/as expected$/ { n++ } /OTHER|WRONG/ { bad++ } END { exit bad > 0 || n != 3 }' "$work/mpi_context"
    for preset in 0 1 2; do # shares that have learned, and shares that have not
        $MPI_RUN -n 4 "$bin/mpi_context" 1024 --preset $preset >"$work/mpi_context"
        check "mpi_context/preset$preset" awk '/as expected$/ { n++ } /OTHER|WRONG/ { bad++ } END { exit bad > 0 || n != 3 }' \
            "$work/mpi_context"
    done
    for stop in fail kill; do
        $MPI_RUN -n 4 "$bin/mpi_context" 256 --$stop 2 >"$work/out" 2>"$work/err"
        check "mpi_context/$stop" test $? -ne 0
        check "mpi_context/$stop: says why" grep -Eq "rank 2: a position lies outside the store|signal 9" "$work/err"
    done
fi

check "printed/all" test "$n_printed" -eq "$(cat docs/*.md | grep -c '^```printed ')"

echo "$passed passed, $failed failed"
test "$failed" -eq 0
