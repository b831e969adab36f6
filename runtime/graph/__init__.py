"""The graph: what to compute, described on the client.

Nothing here touches a network or a device.
"""
