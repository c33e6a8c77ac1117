"""Notifications as users configure them."""

from __future__ import annotations

from enum import StrEnum


class NotificationForm(StrEnum):
    """Forms of the messages that a webhook gets."""

    JSON = "json"
    """All values (docs/reference/schemas/notification.json)."""
    SLACK = "slack"
    """A text, as Slack's incoming webhooks take it."""
