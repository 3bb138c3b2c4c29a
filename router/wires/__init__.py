"""The wires: how a request reaches a worker. One file or folder for each; they know no charts."""
