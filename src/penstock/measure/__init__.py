"""What goes over the wire: bytes by message and field, how little of it is new, and the same for other formats.

`live` and `recording` say where frames come from, `frames` takes them apart, `tally` counts, `report` tells;
`comparison` and `collective` are the experiments. Leaves to the native core: looking on without being noticed.
"""
