"""How streams are made: dialling, the client, the server, the listener."""
