"""What the benchmarks of the folder above share; the docstring of each benchmark says what it measures.

`phases` the timed loops · `role` one process · `sessions` the processes of one implementation · `turns` many
implementations in turn · `quiet` CPU time of foreign processes · `figures` · `output`; penstock.tools.bar_chart draws
"""
