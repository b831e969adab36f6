"""The server of a task: its ports, the calls of the control plane, sessions of remote clients, and figures."""

from runtime.server.server import Server as Server
