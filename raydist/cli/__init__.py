"""The `raydist` command, in the user's shell: one file per sub-command. Imports ray or torch only inside commands."""
