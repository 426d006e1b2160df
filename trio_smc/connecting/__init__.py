"""How a stream comes to be: dialling, the client, the server, the listener."""
