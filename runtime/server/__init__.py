"""Server, master and worker: the processes of a cluster and what they tell each other."""

from runtime.server.server import Server as Server
