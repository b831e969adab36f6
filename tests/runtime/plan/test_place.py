"""The devices of operations that ask for a device which their task lacks."""

import pytest

import runtime as rt
from runtime.plan.place import Device, DeviceChoices, place_operations

CPU_ONLY = ("CPU:0", "CPU:1")
GPUS = ("CPU:0", "GPU:0", "GPU:1")


def make_choices(job: str, names: tuple[str, ...], soft: bool) -> DeviceChoices:
    """Returns the devices of one task. Tests take jobs of their own, because a process warns once."""
    kinds = [name.split(":") for name in names]
    devices = tuple(Device(job, 0, kind, int(index)) for kind, index in kinds)
    return DeviceChoices(devices, (job, 0), (job, 0), soft)


def place(requests: list[str], devices: DeviceChoices) -> list[str]:
    """Returns the short names of the devices of one operation for each request."""
    with rt.Graph().as_default():
        operations = []
        for request in requests:
            with rt.device(request):
                operations.append(rt.constant(1.0).op)
    placed = place_operations(operations, devices)
    return [f"{placed[op].type}:{placed[op].index}" for op in operations]


@pytest.mark.parametrize(("names", "best"), [(CPU_ONLY, "CPU:0"), (GPUS, "GPU:0")])
def test_soft_placement_takes_best_device(
    names: tuple[str, ...], best: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The best device of the task takes the place of a missing one, with one warning for each."""
    job = f"soft{len(names)}"
    devices = make_choices(job, names, soft=True)
    assert place(["/gpu:3", "/gpu:4", "/gpu:3", "/cpu:7", "/cpu:0"], devices) == [best] * 4 + [
        "CPU:0"
    ]
    assert place([f"/job:{job}/gpu:3"], devices) == [best]
    assert [record.getMessage() for record in caplog.records] == [
        f"There is no /job:{job}/task:0/{missing}: operations for it run on "
        f"/job:{job}/replica:0/task:0/device:{best}"
        for missing in ("gpu:3", "gpu:4", "cpu:7")
    ]


def test_hard_request_lists_devices(caplog: pytest.LogCaptureFixture) -> None:
    """A request for a missing device is refused without soft placement."""
    devices = make_choices("hard", GPUS, soft=False)
    with pytest.raises(rt.InvalidArgumentError, match=r"'/gpu:3', and there are: .*CPU:0, .*GPU:1"):
        place(["/gpu:3"], devices)
    assert not caplog.records
