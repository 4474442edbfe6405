"""A cluster in one process and without sockets: the real rooms, simulated cores and wires, time by hand."""
