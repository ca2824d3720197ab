"""The server's talk with the clients.

Messages under way, who joins, their payloads, their tests.
"""
