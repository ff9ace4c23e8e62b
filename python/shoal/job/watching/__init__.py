"""Watching a job: its metrics, its report page, and the display while it runs."""
