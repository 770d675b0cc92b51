"""Basic types and helpers. Every other part of the package may import these; they import nothing of the package."""
