"""Run: joining a cluster, Supervisor, monitored sessions, hooks, and the services of a chief."""
