"""What sub-commands share. A folder, so that none of it is taken for a sub-command."""
