# Input: the output of `real_kv --histogram`.
set output output
set title "Values of a trained layer, scaled as the quantiser sees them"
set xlabel "scaled value (1 = the row's RMS)"
set ylabel "density"
set logscale y
set format y "%g"
set xrange [-9:9]
set yrange [1e-5:2]
set key top left Left reverse
last = real(system(sprintf("tail -n 1 %s", input)))
set object 1 rectangle from -last, graph 0 to last, graph 1 fc rgb "#eef3fa" fs solid noborder behind
set label 1 sprintf("the codebook ends at %.1f", last) at last, 1.5e-5 left offset 0.5,0 font ",11" tc rgb "#1b4f9c"
positive(x) = x > 0 ? x : NaN
plot input index 0 using 1:(positive($3)) with histeps ls 2 title "not rotated", \
     input index 0 using 1:(positive($2)) with histeps ls 1 title "rotated", \
     exp(-x**2 / 2) / sqrt(2 * pi) with lines dt 2 lw 1.5 lc rgb "#333333" title "N(0, 1)", \
     input index 1 using 1:(1.3e-5) with points pt 9 ps 0.9 lc rgb "#1b4f9c" title "the 16 levels of tq4"
