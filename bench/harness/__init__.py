"""What the benchmarks of the folder above share; the docstring of each benchmark says what it measures.

A benchmark parses its options with `run.command_line` or `run.side_by_side`, measures within a `run.Run`, records by
`Run.output`, and ends with `Run.conclude`, which prints its targets. Ways take turns by `Run.turns`.

`phases` the timed loops · `role` one process · `sessions` the processes of one implementation · `turns` many
implementations in turn · `run` options, and one run · `targets` · `quiet` CPU time of foreign processes · `figures` ·
`output` · `beside` another build · `guard` ends what a benchmark starts
"""
