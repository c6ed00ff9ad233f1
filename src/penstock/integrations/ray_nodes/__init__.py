"""Nodes of one server on machines of a Ray cluster: a program that `penstock serve --nnodes N --ray-address A` runs."""
