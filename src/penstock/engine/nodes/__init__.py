"""Groups on other nodes: what stands in their place on the home node, and in the servers' place on theirs."""
