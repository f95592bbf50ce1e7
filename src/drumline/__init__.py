"""drumline runs one model on many worker processes as if it were one."""
