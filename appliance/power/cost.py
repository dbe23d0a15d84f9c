"""What energy comes to at the meter of the site, and what that costs. Pure."""

from __future__ import annotations

from typing import Any

from appliance.power.settings import PowerSettings

J_PER_KWH = 3.6e6


def hire(settings: PowerSettings, device_hours: list[float] | None) -> dict[str, Any] | None:
    """What devices cost for so long, a figure or a range, by their price for an hour. None without a price or hours."""
    price = settings.price_per_device_hour
    if price is None or device_hours is None:
        return None
    return {
        "per_device_hour": price,
        "cost": [price * hours for hours in device_hours],
        "currency": settings.currency,
    }


def bill(settings: PowerSettings, joules: float, device_s: float) -> dict[str, Any]:
    """joules: what the devices have counted in `device_s` device-seconds. {"device_kwh", "site_kwh", "cost",
    "currency"}: what they drew, and what the site drew for it, in kilowatt-hours; `cost` is None without a price."""
    site_j = (joules + settings.rest_w_per_device * device_s) * settings.pue
    price = settings.price_per_kwh
    return {
        "device_kwh": joules / J_PER_KWH,
        "site_kwh": site_j / J_PER_KWH,
        "cost": None if price is None else site_j / J_PER_KWH * price,
        "currency": settings.currency,
    }
