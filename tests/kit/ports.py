"""Free TCP ports for the tasks of a test."""

from harness.launch.ports import hold_ports


def free_ports(count: int) -> list[int]:
    """Returns `count` different free TCP ports, which ``hold_ports`` has found and which are held no longer."""
    held = hold_ports(count)
    ports = [holder.getsockname()[1] for holder in held]
    for holder in held:
        holder.close()
    return ports
