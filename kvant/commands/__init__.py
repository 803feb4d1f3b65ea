"""One module per command; each offers ``register(app)`` and imports what is heavy inside its command."""
