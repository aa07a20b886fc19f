# Input: the file that `make bench` writes, lines `chart NAME POSITIONS MICROSECONDS`.
set output output
set title "Attention of one new token by context: one thread, head_dim 128, 16 query heads over 8 KV heads"
set xlabel "positions in the cache"
set ylabel "microseconds"
set logscale x 2
set logscale y
set xrange [400:42000]
set xtics (512, 1024, 2048, 4096, 8192, 16384, 32768)
set key top left Left reverse
names = system("awk '$1 == \"chart\" && !seen[$2]++ { print $2 }' ".input)
pick(name) = sprintf("< awk '$1 == \"chart\" && $2 == \"%s\"' %s | sort -k3,3n", name, input)
plot for [i = 1:words(names)] pick(word(names, i)) using 3:4 with linespoints ls i title word(names, i)
