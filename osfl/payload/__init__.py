"""The wire format: payload kinds, fields, encoding, encryption, and the messages around them."""
