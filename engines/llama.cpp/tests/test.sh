#!/bin/sh
# Runs llama_test with each model and some formats: test.sh BACKEND LLAMA_TEST MODELS BIN PYTHON. The bounds are the largest mean
# divergence of a step in nats: f16/f16 shows that nothing but rounding is lost on the way.
backend=$1 test=$2 models=$3 bin=$4 python=$5
status=0
run() { # FORMATS MODEL BOUND
    echo "-- $1, $2"
    TQKV=$1 TQKV_LOG=0 "$test" "$backend" "$models/$2.gguf" "$3" 2>/dev/null || status=1
}
run f16/f16 llama 1e-5
run f16/f16 biased 1e-5
run f16/f16 gemma3 1e-5
run safe llama 1e-3
run small llama 4e-3
run small biased 2e-2
run small gemma3 1e-3
run tiny gemma3 5e-3
server() { # FORMATS MODEL TOLERANCE of the logarithm of a probability
    echo "-- llama-server, $1, $2"
    "$python" "$(dirname "$0")/server_test.py" "$bin" "$backend" "$models/$2.gguf" "$1" "$3" || status=1
}
server f16/f16 llama 0.02
server small llama 0.5
server f16/f16 gemma3 0.02
server small gemma3 0.1
says() { # WHAT, a part of the sentence, TQKV, options
    what=$1 words=$2 formats=$3
    shift 3
    TQKV=$formats GGML_BACKEND_PATH=$backend "$bin/llama-completion" -m "$models/llama.gguf" -dev TQKV -no-cnv -n 1 -p a "$@" 2>&1 |
        grep -q -- "$words" && echo "ok     $what: said in words" || { echo "FAILED $what" && status=1; }
}
says "an unknown preset" "none of safe, small" huge
says "half a pair" "none of safe, small" tq4/
says "what is in use" "keys tq5, values tq3, 4 first and 128 newest" small
says "a quantised type" "leave -ctk and -ctv at f16" small -ctk q8_0 -ctv q8_0 -fa on
says "no flash attention" "flash attention is off" small -fa off
says "a cache that is kept away" "gave this device no KV cache" small -nkvo
says "layers that are kept away" "gave this device no KV cache" small -ngl 0
exit $status
