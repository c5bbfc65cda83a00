"""What a run cost, each figure with the formula that gave it."""

from __future__ import annotations

from typing import Any

from clew.errors import UserError


def cost(
    wall_s: float,
    devices: int,
    device_hour_price: float | None,
    currency: str,
    device_watts: float | None,
) -> dict[str, Any]:
    """Device hours, price and energy of a run, as ``summary.json`` keeps them under ``cost``.

    Nothing here is measured but the wall clock: the price and the watts are the caller's assumptions, and the
    formulas say so. A device is held, and paid, from the first second to the last, busy or not.

    Args:
        wall_s: seconds of the whole command, preparation and evaluation included.
        devices: GPUs held; on a CPU machine the number of machines.
        device_hour_price: price of one device for one hour, in ``currency``; None where nobody gave one.
        currency: as printed after the price, e.g. ``"USD"``.
        device_watts: assumed mean power of one device; None where nobody gave one.

    Returns:
        ``device_hours`` (hours), ``price`` (``currency``, or None), ``energy_kwh`` (or None), each with its
        ``*_formula`` text, and ``currency``.

    Raises:
        UserError: a negative number, or no device at all.
    """
    if devices < 1:
        raise UserError(f"devices is {devices}: a run holds at least 1 device")
    for name, value in (
        ("wall_s", wall_s),
        ("device_hour_price", device_hour_price),
        ("device_watts", device_watts),
    ):
        if value is not None and not value >= 0:  # `not >=` also catches nan
            raise UserError(f"{name} is {value}: give a number that is not negative")
    hours = wall_s * devices / 3600
    noun = "device" if devices == 1 else "devices"
    result: dict[str, Any] = {
        "device_hours": hours,
        "device_hours_formula": f"{wall_s:,.0f} s of wall clock x {devices} {noun} / 3600 = {hours:.4g} h",
        "currency": currency,
        "price": None,
        "price_formula": "not known: no price of a device hour was given",
        "energy_kwh": None,
        "energy_formula": "not known: no power of a device was given",
    }
    if device_hour_price is not None:
        price = hours * device_hour_price
        result["price"] = price
        result["price_formula"] = (
            f"{hours:.4g} device hours x {device_hour_price:g} {currency} = {price:.4g} {currency} "
            f"(assumed price of a device hour)"
        )
    if device_watts is not None:
        energy = hours * device_watts / 1000
        result["energy_kwh"] = energy
        result["energy_formula"] = (
            f"{hours:.4g} device hours x {device_watts:g} W / 1000 = {energy:.4g} kWh "
            f"(assumed {device_watts:g} W a device)"
        )
    return result
