# Input: the folder of the runs that bench/models/page.py reads. Divergence by bits, one model beside the other; prose.
set output output
set terminal svg size 1080,640 dynamic noenhanced font "Helvetica,14" background "#ffffff"
set xlabel "bits a cached value, norms included"
set logscale y
set format y "%g"
set xrange [2:9]
set yrange [5e-5:0.5]
set key below Left reverse font ",12" maxrows 4 samplen 2
set xlabel offset 0,0.3
# Bits and divergence of the caches whose names match the pattern.
of(model, names) = "< awk '$1 == \"cache\" && $2 ~ \"^(".names.")$\" { print $4, $6, $2 }' ".input."/".model."-prose.txt | sort -n"
preset(model) = "< awk '$1 == \"cache\" && $2 ~ \"^(safe|small|tiny)$\" { print $4, $6, $2 }' ".input."/".model."-prose.txt | sort -n"
set multiplot layout 1,2
do for [model in "smollm2 gemma3"] {
    set title (model eq "smollm2" ? "SmolLM2-135M, heads of 64" : "Gemma 3 270M, heads of 256")
    set ylabel (model eq "smollm2" ? "KL divergence from a float cache, nats a token" : "")
    plot of(model, "q8_0|q5_0:rotated|q4_0:rotated") using 1:2 with linespoints ls 2 title "q8_0; q5_0, q4_0 rotated", \
         of(model, "q8_0/q4_0:rotated") using 1:2 with points pt 4 ps 0.9 lw 2 lc rgb "#d95f02" title "q8_0 keys, q4_0 values, rotated", \
         of(model, "q4_0:rotated:exact=4[+]128") using 1:2 with points pt 8 ps 1.1 lw 2 lc rgb "#d95f02" title "q4_0 rotated, 4 + 128 exact", \
         of(model, "kivi4") using 1:2 with points ls 6 title "KIVI, 4 bits", \
         of(model, "kivi[24]:exact=4[+]128") using 1:2 with linespoints pt 14 ps 0.9 lw 2 lc rgb "#888888" title "KIVI, 4 + 128 exact", \
         of(model, "tq4/tq4") using 1:2 with points pt 6 ps 0.9 lw 2 lc rgb "#1b4f9c" title "TQ4/TQ4 without a preset", \
         of(model, "tq[46]/tq[46]:exact=4[+]128:calibrate=512") using 1:2 with points ls 3 title "TQ4/TQ4, TQ6/TQ6 as presets", \
         preset(model) using 1:2 with linespoints ls 1 title "presets", \
         preset(model) using 1:2:3 with labels right offset -0.8,-0.6 font ",12" tc rgb "#1b4f9c" notitle
}
unset multiplot
