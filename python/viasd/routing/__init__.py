"""Which layers each tier runs."""

from viasd.routing.route import Route

__all__ = ["Route"]
