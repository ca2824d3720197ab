"""The wire format: payload kinds, fields, codecs, encryption, and the messages around them."""
