# Input: a run of measure.py with --recall. Loss of the answers by depth.
set output output
set xlabel "depth of the text at which the number stands" offset 0,0.3
set ylabel "loss of an answer's token, nats"
set logscale y
set format y "%g"
set xrange [0:1]
set key below Left reverse font ",12" samplen 2
of(name) = "< awk '$1 == \"recall\" && $2 == \"".name."\" { split($4, depth, \"-\"); print (depth[1] + depth[2]) / 2, $12 }' ".input
plot of("floats") using 1:2 with linespoints ls 6 title "floats", \
     of("safe") using 1:2 with linespoints ls 3 title "safe", \
     of("small") using 1:2 with linespoints ls 1 title "small", \
     of("tiny") using 1:2 with linespoints ls 4 title "tiny", \
     of("q8_0") using 1:2 with linespoints ls 5 title "q8_0", \
     of("q4_0:rotated:exact=4+128") using 1:2 with linespoints ls 7 title "q4_0 rotated, 4 + 128 exact", \
     of("q4_0:rotated") using 1:2 with linespoints ls 2 title "q4_0 rotated"
