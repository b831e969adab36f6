"""Who is in the cluster: its tasks, their addresses and devices, and the engines that tell them."""
