# Input: a file of bench/results of a processor. One token over 32,768 positions of head_dim 128, by each instruction set.
set output output
machine = system("sed -n 's/^# machine: //p' ".input)
set title "One token over 32,768 positions: one thread, head_dim 128, 16 query heads over 8 KV heads\n".machine
set ylabel "milliseconds"
set yrange [0:*]
set ytics 5
set style data histogram
set style histogram clustered gap 1
set style fill solid noborder
set bmargin 3
set key top left Left reverse
set xtics norotate font ",11"
rows = "tq2:TQ2 tq3:TQ3 tq4:TQ4 tq5:TQ5 tq6:TQ6 i8:I8 default:I8/TQ4 f16:F16 ggml_flash_q8_0_contiguous:ggml~q8_0 ggml_flash_f16_contiguous:ggml~f16"
of_set(isa) = "< awk -v rows='".rows."' -v isa=".isa." '/^instruction set/ { set = $3; sub(/,/, \"\", set) } /^[a-z]/ { on = set == isa && /^attention: head_dim 128, 32768 positions, group 2, 1 query/ } on { time[$1] = $2 } END { n = split(rows, r, \" \"); for (i = 1; i <= n; i++) { split(r[i], p, \":\"); sub(/~/, \" \", p[2]); print \"\\\"\" p[2] \"\\\"\", (p[1] in time) ? time[p[1]] : \"?\" } }' ".input
plot of_set("avx512") using ($2/1000):xtic(1) ls 1 title "AVX-512", of_set("avx2") using ($2/1000) ls 2 title "AVX2"
