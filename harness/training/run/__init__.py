"""Run: what a training program makes of its cluster, its graph and its sessions."""
