# Input: the output of `advise --chart`: bias, then two columns (no centre, centre) for f16 i8 tq6 tq5 tq4 tq3 tq2.
set output output
set title "Keys with a constant part: the error against what differs between positions"
set xlabel "length of the constant part, in lengths of the keys"
set ylabel "error of the keys (tqkv_measure)"
set logscale x
set logscale y
set format y "%g"
set xrange [0.4:130]
set yrange [1e-8:300]
set xtics (0.5, 1, 2, 5, 10, 20, 50, 100)
set key outside right top Left reverse
set arrow 1 from 0.4, 1 to 130, 1 nohead dt 2 lc rgb "#333333"
set label 1 "noise as large as what differs" at 0.45, 1.8 font ",11" tc rgb "#333333"
column_of = "2 4 6 8 10 12 14"
names = "f16 i8 tq6 tq5 tq4 tq3 tq2"
drawn = "1 2 3 5"
plot for [i = 1:words(drawn)] input using 1:(column(int(word(column_of, int(word(drawn, i)))))) \
         with linespoints ls i title word(names, int(word(drawn, i))), \
     for [i = 1:words(drawn)] input using 1:(column(int(word(column_of, int(word(drawn, i)))) + 1)) \
         with lines ls i dt 2 title word(names, int(word(drawn, i)))." with a centre"
