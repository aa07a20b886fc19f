# What the charts share. Colours that differ in lightness too.
set terminal svg size 860,540 dynamic noenhanced font "Helvetica,14" background "#ffffff"
set border 3 lc rgb "#555555"
set tics nomirror textcolor rgb "#333333"
set grid lc rgb "#dddddd" lt 1 lw 0.6
set key textcolor rgb "#333333"
set style line 1 lc rgb "#1b4f9c" lw 2 pt 7 ps 0.8
set style line 2 lc rgb "#d95f02" lw 2 pt 5 ps 0.8
set style line 3 lc rgb "#1b9e77" lw 2 pt 9 ps 0.9
set style line 4 lc rgb "#7b3294" lw 2 pt 13 ps 0.9
set style line 5 lc rgb "#c2a000" lw 2 pt 11 ps 0.9
set style line 6 lc rgb "#888888" lw 2 pt 15 ps 0.9
set style line 7 lc rgb "#00a0b0" lw 2 pt 3 ps 0.9
