"""Errors that are no fault of the request: the caller may try again, or has to begin anew."""

from __future__ import annotations


class QueueFull(RuntimeError):
    """As many requests are queued as max_num_queued_reqs allows; nothing was queued, try again later (HTTP's 503)."""


class EngineDead(RuntimeError):
    """The engine has been shut down, or its thread has ended by an error (the cause); build a new one."""
