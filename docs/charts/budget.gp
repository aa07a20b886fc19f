# Input: the folder of the runs that bench/models/page.py reads. Divergence by bits, the models beside each other; code.
set output output
set terminal svg size 1500,600 dynamic noenhanced font "Helvetica,14" background "#ffffff"
set xlabel "bits a cached value, norms included" offset 0,0.3
set logscale y
set format y "%g"
set xrange [2.3:9]
set yrange [2e-5:2]
set key below Left reverse font ",12" maxrows 3 samplen 2
# Bits and divergence of the caches whose names match the pattern.
of(model, names) = "< awk '$1 == \"cache\" && $2 ~ \"^(".names.")$\" { print $4, $6, $2 }' ".input."/".model."-code-budget.txt | sort -n"
presets = "safe|small|tiny"
set multiplot layout 1,3
do for [model in "smollm2 gemma3 qwen"] {
    set title (model eq "smollm2" ? "SmolLM2-135M, heads of 64" : model eq "gemma3" ? "Gemma 3 270M, heads of 256" : "Qwen2.5-Coder-0.5B, heads of 64")
    set ylabel (model eq "smollm2" ? "KL divergence from a float cache, nats a token" : "")
    plot of(model, "plan[0-9.]+") using 1:2 with linespoints ls 1 title "plans", \
         of(model, presets) using 1:2 with points ls 3 ps 1.2 title "presets", \
         of(model, presets) using 1:2:3 with labels right offset -0.8,-0.6 font ",12" tc rgb "#1b9e77" notitle, \
         of(model, "kvarn.*") using 1:2 with points ls 4 title "KVarN, 4 + 128 exact", \
         of(model, "trellis.*exact=4[+]128") using 1:2 with points ls 5 title "trellis, 4 + 128 exact", \
         of(model, "q4_0.*|q8_0") using 1:2 with points ls 2 title "q4_0 rotated, 4 + 128 exact; q8_0"
}
unset multiplot
