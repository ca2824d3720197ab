"""Message exchange between server and clients: join, payload collection, evaluation."""
