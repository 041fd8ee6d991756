"""cuRAND's generators on a GPU's streams and on the host, set to the positions of requests."""
