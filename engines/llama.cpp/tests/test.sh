#!/bin/sh
# Runs llama_test with each model and some formats: test.sh BACKEND LLAMA_TEST MODELS. The bounds are the largest mean
# divergence of a step in nats: f16/f16 shows that nothing but rounding is lost on the way.
backend=$1 test=$2 models=$3
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
run small gemma3 1e-4
run tiny gemma3 1e-3
exit $status
