from penstock.integrations.ray_nodes.ray_nodes import main

main()
