"""The server's talk with the clients: messages under way, who joins, their payloads, their tests."""
