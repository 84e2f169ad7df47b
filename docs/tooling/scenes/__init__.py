"""What the interactive pages play: recorded from the library itself when the site is built.

Each module here has `URI`, the file that it makes, below the site's root, and `make() -> str`, its text.
"""
