"""What goes wrong with tasks."""


class Unsupported(Exception):
    """A task asks what no OpenAI API answers; the message says what."""
