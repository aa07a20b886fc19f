# Input: lines `chart FORMAT POSITIONS MICROSECONDS`, others are passed over.
set output output
set title "Attention of one new token, one thread, by context (head_dim 128, 8 KV heads, 16 query heads)"
set xlabel "positions in the cache"
set ylabel "microseconds"
set logscale xy
set key top left Left reverse
formats = system("awk '$1 == \"chart\" && !seen[$2]++ { print $2 }' ".input)
pick(format) = sprintf("< awk '$1 == \"chart\" && $2 == \"%s\"' %s | sort -k3,3n", format, input)
plot for [i = 1:words(formats)] pick(word(formats, i)) using 3:4 with linespoints ls i title word(formats, i)
