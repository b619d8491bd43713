"""What a student calls from a notebook: `from checks import check, hint, start, ...`. The names are gathered in
checks/__init__.py."""
