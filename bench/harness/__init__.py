"""What every benchmark here needs; each of them is a file of the folder above, and says itself what it measures.

`phases` the timed loops · `role` one process · `sessions` the processes of one implementation · `turns` many
implementations in turn · `quiet` who else uses the machine · `figures` · `output`; penstock.tools.bar_chart draws
"""
