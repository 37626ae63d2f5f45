"""The user's shell: one noun a file, typer and rich. Imports ray or torch only inside commands."""
