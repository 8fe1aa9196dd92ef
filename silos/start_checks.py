"""Checks of a silo's name and device, whose errors name the site file's line or the option."""

from __future__ import annotations

from collections.abc import Sequence

from fedmq.config.site import Site
from fedmq.errors import InputError
from fedmq.federation.population import device_of


def check_name(name: str, silos: Sequence[str], site: Site | None) -> int:
    """The index of a silo.

    Args:
        name: its name.
        silos: names of the scenario's silos.
        site: its site file, if any.

    Raises:
        InputError: the scenario has no such silo.
    """
    if name not in silos:
        place = site.place("name") if site is not None and site.name == name else "--name"
        raise InputError(place, name, f"{silos[0]} to {silos[-1]}, as the coordinator's operator has assigned it")
    return silos.index(name)


def check_device(device: str | None, default: str, site: Site | None, index: int = 0) -> None:
    """Check that this machine has a silo's device.

    Args:
        device: from the option or the site file; None for the scenario's.
        default: the scenario's device.
        site: the silo's site file, if any.
        index: the silo's index.

    Raises:
        InputError: it does not.
    """
    try:
        device_of(device or default, index)
    except InputError as error:
        place = site.place("device") if site is not None and site.device == device else "--device"
        raise InputError(error.place if device is None else place, error.found, error.allowed) from None
