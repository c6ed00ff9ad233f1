"""What the data plane costs, measured beside the other ways to do the same; no test checks speed, this does."""
