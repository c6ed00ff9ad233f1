"""Groups on remote nodes: the processes in place of a group on the home node, and of the servers on a remote node."""
