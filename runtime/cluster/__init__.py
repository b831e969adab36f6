"""The cluster: its tasks, their addresses and devices, and the engines that describe a cluster."""
