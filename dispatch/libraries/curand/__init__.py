"""cuRAND's generators: handles on a GPU's streams and on the host, which stand where a request wants them."""
