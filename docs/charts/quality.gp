# Input: the output of `tinylm score --all`. One line for each format of the keys, along the formats of the values.
set output output
set title "What a cache format costs: divergence of the model's predictions, by size"
set xlabel "bits a cached value, norms included (keys and values together)"
set ylabel "KL divergence from the F32 cache, nats a byte"
set logscale y
set format y "%g"
set xrange [1.5:9.2]
set yrange [1e-5:0.2]
set key outside right top title "keys in" left Left reverse
# Keys with at least as many bits as the values: fewer never pay.
pick(keys, values) = sprintf("< awk '$1 == \"%s\" && $2 ~ /^(%s)$/' %s | sort -k3,3n", keys, values, input)
same = "< awk '$1 == $2 && $1 !~ /_0|tq8/ && $3 < 16' ".input
llama = "< awk '$1 ~ /_0$/' ".input
rotated = "< awk '$1 ~ /_0r$/ { gsub(\"r\", \"\"); print }' ".input
default_pair = "< awk '$1 == \"i8\" && $2 == \"tq4\"' ".input
name(keys, values) = sprintf("%s/%s", keys, values)
plot pick("tq2", "tq2") using 3:7 with points ls 6 title "tq2", \
     pick("tq3", "tq[23]") using 3:7 with linespoints ls 7 title "tq3", \
     pick("tq4", "tq[234]") using 3:7 with linespoints ls 1 title "tq4", \
     pick("tq5", "tq[2345]") using 3:7 with linespoints ls 2 title "tq5", \
     pick("tq6", "tq[23456]") using 3:7 with linespoints ls 3 title "tq6", \
     pick("i8", "tq[234568]|i8") using 3:7 with linespoints ls 5 title "i8", \
     llama using 3:7 with points pt 3 ps 1.2 lw 2 lc rgb "#c00000" title "q8_0, q4_0", \
     rotated using 3:7 with points pt 2 ps 1.2 lw 2 lc rgb "#c00000" title "rotated", \
     rotated using 3:7:(name(strcol(1), strcol(2))) with labels left offset 0.9,0 font ",11" tc rgb "#c00000" notitle, \
     same using 3:7:(name(strcol(1), strcol(2))) with labels right offset -0.9,-0.5 font ",11" tc rgb "#333333" notitle, \
     default_pair using 3:7:(name(strcol(1), strcol(2))) with labels left offset 0.5,0.8 font ",11" tc rgb "#333333" notitle
