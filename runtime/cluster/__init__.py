"""The cluster: its tasks, their addresses and devices, the ways to a task, and the engines that describe a cluster."""
